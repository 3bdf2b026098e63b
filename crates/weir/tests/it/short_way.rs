//! Calls on the short way are answered as they are on the long one, whatever comes before, between and after them.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::given::{Running, Store, configure};

/// Ends an exchange; it is not answered on the short way.
const LAST: &str = "GET /livez HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
/// Takes a connection off the short way.
const LONG: &str = "GET /livez HTTP/1.1\r\nhost: a\r\n\r\n";

fn post(path: &str, headers: &str, body: &str) -> String {
    let length = body.len();
    let json = "content-type: application/json";
    format!("POST {path} HTTP/1.1\r\nhost: a\r\n{json}\r\n{headers}content-length: {length}\r\n\r\n{body}")
}

fn send(user: &str) -> String {
    post("/api/send", "", &format!(r#"{{"userId":"{user}","message":"m"}}"#))
}

/// What a server answers to these bytes before it closes.
async fn exchange(address: SocketAddr, parts: &[&str]) -> Vec<Answer> {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.set_nodelay(true).unwrap();
    for part in parts {
        stream.write_all(part.as_bytes()).await.unwrap();
        // Lets it go out alone. Should two come together, the answer is the same.
        tokio::task::yield_now().await;
    }
    let mut text = Vec::new();
    stream.read_to_end(&mut text).await.unwrap();
    Answer::all(&String::from_utf8(text).unwrap())
}

#[derive(Debug, PartialEq, Eq)]
struct Answer {
    status: String,
    headers: BTreeSet<String>,
    body: String,
}

impl Answer {
    fn all(mut text: &str) -> Vec<Self> {
        let mut answers = Vec::new();
        while let Some((head, rest)) = text.split_once("\r\n\r\n") {
            let mut lines = head.lines();
            let status = lines.next().unwrap().to_owned();
            let headers: BTreeSet<String> = lines.map(str::to_owned).collect();
            let length = headers.iter().find_map(|line| line.strip_prefix("content-length: "));
            let (body, rest) = rest.split_at(length.map_or(0, |length| length.parse().unwrap()));
            answers.push(Self { status, headers, body: body.to_owned() });
            text = rest;
        }
        assert_eq!(text, "", "what is left of the answers");
        answers
    }

    /// Without what differs from call to call.
    fn tidied(mut self) -> Self {
        // Times, and so lengths, end where their zeros begin.
        for name in ["date: ", "x-request-id: ", "content-length: "] {
            let is_it = |line: &&String| line.starts_with(name);
            assert_eq!(self.headers.iter().filter(is_it).count(), 1, "{name}{:?}", self.headers);
            self.headers.retain(|line| !line.starts_with(name));
        }
        for field in ["\"timestamp\":", "\"messageId\":", "\"resetAt\":"] {
            if let Some((before, after)) = self.body.split_once(field) {
                let rest = after.split_once(['}', ',']).map_or("", |(_, rest)| rest);
                self.body = format!("{before}{rest}");
            }
        }
        self
    }
}

async fn started() -> Running {
    let server = Running::start(Store::Embedded).await;
    let client = server.client();
    configure(&client, "many", 1_000_000, 60).await;
    configure(&client, "one", 1, 60).await;
    assert_eq!(exchange(server.weir.addr(), &[&send("one"), LAST]).await.len(), 2);
    server
}

#[tokio::test]
async fn both_ways_answer_alike() {
    let server = started().await;
    let address = server.weir.addr();
    let calls = [
        send("one"),
        send("nobody"),
        post("/api/send", "", "{"),
        post("/api/send", "", ""),
        post("/api/send", "content-encoding: gzip\r\n", "{}"),
        post("/api/send", "x-request-id: mine\r\n", r#"{"userId":"u"}"#)
            .replace("application/json", "text/plain"),
        post("/api/v1/slots", "", "{}"),
        post("/v1/requests", "", "{}"),
        post("/v1/requests", "authorization: Bearer a.b.c\r\n", "{}"),
        post("/v1/check", "", r#"{"checks":[]}"#),
        post("/v1/refund", "x-admin-key: wrong\r\n", "{}"),
        post("/v1/settle", "", "[]"),
        post("/api/v1/ai/chat", "", "{}"),
        post("/api/v1/purchases", "", r#"{"sku":"a","qty":1}"#),
        post("/api/v1/purchases", "x-user-id: u@example.com\r\n", r#"{"sku":"a","qty":2}"#),
        "GET /api/v1/purchases?sku=a HTTP/1.1\r\nhost: a\r\n\r\n".to_owned(),
        "GET /api/v1/sales HTTP/1.1\r\nhost: a\r\n\r\n".to_owned(),
        "GET /api/v1/sales?sku=%zz&sku=b HTTP/1.1\r\nhost: a\r\n\r\n".to_owned(),
    ];
    for call in calls {
        let mut short = exchange(address, &[&call, LAST]).await;
        let mut long = exchange(address, &[LONG, &call, LAST]).await;
        assert_eq!((short.len(), long.len()), (2, 3), "{call}");
        let (short, long) = (short.swap_remove(0).tidied(), long.swap_remove(1).tidied());
        assert_eq!(short, long, "{call}");
        assert!(!short.body.is_empty(), "{call}");
    }
}

#[tokio::test]
async fn calls_that_come_together_or_in_parts_are_answered_in_order() {
    let server = started().await;
    let address = server.weir.addr();
    let statuses = |answers: Vec<Answer>| -> Vec<String> {
        answers.into_iter().map(|answer| answer.status[9..12].to_owned()).collect()
    };
    let (one, many) = (send("one"), send("many"));
    let together = [&many, &one, &many, LONG, &one, &many, LAST].concat();
    assert_eq!(
        statuses(exchange(address, &[&together]).await),
        ["200", "429", "200", "200", "429", "200", "200"]
    );
    for size in [1, 7, 40, 150] {
        let parts: Vec<&str> =
            together.as_bytes().chunks(size).map(|part| str::from_utf8(part).unwrap()).collect();
        assert_eq!(
            statuses(exchange(address, &parts).await),
            ["200", "429", "200", "200", "429", "200", "200"],
            "in parts of {size}"
        );
    }
    let (head, body) = many.split_once("\r\n\r\n").unwrap();
    let in_two = [&format!("{head}\r\n\r\n")[..], body, &one, LAST];
    assert_eq!(statuses(exchange(address, &in_two).await), ["200", "429", "200"]);
}

#[tokio::test]
async fn a_length_that_could_be_read_in_two_ways_ends_the_connection() {
    let server = started().await;
    let address = server.weir.addr();
    let hidden = send("many");
    for lines in [
        "content-length: 2\r\ncontent-length: 300",
        "content-length: 2, 300",
        "content-length: +2",
        "content-length : 2",
        "content-length: 2\r\ntransfer-encoding: chunked",
        "transfer-encoding: identity\r\ncontent-length: 2",
        "content-length: 2\r\n 1",
    ] {
        let head = format!(
            "POST /api/send HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n{lines}\r\n\r\n"
        );
        let answers = exchange(address, &[&format!("{head}{{}}{hidden}")]).await;
        assert!(answers.len() <= 1, "{lines}: {answers:?}");
        assert!(answers.iter().all(|answer| answer.status.contains(" 400 ")), "{lines}: {answers:?}");
    }
}

#[tokio::test]
async fn calls_of_other_kinds_get_what_they_ask_of_the_connection() {
    let server = started().await;
    let address = server.weir.addr();
    let closing = send("many").replace("host: a", "host: a\r\nconnection: close");
    let answers = exchange(address, &[&send("many"), &closing]).await;
    assert_eq!(answers.len(), 2, "it closes after the second");
    assert!(answers[1].headers.contains("connection: close"), "{:?}", answers[1]);
    let old = send("many").replace("HTTP/1.1", "HTTP/1.0");
    assert_eq!(exchange(address, &[&old]).await.len(), 1, "HTTP/1.0 closes");
    let expecting = send("many").replace("host: a", "host: a\r\nexpect: 100-continue");
    let answers = exchange(address, &[&expecting, LAST]).await;
    assert!(answers.iter().any(|answer| answer.status.contains(" 200 ")), "{answers:?}");
    let chunked = "POST /api/send HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n\
                   transfer-encoding: chunked\r\n\r\n1d\r\n{\"userId\":\"many\",\"message\":1}\r\n0\r\n\r\n";
    let answers = exchange(address, &[&send("many"), chunked, LAST]).await;
    assert_eq!(answers.len(), 3);
    assert!(answers[1].body.contains("message must be a string"), "{:?}", answers[1]);
    let large = "x".repeat(100_000);
    let large = post("/api/send", "", &format!(r#"{{"userId":"many","message":"{large}"}}"#));
    let answers = exchange(address, &[&large, LAST]).await;
    assert!(answers[0].status.contains(" 200 "), "{:?}", answers[0]);
}

#[tokio::test]
async fn a_caller_that_sends_half_a_call_is_not_waited_for() {
    let settings = [("WEIR_HTTP_READ_TIMEOUT", "200ms")];
    let server = Running::start_with(Store::Embedded, &settings).await;
    let call = send("many");
    for half in ["", "POST /api/send HT", &call[..call.len() - 3]] {
        let answers = exchange(server.weir.addr(), &[half]).await;
        assert!(answers.iter().all(|answer| answer.status.contains(" 408 ")), "{half}: {answers:?}");
    }
}
