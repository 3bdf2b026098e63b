//! Request smuggling: whatever a caller or an upstream sends, nobody after Weir reads it as one message more than Weir did.
//!
//! Callers send requests that could be read in two ways, each with a second request hidden in what may be its body. The
//! upstream keeps every byte that it gets. In the other direction the upstream hides a second answer behind its first,
//! and other callers follow over the same connections.

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
use super::fixtures::{Gate, answer, token};
use crate::fixtures::PATIENCE;

/// What must come of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    /// It reaches the upstream, with the hidden request as its body, and is answered.
    Answered,
    /// It is refused, and does not reach the upstream as a whole request.
    Refused,
    /// One of the two.
    Either,
    /// It is refused, or its connection is closed without an answer.
    Closed,
}

/// How many requests are under way at once.
const AT_ONCE: usize = 16;

/// How many callers follow another: connections to the upstream may be kept for each thread of the server, and one of these
/// callers meets the thread of the first.
const FOLLOWERS: usize = 8;

/// The path of the hidden request, which nobody must ever ask for.
const HIDDEN_PATH: &str = "/api/v1/ai/HIDDEN";

/// A server before an upstream that keeps what it gets.
struct Stage {
    gate: Gate,
    recorder: Recorder,
    credentials: String,
}

impl Stage {
    async fn start() -> Self {
        let recorder = Recorder::start(upstream_answer).await;
        // What a caller or an upstream leaves open ends soon.
        let settings = [("WEIR_HTTP_READ_TIMEOUT", "2s"), ("WEIR_AI_IDLE_TIMEOUT", "1s")];
        let gate = Gate::before(Listener::start().await, &recorder.url(), &settings).await;
        let credentials = format!("Host: gate.example\r\nAuthorization: Bearer {}\r\n", gate.token());
        Self { gate, recorder, credentials }
    }

    fn address(&self) -> SocketAddr {
        self.gate.running.weir.addr()
    }

    fn hidden(&self) -> String {
        format!("GET {HIDDEN_PATH} HTTP/1.1\r\n{}\r\n", self.credentials)
    }

    /// A request of the table as it is sent.
    fn request(&self, template: &str, path: &str) -> String {
        let hidden = self.hidden();
        template
            .replace("{post}", "POST {path} HTTP/1.1\r\n{credentials}")
            .replace("{path}", path)
            .replace("{credentials}", &self.credentials)
            .replace("{token}", &self.gate.token())
            .replace("{length}", &hidden.len().to_string())
            .replace("{longer}", &(hidden.len() + "0\r\n\r\n".len()).to_string())
            .replace("{hex}", &format!("{:x}", hidden.len()))
            .replace("{hidden}", &hidden)
    }

    /// What came of a request that was sent in pieces of so many bytes.
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

/// Sends bytes in pieces of so many, and returns what comes until the server closes the connection.
async fn exchange(address: SocketAddr, bytes: &[u8], size: usize) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.set_nodelay(true).unwrap();
    for piece in bytes.chunks(size) {
        // A server that refuses may close before it has read everything.
        if stream.write_all(piece).await.is_err() {
            break;
        }
        tokio::task::yield_now().await;
    }
    let mut received = Vec::new();
    let reading = async { while let Ok(1..) = stream.read_buf(&mut received).await {} };
    tokio::time::timeout(PATIENCE, reading).await.expect("the server closes the connection");
    received
}

/// What the upstream answers: something hostile where the path asks for it, else the path.
fn upstream_answer(request: &Message) -> Vec<u8> {
    let path = request.target();
    let Some(number) = path.strip_prefix("/api/v1/ai/hostile/") else { return answer(path).into() };
    let hostile = HOSTILE_ANSWERS[number.parse::<usize>().unwrap()];
    hostile.replace("{hidden}", &answer("HIDDEN")).into()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_request_is_read_as_two() {
    let stage = Stage::start().await;
    let stage = &stage;
    let numbered = REQUESTS.iter().enumerate();
    let cases = numbered.flat_map(|(n, case)| [usize::MAX, 7, 1].map(|size| (n, case, size)));
    let checks = stream::iter(cases).map(|(n, (expected, template), size)| async move {
        stage.check(*expected, template, &format!("/api/v1/ai/case-{n}-{size}"), size).await
    });
    let results: Vec<_> = checks.buffer_unordered(AT_ONCE).collect().await;
    let mut wrong: Vec<String> = results.into_iter().filter_map(Result::err).collect();
    wrong.extend(stage.recorder.problems());
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
    let paths = stage.recorder.paths();
    assert!(paths.iter().all(|path| path.starts_with("/api/v1/ai/case-")), "{paths:?}");
}

#[tokio::test]
async fn a_request_with_a_length_and_chunks_is_the_last_of_its_connection() {
    let stage = Stage::start().await;
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
async fn trailers_add_nothing_that_only_a_head_may_say() {
    let stage = Stage::start().await;
    let names = ["Content-Length", "Transfer-Encoding", "Host", "Authorization", "X-Weir-User", "Connection"];
    let trailers: String = names.iter().map(|name| format!("{name}: 5\r\n")).collect();
    let announced = names.join(", ");
    let template = format!(
        "{{post}}TE: trailers\r\nTrailer: X-Sum, {announced}\r\nTransfer-Encoding: chunked\r\n\r\n\
         {{hex}}\r\n{{hidden}}\r\n0\r\nX-Sum: 7\r\n{trailers}\r\n"
    );
    stage.check(Answered, &template, "/api/v1/ai/trailers", usize::MAX).await.unwrap();
    let requests = stage.recorder.requests_of("/api/v1/ai/trailers");
    let left: Vec<_> = requests[0].trailers.iter().map(|(name, _)| name.to_lowercase()).collect();
    assert_eq!(left, ["x-sum"]);
    assert_eq!(stage.recorder.problems(), Vec::<String>::new());
}

#[tokio::test]
async fn what_a_caller_says_of_its_connection_changes_nothing_of_ours() {
    let stage = Stage::start().await;
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
    let stage = Stage::start().await;
    for (n, place) in
        ["http://evil.example", "http://a:b@evil.example:81", "https://evil.example"].iter().enumerate()
    {
        let path = format!("/api/v1/ai/absolute-{n}");
        let template = format!(
            "POST {place}{{path}} HTTP/1.1\r\n{{credentials}}Content-Length: {{length}}\r\n\r\n{{hidden}}"
        );
        stage.check(Answered, &template, &path, usize::MAX).await.unwrap();
        let request = &stage.recorder.requests_of(&path)[0];
        assert_eq!(request.all("host"), [&stage.recorder.url()[7..]], "{place}");
    }
}

#[tokio::test]
async fn requests_that_follow_each_other_are_as_many_behind_weir_as_before_it() {
    let stage = Stage::start().await;
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

/// Answers of an upstream that hide another one, in which a second caller could find what is not for it.
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

/// What a second caller asks for after a hostile answer, and what must be the only answer to it.
struct SecondCall {
    request: String,
    path: String,
}

impl SecondCall {
    fn new(stage: &Stage, number: usize) -> Self {
        let path = format!("/api/v1/ai/mine-{number}");
        let token = token(&stage.gate.running, "second@b.c");
        let headers = format!("Host: gate.example\r\nAuthorization: Bearer {token}\r\nConnection: close");
        Self { request: format!("GET {path} HTTP/1.1\r\n{headers}\r\n\r\n"), path }
    }

    fn is_answered_by(&self, answer: &Message) -> bool {
        answer.status() == 200 && answer.body == self.path.as_bytes()
    }
}

/// What came of a hostile answer, and of calls that followed it.
async fn follow(stage: &Stage, method: &str, headers: &str, number: usize) -> Result<(), String> {
    let second = SecondCall::new(stage, number);
    let target = format!("/api/v1/ai/hostile/{number}");
    let first = format!("{method} {target} HTTP/1.1\r\n{}{headers}\r\n", stage.credentials);
    // Over the same connection, and so on the same thread of the server.
    let received =
        exchange(stage.address(), format!("{first}{}", second.request).as_bytes(), usize::MAX).await;
    let text = String::from_utf8_lossy(&received).into_owned();
    let is_right = match read_answers(&received).as_deref() {
        // Answers to HEAD speak of bodies that do not follow.
        _ if method == "HEAD" => {
            let count = text.matches("HTTP/1.1 ").count();
            count < 2 || count == 2 && text.ends_with(&second.path)
        }
        Ok([_, mine]) => second.is_answered_by(mine),
        Ok(answers) => answers.len() < 2,
        // The first was cut off, and with it the second.
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
async fn no_answer_is_read_as_two() {
    let stage = Stage::start().await;
    for (n, hostile) in HOSTILE_ANSWERS.iter().enumerate() {
        for (method, headers) in [("GET", ""), ("HEAD", ""), ("GET", "Connection: TE\r\nTE: trailers\r\n")] {
            let followed = follow(&stage, method, headers, n).await;
            followed.unwrap_or_else(|wrong| panic!("{method} {headers} {hostile:?}: {wrong}"));
        }
    }
    assert_eq!(stage.recorder.problems(), Vec::<String>::new());
}

#[tokio::test]
async fn an_answer_that_comes_while_nobody_has_asked_is_given_to_nobody() {
    let mut gate = Gate::start().await;
    // One caller, whose calls are all served on one thread.
    let mut caller = gate.caller().await;
    let mut idle = Vec::new();
    for n in 0..50 {
        let path = format!("/api/v1/ai/{n}");
        caller.send(gate.head(&format!("GET {path}"), &[])).await;
        let mut upstream = gate.upstream.next().await;
        assert_eq!(upstream.head().await.line(), format!("GET {path} HTTP/1.1"));
        upstream.send(answer("mine")).await;
        assert_eq!(caller.head().await.line(), "HTTP/1.1 200 OK");
        caller.expect("mine").await;
        // The connection is idle now; the next call must not find this in it.
        upstream.send(answer("HIDDEN")).await;
        idle.push(upstream);
    }
    for mut upstream in idle {
        assert_eq!(upstream.rest().await, b"", "nothing more is asked over that connection");
    }
}

#[tokio::test]
async fn an_early_answer_leaves_no_connection_on_which_the_rest_of_the_upload_is_awaited() {
    let mut gate = Gate::start().await;
    for surplus in [String::new(), answer("HIDDEN")] {
        for framing in ["Content-Length: 1000000", "Transfer-Encoding: chunked"] {
            let mut caller = gate.asking("POST /api/v1/ai/upload", &[framing]).await;
            let beginning = "1\r\nx\r\n";
            caller.send(beginning).await;
            let mut early = gate.upstream.next().await;
            early.head().await;
            early.expect(beginning).await;
            early.send(format!("{}{surplus}", answer("early"))).await;
            assert_eq!(caller.head().await.line(), "HTTP/1.1 200 OK");
            caller.expect("early").await;
            // Others do not get their calls into the body that the upstream waits for.
            for _ in 0..FOLLOWERS {
                let mut second = gate.asking("GET /api/v1/ai/second", &[]).await;
                let mut upstream = gate.upstream.next().await;
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
async fn an_upstream_that_only_announces_its_answer_is_not_listened_to_for_ever() {
    let mut gate = Gate::start().await;
    for headers in [&[][..], &["Connection: TE", "TE: trailers"]] {
        let mut caller = gate.asking("GET /api/v1/ai/x", headers).await;
        let mut upstream = gate.upstream.next().await;
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
