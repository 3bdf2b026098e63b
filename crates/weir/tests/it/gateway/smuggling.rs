//! Request smuggling: whatever a caller or an upstream sends, nobody behind Weir reads more messages in it than Weir did.
//!
//! Callers send ambiguous requests, each with a second request hidden in what may be its body. The upstream records every
//! byte that it gets. In the other direction the upstream hides a second response behind its first, and other callers
//! follow over the same connections.

mod recorder;
mod requests;

use std::net::SocketAddr;

use futures_util::{StreamExt, stream};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use weir_testkit::raw_connection::Listener;

use self::Expected::{Answered, Closed, Either, Refused};
use self::recorder::{Message, Recorder, read_answers};
use self::requests::{LENGTH_AND_CHUNKS, REQUESTS};
use super::fixtures::{TestGateway, answer, token};
use crate::fixtures::TEST_TIMEOUT;

/// The expected outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    /// It reaches the upstream, with the hidden request as its body, and is answered.
    Answered,
    /// It is refused, and does not reach the upstream as a whole request.
    Refused,
    /// Answered or refused.
    Either,
    /// It is refused, or its connection is closed without an answer.
    Closed,
}

const CONCURRENT_REQUESTS: usize = 16;

/// How many callers follow another. The server may keep idle connections per thread, and with this many callers one is
/// served on the thread of the first.
const FOLLOWERS: usize = 8;

/// The path of the hidden request, which must never be requested.
const HIDDEN_PATH: &str = "/api/v1/ai/HIDDEN";

/// A server in front of an upstream that records what it gets.
struct RecordedGateway {
    gateway: TestGateway,
    recorder: Recorder,
    credentials: String,
}

impl RecordedGateway {
    async fn start() -> Self {
        let recorder = Recorder::start(upstream_answer).await;
        // Short timeouts end what a caller or an upstream leaves open.
        let settings = [("WEIR_HTTP_READ_TIMEOUT", "2s"), ("WEIR_AI_IDLE_TIMEOUT", "1s")];
        let gateway = TestGateway::start_at(Listener::start().await, &recorder.url(), &settings).await;
        let credentials = format!("Host: gate.example\r\nAuthorization: Bearer {}\r\n", gateway.token());
        Self { gateway, recorder, credentials }
    }

    fn address(&self) -> SocketAddr {
        self.gateway.running.weir.addr()
    }

    fn hidden(&self) -> String {
        format!("GET {HIDDEN_PATH} HTTP/1.1\r\n{}\r\n", self.credentials)
    }

    /// Fills in the template of a request.
    fn request(&self, template: &str, path: &str) -> String {
        let hidden = self.hidden();
        template
            .replace("{post}", "POST {path} HTTP/1.1\r\n{credentials}")
            .replace("{path}", path)
            .replace("{credentials}", &self.credentials)
            .replace("{token}", &self.gateway.token())
            .replace("{length}", &hidden.len().to_string())
            .replace("{longer}", &(hidden.len() + "0\r\n\r\n".len()).to_string())
            .replace("{hex}", &format!("{:x}", hidden.len()))
            .replace("{hidden}", &hidden)
    }

    /// Sends a request in pieces of `size` bytes and checks its outcome.
    async fn check(&self, expected: Expected, template: &str, path: &str, size: usize) -> Result<(), String> {
        let sent = self.request(template, path);
        let received = exchange(self.address(), sent.as_bytes(), size).await;
        let show = || format!("{expected:?}: {template:?} in pieces of {size}");
        let answers = read_answers(&received)
            .map_err(|error| format!("{}: {error} in {:?}", show(), String::from_utf8_lossy(&received)))?;
        let statuses: Vec<u16> = answers.iter().map(Message::status).collect();
        let passed_on = self.recorder.requests_of(path);
        let outcome = match (&statuses[..], &passed_on[..]) {
            ([200], [_]) => Answered,
            ([400..=499 | 501 | 505], []) => Refused,
            ([], []) => Closed,
            _ => return Err(format!("{}: {statuses:?}, and the upstream got {passed_on:?}", show())),
        };
        if outcome == Answered && passed_on[0].body != self.hidden().as_bytes() {
            return Err(format!("{}: the upstream got {passed_on:?}", show()));
        }
        let is_right = match expected {
            Answered | Refused => outcome == expected,
            Either => outcome != Closed,
            Closed => outcome != Answered,
        };
        is_right.then_some(()).ok_or_else(|| format!("{}: {outcome:?}, {statuses:?}", show()))
    }
}

/// Sends bytes in pieces of `size`, and returns all that arrives until the server closes the connection.
async fn exchange(address: SocketAddr, bytes: &[u8], size: usize) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.set_nodelay(true).unwrap();
    for piece in bytes.chunks(size) {
        // The server may refuse and close before it has read everything.
        if stream.write_all(piece).await.is_err() {
            break;
        }
        tokio::task::yield_now().await;
    }
    let mut received = Vec::new();
    let reading = async { while let Ok(1..) = stream.read_buf(&mut received).await {} };
    tokio::time::timeout(TEST_TIMEOUT, reading).await.expect("the server must close the connection");
    received
}

/// The upstream's response: the hostile one that the path selects, else the path as its body.
fn upstream_answer(request: &Message) -> Vec<u8> {
    let path = request.target();
    let Some(number) = path.strip_prefix("/api/v1/ai/hostile/") else { return answer(path).into() };
    let hostile = HOSTILE_ANSWERS[number.parse::<usize>().unwrap()];
    hostile.replace("{hidden}", &answer("HIDDEN")).into()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_request_is_read_as_two() {
    let stage = RecordedGateway::start().await;
    let stage = &stage;
    let numbered = REQUESTS.iter().enumerate();
    let cases = numbered.flat_map(|(n, case)| [usize::MAX, 7, 1].map(|size| (n, case, size)));
    let checks = stream::iter(cases).map(|(n, (expected, template), size)| async move {
        stage.check(*expected, template, &format!("/api/v1/ai/case-{n}-{size}"), size).await
    });
    let results: Vec<_> = checks.buffer_unordered(CONCURRENT_REQUESTS).collect().await;
    let mut wrong: Vec<String> = results.into_iter().filter_map(Result::err).collect();
    wrong.extend(stage.recorder.problems());
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
    let paths = stage.recorder.paths();
    assert!(paths.iter().all(|path| path.starts_with("/api/v1/ai/case-")), "{paths:?}");
}

#[tokio::test]
async fn a_request_with_a_length_and_chunks_is_the_last_of_its_connection() {
    let stage = RecordedGateway::start().await;
    let mut wrong = Vec::new();
    for (n, template) in LENGTH_AND_CHUNKS.iter().enumerate() {
        for size in [usize::MAX, 1] {
            let sent = stage.request(template, &format!("/api/v1/ai/case-{n}"));
            let received = exchange(stage.address(), sent.as_bytes(), size).await;
            let answers = read_answers(&received).unwrap();
            let is_hidden_served = stage.recorder.paths().iter().any(|path| path == HIDDEN_PATH);
            if answers.len() > 1 || is_hidden_served {
                let statuses: Vec<_> = answers.iter().map(Message::status).collect();
                wrong.push(format!("{template:?} in pieces of {size}: {statuses:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
    assert_eq!(stage.recorder.problems(), Vec::<String>::new());
}

#[tokio::test]
async fn trailers_that_belong_into_a_head_are_removed() {
    let stage = RecordedGateway::start().await;
    let names = ["Content-Length", "Transfer-Encoding", "Host", "Authorization", "X-Weir-User", "Connection"];
    let trailers: String = names.iter().map(|name| format!("{name}: 5\r\n")).collect();
    let announced = names.join(", ");
    let template = format!(
        "{{post}}TE: trailers\r\nTrailer: X-Sum, {announced}\r\nTransfer-Encoding: chunked\r\n\r\n\
         {{hex}}\r\n{{hidden}}\r\n0\r\nX-Sum: 7\r\n{trailers}\r\n"
    );
    stage.check(Answered, &template, "/api/v1/ai/trailers", usize::MAX).await.unwrap();
    let requests = stage.recorder.requests_of("/api/v1/ai/trailers");
    let passed_on: Vec<_> = requests[0].trailers.iter().map(|(name, _)| name.to_lowercase()).collect();
    assert_eq!(passed_on, ["x-sum"]);
    assert_eq!(stage.recorder.problems(), Vec::<String>::new());
}

#[tokio::test]
async fn connection_headers_of_a_caller_cannot_remove_weirs_headers() {
    let stage = RecordedGateway::start().await;
    for (n, named) in ["Content-Length", "Transfer-Encoding", "Host", "X-Weir-User", "Via", "close, Host"]
        .iter()
        .enumerate()
    {
        let path = format!("/api/v1/ai/named-{n}");
        let template = format!("{{post}}Connection: {named}\r\nContent-Length: {{length}}\r\n\r\n{{hidden}}");
        stage.check(Answered, &template, &path, usize::MAX).await.unwrap();
        let request = &stage.recorder.requests_of(&path)[0];
        assert_eq!(request.all("host"), [&stage.recorder.url()[7..]], "{named}");
        assert_eq!(request.all("x-weir-user"), ["a@b.c"], "{named}");
        assert_eq!(request.all("content-length").len(), 1, "{named}");
    }
}

#[tokio::test]
async fn an_absolute_target_changes_neither_the_path_nor_the_host() {
    let stage = RecordedGateway::start().await;
    for (n, origin) in
        ["http://evil.example", "http://a:b@evil.example:81", "https://evil.example"].iter().enumerate()
    {
        let path = format!("/api/v1/ai/absolute-{n}");
        let template = format!(
            "POST {origin}{{path}} HTTP/1.1\r\n{{credentials}}Content-Length: {{length}}\r\n\r\n{{hidden}}"
        );
        stage.check(Answered, &template, &path, usize::MAX).await.unwrap();
        let request = &stage.recorder.requests_of(&path)[0];
        assert_eq!(request.all("host"), [&stage.recorder.url()[7..]], "{origin}");
    }
}

#[tokio::test]
async fn pipelined_requests_reach_the_upstream_one_by_one() {
    let stage = RecordedGateway::start().await;
    let get = format!("GET /api/v1/ai/get HTTP/1.1\r\n{}\r\n", stage.credentials);
    let post = |path: &str, framing: &str| {
        format!("POST /api/v1/ai/{path} HTTP/1.1\r\n{}{framing}", stage.credentials)
    };
    let sent = [
        get.clone(),
        post("length", "Content-Length: 2\r\n\r\nhi"),
        post("chunks", "Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"),
        "\r\n".to_owned(),
        post("empty", "Content-Length: 0\r\n\r\n"),
        get,
    ]
    .concat();
    for size in [usize::MAX, 40, 7, 1] {
        let answers = read_answers(&exchange(stage.address(), sent.as_bytes(), size).await).unwrap();
        let bodies: Vec<_> = answers.iter().map(|answer| String::from_utf8_lossy(&answer.body)).collect();
        let paths = ["get", "length", "chunks", "empty", "get"].map(|path| format!("/api/v1/ai/{path}"));
        assert_eq!(bodies, paths, "in pieces of {size}");
    }
    assert_eq!(stage.recorder.paths().len(), 20);
    assert_eq!(stage.recorder.problems(), Vec::<String>::new());
}

/// Responses of an upstream that hide a second one, which another caller could get by mistake.
const HOSTILE_ANSWERS: &[&str] = &[
    "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok{hidden}",
    "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n{hidden}",
    "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok\r\n{hidden}",
    "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200",
    "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 44\r\n\r\nok{hidden}",
    "HTTP/1.1 200 OK\r\nContent-Length: 44\r\nContent-Length: 2\r\n\r\nok{hidden}",
    "HTTP/1.1 200 OK\r\nContent-Length: 2, 44\r\n\r\nok{hidden}",
    "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok{hidden}",
    "HTTP/1.1 200 OK\r\nContent-Length: +2\r\n\r\nok{hidden}",
    "HTTP/1.1 200 OK\r\nContent-Length : 2\r\n\r\nok{hidden}",
    "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{hidden}",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n0\r\n\r\n{hidden}",
    "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n{hidden}",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-Sum: 1\r\n\r\n{hidden}",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n{hidden}",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0x2\r\nok\r\n0\r\n\r\n{hidden}",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\nok\r\n0\r\n\r\n{hidden}",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;\nxx\r\n0\r\n\r\n{hidden}",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: xchunked\r\nContent-Length: 2\r\n\r\nok{hidden}",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked, identity\r\nContent-Length: 2\r\n\r\nok{hidden}",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding:\r\n chunked\r\nContent-Length: 2\r\n\r\nok{hidden}",
    "HTTP/1.1 200 OK\r\nX-A: 1\rContent-Length: 44\r\nContent-Length: 2\r\n\r\nok{hidden}",
    "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\nok{hidden}",
    "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok{hidden}",
    "HTTP/1.1 204 No Content\r\n\r\n{hidden}",
    "HTTP/1.1 204 No Content\r\nContent-Length: 44\r\n\r\n{hidden}",
    "HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "HTTP/1.1 304 Not Modified\r\nContent-Length: 44\r\n\r\n{hidden}",
    "HTTP/1.1 304 Not Modified\r\nTransfer-Encoding: chunked\r\n\r\n2c\r\n{hidden}\r\n0\r\n\r\n",
    "HTTP/1.1 304 Not Modified\r\n\r\n{hidden}",
    "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n{hidden}",
    "HTTP/1.1 101 Switching Protocols\r\n\r\n{hidden}",
    "HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok{hidden}",
    "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok{hidden}",
    "HTTP/1.1 100 Continue\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n{hidden}",
    "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok{hidden}",
    "\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok{hidden}",
    "nonsense\r\n\r\n{hidden}",
];

/// The call of a second caller after a hostile response. The only valid response has the path as its body.
struct SecondCall {
    request: String,
    path: String,
}

impl SecondCall {
    fn new(stage: &RecordedGateway, number: usize) -> Self {
        let path = format!("/api/v1/ai/mine-{number}");
        let token = token(&stage.gateway.running, "second@b.c");
        let headers = format!("Host: gate.example\r\nAuthorization: Bearer {token}\r\nConnection: close");
        Self { request: format!("GET {path} HTTP/1.1\r\n{headers}\r\n\r\n"), path }
    }

    fn is_answered_by(&self, answer: &Message) -> bool {
        answer.status() == 200 && answer.body == self.path.as_bytes()
    }
}

/// Makes a call with a hostile response and further calls behind it. Fails if one of them gets a wrong response.
async fn follow(stage: &RecordedGateway, method: &str, headers: &str, number: usize) -> Result<(), String> {
    let second = SecondCall::new(stage, number);
    let target = format!("/api/v1/ai/hostile/{number}");
    let first = format!("{method} {target} HTTP/1.1\r\n{}{headers}\r\n", stage.credentials);
    // The second call is on the same connection, and so on the same thread of the server.
    let received =
        exchange(stage.address(), format!("{first}{}", second.request).as_bytes(), usize::MAX).await;
    let text = String::from_utf8_lossy(&received).into_owned();
    let is_right = match read_answers(&received).as_deref() {
        // Responses to HEAD announce bodies that do not follow.
        _ if method == "HEAD" => {
            let count = text.matches("HTTP/1.1 ").count();
            count < 2 || count == 2 && text.ends_with(&second.path)
        }
        Ok([_, mine]) => second.is_answered_by(mine),
        Ok(answers) => answers.len() < 2,
        // The first response was truncated, and with it the second.
        Err(_) => true,
    };
    if !is_right {
        return Err(text);
    }
    for _ in 0..FOLLOWERS {
        let received = exchange(stage.address(), second.request.as_bytes(), usize::MAX).await;
        match read_answers(&received).as_deref() {
            Ok([mine]) if second.is_answered_by(mine) => {}
            wrong => return Err(format!("{wrong:?}")),
        }
    }
    Ok(())
}

#[tokio::test]
async fn no_response_is_read_as_two() {
    let stage = RecordedGateway::start().await;
    for (n, hostile) in HOSTILE_ANSWERS.iter().enumerate() {
        for (method, headers) in [("GET", ""), ("HEAD", ""), ("GET", "Connection: TE\r\nTE: trailers\r\n")] {
            let followed = follow(&stage, method, headers, n).await;
            followed.unwrap_or_else(|wrong| panic!("{method} {headers} {hostile:?}: {wrong}"));
        }
    }
    assert_eq!(stage.recorder.problems(), Vec::<String>::new());
}

#[tokio::test]
async fn a_response_on_an_idle_connection_reaches_no_caller() {
    let mut gateway = TestGateway::start().await;
    // One caller, whose calls are all served on one thread.
    let mut caller = gateway.caller().await;
    let mut idle = Vec::new();
    for n in 0..50 {
        let path = format!("/api/v1/ai/{n}");
        caller.send(gateway.head(&format!("GET {path}"), &[])).await;
        let mut upstream = gateway.upstream.next().await;
        assert_eq!(upstream.head().await.line(), format!("GET {path} HTTP/1.1"));
        upstream.send(answer("mine")).await;
        assert_eq!(caller.head().await.line(), "HTTP/1.1 200 OK");
        caller.expect("mine").await;
        // The connection is idle now. The next call must not get this response.
        upstream.send(answer("HIDDEN")).await;
        idle.push(upstream);
    }
    for mut upstream in idle {
        assert_eq!(upstream.rest().await, b"", "the connection is not used again");
    }
}

#[tokio::test]
async fn a_connection_whose_upload_is_unfinished_is_not_used_again() {
    let mut gateway = TestGateway::start().await;
    for surplus in [String::new(), answer("HIDDEN")] {
        for framing in ["Content-Length: 1000000", "Transfer-Encoding: chunked"] {
            let mut caller = gateway.start_request("POST /api/v1/ai/upload", &[framing]).await;
            let beginning = "1\r\nx\r\n";
            caller.send(beginning).await;
            let mut early = gateway.upstream.next().await;
            early.head().await;
            early.expect(beginning).await;
            early.send(format!("{}{surplus}", answer("early"))).await;
            assert_eq!(caller.head().await.line(), "HTTP/1.1 200 OK");
            caller.expect("early").await;
            // Other calls must not be sent as the rest of the body that the upstream waits for.
            for _ in 0..FOLLOWERS {
                let mut second = gateway.start_request("GET /api/v1/ai/second", &[]).await;
                let mut upstream = gateway.upstream.next().await;
                assert_eq!(upstream.head().await.line(), "GET /api/v1/ai/second HTTP/1.1");
                upstream.send("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nyours").await;
                assert_eq!(second.head().await.line(), "HTTP/1.1 200 OK");
                second.expect("yours").await;
            }
            drop(caller);
            assert_eq!(early.rest().await, b"", "{framing}");
        }
    }
}

#[tokio::test]
async fn endless_interim_responses_are_502() {
    let mut gateway = TestGateway::start().await;
    for headers in [&[][..], &["Connection: TE", "TE: trailers"]] {
        let mut caller = gateway.start_request("GET /api/v1/ai/x", headers).await;
        let mut upstream = gateway.upstream.next().await;
        upstream.head().await;
        let announcing = tokio::spawn(async move {
            loop {
                upstream.send("HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n".repeat(100)).await;
            }
        });
        assert_eq!(caller.head().await.line(), "HTTP/1.1 502 Bad Gateway");
        announcing.abort();
    }
}
