//! A stop is graceful whatever callers do. On SIGTERM the server refuses new connections, lets what is under way go on for
//! three quarters of `http.shutdown_timeout`, cuts off the rest, drains its lanes, workers and journals, and exits with 0.
//!
//! Each test keeps a server busy in one way and stops it. What every stop must keep to is checked in one place:
//! [`Stage::stop`].

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use weir_server::auth::jwt::{self, Claims};
use weir_testkit::wait;

use crate::fixtures::{
    PATIENCE, Running, Store, audit, configure, message, on_each_engine, send_in_parallel,
};

/// For callers that have to be cut off: the shutdown timeout is short, since the test waits for most of it.
const SHORT: Duration = Duration::from_secs(4);
/// For callers that end by themselves or at once: long, so that a slow machine is not taken for a slow stop.
const LONG: Duration = Duration::from_secs(20);
/// How much longer than the shutdown timeout a process may take to be seen to have ended.
const MARGIN: Duration = Duration::from_secs(10);
/// Messages that are accepted right before a stop, and must be counted after it.
const ACKNOWLEDGED: usize = 20;
/// How many polls without progress mean that a writer is blocked.
const POLLS_WITHOUT_PROGRESS: usize = 30;

const CHUNKED_ANSWER: &str = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
const LAST_CHUNK: &str = "0\r\n\r\n";
const UPGRADE: [&str; 4] = [
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    "Sec-WebSocket-Version: 13",
];
const SWITCHING: &str =
    "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n";

/// A server and the upstream of its AI gateway, which the test plays.
struct Stage {
    server: Running,
    upstream: TcpListener,
    shutdown: Duration,
}

impl Stage {
    async fn start(shutdown: Duration) -> Self {
        Self::start_on(Store::Embedded, shutdown).await
    }

    async fn start_on(store: Store, shutdown: Duration) -> Self {
        let upstream = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let url = format!("http://{}", upstream.local_addr().unwrap());
        let timeout = format!("{}ms", shutdown.as_millis());
        let settings = [
            ("WEIR_AI_UPSTREAM", url.as_str()),
            ("WEIR_HTTP_SHUTDOWN_TIMEOUT", &timeout),
            // Nobody works on requests, so that whoever waits for one waits until the stop.
            ("WEIR_ROLES", "api,sender"),
        ];
        let server = Running::start_with(store, &settings).await;
        let client = server.client();
        configure(&client, "u", 1_000_000, 60).await;
        Self { server, upstream, shutdown }
    }

    fn token(&self) -> String {
        let secret = std::fs::read_to_string(self.server.weir.data_dir().join("jwt.secret")).unwrap();
        let claims = Claims {
            sub: "a@b.c".into(),
            exp: 4_000_000_000,
            tenant_id: Some("acme".into()),
            scope: Some("requests:create requests:read".into()),
        };
        jwt::sign(&secret, &claims).unwrap()
    }

    /// A caller that has sent these bytes, and is connected.
    async fn caller(&self, bytes: &str) -> TcpStream {
        let mut caller = TcpStream::connect(self.server.weir.addr()).await.unwrap();
        caller.set_nodelay(true).unwrap();
        caller.write_all(bytes.as_bytes()).await.unwrap();
        caller
    }

    /// A caller that has sent the head of a request, with a token.
    async fn request(&self, line: &str, headers: &[&str]) -> TcpStream {
        let lines: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
        let token = self.token();
        self.caller(&format!(
            "{line} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n{lines}\r\n"
        ))
        .await
    }

    /// The upstream's side of the next AI call, whose head has come.
    async fn upstream(&self) -> TcpStream {
        let accepted = tokio::time::timeout(PATIENCE, self.upstream.accept()).await;
        let (mut stream, _) = accepted.expect("the call reaches the upstream").unwrap();
        stream.set_nodelay(true).unwrap();
        read_head(&mut stream).await;
        stream
    }

    /// Both ends of a WebSocket through the gateway.
    async fn websocket(&self) -> (TcpStream, TcpStream) {
        let mut caller = self.request("GET /api/v1/ai/socket", &UPGRADE).await;
        let mut upstream = self.upstream().await;
        upstream.write_all(SWITCHING.as_bytes()).await.unwrap();
        let head = read_head(&mut caller).await;
        assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
        (caller, upstream)
    }

    /// Submits a request, and returns its id.
    async fn submit(&self) -> String {
        let caller = self.server.client().with_header("authorization", &format!("Bearer {}", self.token()));
        let body = json!({"idempotencyKey": "k", "requestType": "pay", "payload": {"amount": 1}});
        let answer = caller.post("/v1/requests", &body).await.unwrap();
        assert_eq!(answer.status, 202, "{:?}", answer.body);
        answer.json()["requestId"].as_str().unwrap().to_owned()
    }

    /// A caller that follows sales, of which there is one.
    async fn follow_sales(&self) -> TcpStream {
        let in_hours = |hours| {
            let at = jiff::Timestamp::now() + jiff::SignedDuration::from_hours(hours);
            at.strftime("%Y-%m-%dT%H:%M:%S%.3fZ").to_string()
        };
        let sale = json!({
            "sku": "W", "productName": "Widget", "initialStock": 5,
            "startTime": in_hours(1), "endTime": in_hours(2),
        });
        let answer = self.server.operator().post("/api/v1/products", &sale).await.unwrap();
        assert_eq!(answer.status, 201, "{:?}", answer.body);
        self.caller("GET /api/v1/sales/events HTTP/1.1\r\nHost: localhost\r\n\r\n").await
    }

    /// A bulk upload of which only the head was sent.
    async fn bulk_upload(&self) -> TcpStream {
        let config = json!({"configName": "default", "maxPerWindow": 1_000, "windowSize": "PT4S"});
        let answer = self.server.operator().post("/admin/rate-limit/config", &config).await.unwrap();
        assert_eq!(answer.status, 200, "{:?}", answer.body);
        let headers = ["Content-Type: application/x-ndjson", "Transfer-Encoding: chunked"];
        self.request("POST /api/v1/slots/bulk", &headers).await
    }

    /// Waits until the server has accepted so many connections besides those of its test.
    async fn accepts(&self, count: usize) {
        let client = self.server.client();
        wait::until("the connections are accepted", PATIENCE, async || {
            let text = client.get("/metrics").await.unwrap().body;
            let text = String::from_utf8_lossy(&text).into_owned();
            let value = text.lines().find_map(|line| line.strip_prefix("weir_http_connections "));
            value.unwrap().parse::<usize>().unwrap() > count
        })
        .await;
    }

    /// Stops the server, checks that it ends in order, and starts it again. Returns how long the stop took.
    async fn stop(&mut self) -> Duration {
        let started = self.terminate().await;
        self.ends(started).await
    }

    /// Has messages accepted, and sends SIGTERM. Returns when that was.
    async fn terminate(&self) -> Instant {
        let tally = send_in_parallel(&[self.server.client()], "u", ACKNOWLEDGED).await;
        tally.expect(200, ACKNOWLEDGED);
        let started = Instant::now();
        self.server.weir.terminate();
        started
    }

    /// Checks the end of a server that was told to stop at `started`: it exits with 0 and in time, and what was
    /// acknowledged before is counted once it is back.
    async fn ends(&mut self, started: Instant) -> Duration {
        let left = (self.shutdown + MARGIN).saturating_sub(started.elapsed());
        let status = self.server.weir.wait(left).await;
        let took = started.elapsed();
        assert!(status.success(), "{status} after {took:?} of {:?}", self.shutdown);
        self.server.weir.restart().await;
        self.counts(ACKNOWLEDGED).await;
        took
    }

    /// Checks that at least so many messages are counted, and that the audit finds nothing wrong.
    async fn counts(&self, acknowledged: usize) {
        let report = audit(&self.server.operator()).await;
        assert_eq!(report["ok"], true, "{report}");
        let counted = report["quota"]["accepted"].as_u64().unwrap();
        assert!(counted >= acknowledged as u64, "{acknowledged} were acknowledged: {report}");
    }
}

/// Stops a server while `callers` keep it busy, with a short shutdown timeout. Returns the server, which is back, and what
/// `callers` returned: it stays open until the server has ended.
async fn stop_while<T>(callers: impl AsyncFnOnce(&Stage) -> T) -> (Stage, T) {
    let mut stage = Stage::start(SHORT).await;
    let open = Box::pin(callers(&stage)).await;
    stage.stop().await;
    (stage, open)
}

/// The same with callers that the server must not wait for at all: it ends long before anything is cut off.
async fn stop_at_once_while<T>(callers: impl AsyncFnOnce(&Stage) -> T) -> (Stage, T) {
    let mut stage = Stage::start(LONG).await;
    let open = Box::pin(callers(&stage)).await;
    let took = stage.stop().await;
    assert!(took < LONG * 3 / 4, "it waited for {took:?}");
    (stage, open)
}

async fn read_head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(tokio::time::timeout(PATIENCE, stream.read_u8()).await.expect("a head").unwrap());
    }
    String::from_utf8(head).unwrap()
}

/// Waits for the beginning of a good answer, and leaves it unread.
async fn begins_to_be_answered(caller: &TcpStream) {
    let mut status = [0; 15];
    wait::until("an answer begins", PATIENCE, async || caller.peek(&mut status).await.unwrap() == 15).await;
    assert_eq!(&status, b"HTTP/1.1 200 OK");
}

/// Bytes as a chunk of a chunked body.
fn chunk(bytes: impl AsRef<[u8]>) -> Vec<u8> {
    let bytes = bytes.as_ref();
    [format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat()
}

/// Writes a piece at each interval, for as long as there are pieces and anybody takes them, in a task that keeps the
/// connection open and returns it when there are no more pieces.
fn trickle<W: AsyncWrite + Send + Unpin + 'static>(
    mut writer: W,
    every: Duration,
    pieces: impl Iterator<Item = Vec<u8>> + Send + 'static,
) -> JoinHandle<W> {
    tokio::spawn(async move {
        let mut ticks = tokio::time::interval(every);
        for piece in pieces {
            ticks.tick().await;
            if writer.write_all(&piece).await.is_err() {
                break;
            }
        }
        writer
    })
}

/// Writes the same bytes over and over, in a task that keeps the connection open, and returns when nobody takes them any
/// more.
async fn flood(mut writer: impl AsyncWrite + Send + Unpin + 'static, bytes: Vec<u8>) {
    let written = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&written);
    let task = tokio::spawn(async move {
        while let Ok(more @ 1..) = writer.write(&bytes).await {
            count.fetch_add(more, Ordering::SeqCst);
        }
    });
    let (mut last, mut polls) = (0, 0);
    wait::until("the writer is blocked", PATIENCE, async || {
        let now = written.load(Ordering::SeqCst);
        polls = if now == last { polls + 1 } else { 0 };
        last = now;
        now > 0 && polls >= POLLS_WITHOUT_PROGRESS
    })
    .await;
    assert!(!task.is_finished(), "the server left before it was stopped");
}

/// Somebody who reads all that comes, until the connection ends.
struct Reader {
    bytes: Arc<Mutex<Vec<u8>>>,
    task: JoinHandle<()>,
}

impl Reader {
    fn start(mut reader: impl AsyncRead + Send + Unpin + 'static) -> Self {
        let bytes = Arc::new(Mutex::new(Vec::new()));
        let all = Arc::clone(&bytes);
        let task = tokio::spawn(async move {
            let mut part = vec![0; 64 << 10];
            while let Ok(count @ 1..) = reader.read(&mut part).await {
                all.lock().extend_from_slice(&part[..count]);
            }
        });
        Self { bytes, task }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes.lock()).into_owned()
    }

    async fn until(&self, part: &str) {
        wait::until(&format!("{part:?} is read"), PATIENCE, async || self.text().contains(part)).await;
    }

    /// Everything there was, once the connection has ended.
    async fn rest(self) -> String {
        let Self { bytes, task } = self;
        tokio::time::timeout(PATIENCE, task).await.expect("the connection ends").unwrap();
        let bytes = std::mem::take(&mut *bytes.lock());
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// A caller that reads an AI answer, and the upstream that makes it. The first pieces have come.
async fn endless_answer(stage: &Stage, every: Duration) -> Reader {
    let caller = stage.request("GET /api/v1/ai/stream", &[]).await;
    let mut upstream = stage.upstream().await;
    upstream.write_all(CHUNKED_ANSWER.as_bytes()).await.unwrap();
    trickle(upstream, every, (0..).map(|n| chunk(format!("data: {n}\n\n"))));
    let reader = Reader::start(caller);
    reader.until("data: 2\n").await;
    reader
}

async fn an_answer_that_never_ends_is_cut_off(every: Duration) {
    let (_stage, reader) = stop_while(async |stage| endless_answer(stage, every).await).await;
    let text = reader.rest().await;
    assert!(!text.ends_with(LAST_CHUNK), "it is not cut off as if it were whole: {text}");
}

#[tokio::test]
async fn an_ai_answer_with_a_piece_every_20_ms_does_not_hold_up_a_stop() {
    an_answer_that_never_ends_is_cut_off(Duration::from_millis(20)).await;
}

#[tokio::test]
async fn an_ai_answer_with_a_piece_every_100_ms_does_not_hold_up_a_stop() {
    an_answer_that_never_ends_is_cut_off(Duration::from_millis(100)).await;
}

#[tokio::test]
async fn an_ai_answer_with_a_piece_every_300_ms_does_not_hold_up_a_stop() {
    an_answer_that_never_ends_is_cut_off(Duration::from_millis(300)).await;
}

#[tokio::test]
async fn an_ai_answer_that_nobody_reads_does_not_hold_up_a_stop() {
    stop_while(async |stage| {
        let caller = stage.request("GET /api/v1/ai/large", &[]).await;
        let mut upstream = stage.upstream().await;
        upstream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\n").await.unwrap();
        flood(upstream, vec![b'x'; 64 << 10]).await;
        caller
    })
    .await;
}

#[tokio::test]
async fn an_ai_call_that_is_not_answered_does_not_hold_up_a_stop() {
    let (_stage, (reader, _upstream)) = stop_while(async |stage| {
        let caller = stage.request("GET /api/v1/ai/slow", &[]).await;
        (Reader::start(caller), stage.upstream().await)
    })
    .await;
    let text = reader.rest().await;
    assert!(text.is_empty() || text.starts_with("HTTP/1.1 503 "), "{text}");
}

#[tokio::test]
async fn an_ai_upload_that_trickles_for_ever_does_not_hold_up_a_stop() {
    let (_stage, (_caller, upstream)) = stop_while(async |stage| {
        let caller = stage.request("POST /api/v1/ai/upload", &["Transfer-Encoding: chunked"]).await;
        let (reader, writer) = caller.into_split();
        trickle(writer, Duration::from_millis(20), std::iter::repeat_with(|| chunk("x")));
        let upstream = Reader::start(stage.upstream().await);
        upstream.until("x").await;
        (Reader::start(reader), upstream)
    })
    .await;
    let text = upstream.rest().await;
    assert!(!text.ends_with(LAST_CHUNK), "it is not cut off as if it were whole: {text}");
}

#[tokio::test]
async fn an_ai_upload_that_falls_silent_does_not_hold_up_a_stop() {
    stop_while(async |stage| {
        let caller = stage.request("POST /api/v1/ai/upload", &["Content-Length: 10"]).await;
        (caller, stage.upstream().await)
    })
    .await;
}

#[tokio::test]
async fn an_ai_upload_that_the_upstream_does_not_read_does_not_hold_up_a_stop() {
    stop_while(async |stage| {
        let caller = stage.request("POST /api/v1/ai/upload", &["Content-Length: 30000000"]).await;
        let upstream = stage.upstream().await;
        flood(caller, vec![b'x'; 64 << 10]).await;
        upstream
    })
    .await;
}

#[tokio::test]
async fn an_ai_call_whose_request_and_answer_both_go_on_does_not_hold_up_a_stop() {
    stop_while(async |stage| {
        let every = Duration::from_millis(20);
        let caller = stage.request("POST /api/v1/ai/talk", &["Transfer-Encoding: chunked"]).await;
        let (reader, writer) = caller.into_split();
        trickle(writer, every, std::iter::repeat_with(|| chunk("question")));
        let (questions, mut answers) = stage.upstream().await.into_split();
        let questions = Reader::start(questions);
        questions.until("question").await;
        answers.write_all(CHUNKED_ANSWER.as_bytes()).await.unwrap();
        trickle(answers, every, std::iter::repeat_with(|| chunk("answer")));
        let reader = Reader::start(reader);
        reader.until("answer").await;
        (reader, questions)
    })
    .await;
}

/// The lines of a bulk upload.
fn events() -> impl Iterator<Item = String> + Send {
    (0..).map(|n| {
        let at = "2026-06-01T12:00:00Z";
        format!("{}\n", json!({"eventId": format!("e{n}"), "configName": "default", "requestedTime": at}))
    })
}

/// The events that were given a slot, as the answer to a bulk upload says.
fn answered(text: &str) -> Vec<String> {
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter_map(|line| Some(line.get("eventId")?.as_str()?.to_owned())).collect()
}

async fn a_bulk_upload_that_never_ends_is_cut_off(
    every: Duration,
    pieces: impl Iterator<Item = Vec<u8>> + Send + 'static,
) {
    let (stage, reader) = stop_while(async |stage| {
        let (reader, writer) = stage.bulk_upload().await.into_split();
        trickle(writer, every, pieces);
        let reader = Reader::start(reader);
        reader.until("\"e2\"").await;
        reader
    })
    .await;
    let answered = answered(&reader.rest().await);
    assert!(answered.len() >= 3, "{answered:?}");
    for id in answered {
        let stored = stage.server.client().get(&format!("/api/v1/slots/{id}")).await.unwrap();
        assert_eq!(stored.status, 200, "{id} was answered, and is stored");
    }
}

#[tokio::test]
async fn a_bulk_upload_that_trickles_lines_for_ever_does_not_hold_up_a_stop() {
    let lines = events().map(chunk);
    a_bulk_upload_that_never_ends_is_cut_off(Duration::from_millis(20), lines).await;
}

#[tokio::test]
async fn a_bulk_upload_that_trickles_bytes_for_ever_does_not_hold_up_a_stop() {
    let bytes = events().flat_map(String::into_bytes).map(|byte| chunk([byte]));
    a_bulk_upload_that_never_ends_is_cut_off(Duration::from_millis(8), bytes).await;
}

#[tokio::test]
async fn a_bulk_upload_whose_answers_nobody_reads_does_not_hold_up_a_stop() {
    stop_while(async |stage| {
        let upload = stage.bulk_upload().await;
        let wrong = chunk("{\"eventId\":\"x\"}\n".repeat(1_000));
        flood(upload, wrong).await
    })
    .await;
}

fn send(user: &str) -> String {
    let body = message(user, "m").to_string();
    let length = body.len();
    format!(
        "POST /api/send HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    )
}

async fn a_caller_that_pipelines_sends_and_never_reads_does_not_hold_up_a_stop(store: Store) {
    let mut stage = Stage::start_on(store, SHORT).await;
    let caller = stage.caller(&send("u").repeat(500)).await;
    let operator = stage.server.operator();
    wait::until("the calls are served", PATIENCE, async || {
        audit(&operator).await["quota"]["accepted"].as_u64().unwrap() > 50
    })
    .await;
    stage.stop().await;
    let text = Reader::start(caller).rest().await;
    let accepted = text.matches("HTTP/1.1 200 OK\r\n").count();
    assert!(accepted > 0, "{text}");
    stage.counts(ACKNOWLEDGED + accepted).await;
}

on_each_engine!(a_caller_that_pipelines_sends_and_never_reads_does_not_hold_up_a_stop);

#[tokio::test]
async fn a_caller_that_floods_sends_and_never_reads_does_not_hold_up_a_stop() {
    stop_while(async |stage| flood(stage.caller("").await, send("nobody").repeat(100).into()).await).await;
}

#[tokio::test]
async fn a_caller_that_floods_calls_with_large_answers_and_never_reads_does_not_hold_up_a_stop() {
    let get = "GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(100);
    stop_while(async |stage| flood(stage.caller("").await, get.into_bytes()).await).await;
}

#[tokio::test]
async fn a_caller_that_follows_sales_does_not_hold_up_a_stop() {
    let (_stage, reader) = stop_at_once_while(async |stage| {
        let reader = Reader::start(stage.follow_sales().await);
        reader.until("event: initial").await;
        reader
    })
    .await;
    let text = reader.rest().await;
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
}

#[tokio::test]
async fn a_caller_that_follows_sales_and_does_not_read_does_not_hold_up_a_stop() {
    stop_at_once_while(async |stage| {
        let caller = stage.follow_sales().await;
        begins_to_be_answered(&caller).await;
        caller
    })
    .await;
}

#[tokio::test]
async fn a_caller_that_follows_a_request_does_not_hold_up_a_stop() {
    let (_stage, reader) = stop_at_once_while(async |stage| {
        let id = stage.submit().await;
        let reader = Reader::start(stage.request(&format!("GET /v1/requests/{id}/events"), &[]).await);
        reader.until("ACCEPTED").await;
        reader
    })
    .await;
    let text = reader.rest().await;
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
}

#[tokio::test]
async fn a_caller_that_follows_a_request_and_does_not_read_does_not_hold_up_a_stop() {
    stop_at_once_while(async |stage| {
        let id = stage.submit().await;
        let caller = stage.request(&format!("GET /v1/requests/{id}/events"), &[]).await;
        begins_to_be_answered(&caller).await;
        caller
    })
    .await;
}

#[tokio::test]
async fn a_caller_that_waits_for_a_request_is_answered_at_once_by_a_stop() {
    let (_stage, reader) = stop_at_once_while(async |stage| {
        let id = stage.submit().await;
        let reader = Reader::start(stage.request(&format!("GET /v1/requests/{id}?wait=30s"), &[]).await);
        stage.accepts(1).await;
        reader
    })
    .await;
    let text = reader.rest().await;
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n") && text.contains("\"ACCEPTED\""), "{text}");
}

#[tokio::test]
async fn a_websocket_with_messages_both_ways_does_not_hold_up_a_stop() {
    stop_while(async |stage| {
        let (caller, upstream) = stage.websocket().await;
        let sides = [(caller, "question"), (upstream, "answer")].map(|(side, word)| {
            let (reader, writer) = side.into_split();
            let words = std::iter::repeat_with(move || word.as_bytes().to_vec());
            trickle(writer, Duration::from_millis(20), words);
            Reader::start(reader)
        });
        sides[0].until("answeranswer").await;
        sides[1].until("questionquestion").await;
        sides
    })
    .await;
}

#[tokio::test]
async fn an_idle_websocket_does_not_hold_up_a_stop() {
    stop_while(async |stage| stage.websocket().await).await;
}

#[tokio::test]
async fn a_websocket_that_begins_with_a_body_is_none_and_does_not_hold_up_a_stop() {
    stop_while(async |stage| {
        let headers = [&UPGRADE[..], &["Content-Length: 10000000"]].concat();
        let mut caller = stage.request("GET /api/v1/ai/socket", &headers).await;
        caller.write_all(&[b'x'; 1_000]).await.unwrap();
        let mut upstream = stage.upstream().await;
        // It reads no more of the body, which would still be on its way when the protocol changes.
        upstream.write_all(SWITCHING.as_bytes()).await.unwrap();
        let head = read_head(&mut caller).await;
        assert!(head.starts_with("HTTP/1.1 502 "), "{head}");
        (caller, upstream)
    })
    .await;
}

#[tokio::test]
async fn a_websocket_whose_messages_nobody_reads_does_not_hold_up_a_stop() {
    stop_while(async |stage| {
        let (caller, upstream) = stage.websocket().await;
        flood(upstream, vec![b'x'; 64 << 10]).await;
        caller
    })
    .await;
}

#[tokio::test]
async fn a_half_sent_head_does_not_hold_up_a_stop() {
    stop_while(async |stage| {
        let callers = ["GET /livez HT", "GET /livez HTTP/1.1\r\nHost: localhost\r\nX-Half: ", "POST /api/se"];
        let mut open = Vec::new();
        for half in callers {
            open.push(stage.caller(half).await);
        }
        // And one that was answered before.
        let mut second = stage.caller("GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\nGET /livez HT").await;
        read_head(&mut second).await;
        open.push(second);
        stage.accepts(open.len()).await;
        open
    })
    .await;
}

#[tokio::test]
async fn a_half_sent_body_does_not_hold_up_a_stop() {
    stop_while(async |stage| {
        let mut open = Vec::new();
        for (path, headers) in [
            ("/api/send", "Content-Type: application/json\r\nContent-Length: 9"),
            ("/api/send", "Content-Type: application/json\r\nTransfer-Encoding: chunked"),
            ("/api/v1/slots/bulk", "Content-Type: application/x-ndjson\r\nContent-Length: 9"),
        ] {
            let half = format!("POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n\r\n1");
            open.push(stage.caller(&half).await);
        }
        stage.accepts(open.len()).await;
        open
    })
    .await;
}

#[tokio::test]
async fn a_body_that_trickles_for_ever_does_not_hold_up_a_stop() {
    stop_while(async |stage| {
        let head = "POST /api/send HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n";
        let caller = stage.caller(head).await;
        trickle(caller, Duration::from_millis(20), std::iter::repeat_with(|| b" ".to_vec()));
        stage.accepts(1).await;
    })
    .await;
}

#[tokio::test]
async fn a_stop_refuses_new_connections_while_an_answer_goes_on() {
    let mut stage = Stage::start(SHORT).await;
    let reader = endless_answer(&stage, Duration::from_millis(20)).await;
    let started = stage.terminate().await;
    wait::until("new connections are refused", SHORT / 2, async || {
        TcpStream::connect(stage.server.weir.addr()).await.is_err()
    })
    .await;
    let before = reader.text().len();
    wait::until("the answer goes on", SHORT / 2, async || reader.text().len() > before).await;
    stage.ends(started).await;
}

/// Tells a server to stop, and returns when it has heard and has begun to.
async fn begin_to_stop(stage: &Stage) -> Instant {
    let started = stage.terminate().await;
    stage.server.weir.wait_for_log(|line| line.contains("stopping"), PATIENCE).await;
    started
}

#[tokio::test]
async fn an_ai_answer_that_ends_in_time_is_delivered_whole() {
    let mut stage = Stage::start(LONG).await;
    let caller = Reader::start(stage.request("GET /api/v1/ai/stream", &[]).await);
    let mut upstream = stage.upstream().await;
    upstream.write_all(CHUNKED_ANSWER.as_bytes()).await.unwrap();
    upstream.write_all(&chunk("first")).await.unwrap();
    caller.until("first").await;
    let started = begin_to_stop(&stage).await;
    let pieces = (0..20).map(|n| chunk(format!("piece {n}\n")));
    let mut upstream = trickle(upstream, Duration::from_millis(50), pieces).await.unwrap();
    upstream.write_all(LAST_CHUNK.as_bytes()).await.unwrap();
    let text = caller.rest().await;
    assert!((0..20).all(|n| text.contains(&format!("piece {n}\n"))) && text.ends_with(LAST_CHUNK), "{text}");
    let took = stage.ends(started).await;
    assert!(took < LONG * 3 / 4, "it waited for {took:?}");
}

#[tokio::test]
async fn an_ai_upload_that_ends_in_time_is_passed_on_whole_and_answered() {
    let mut stage = Stage::start(LONG).await;
    let caller = stage.request("POST /api/v1/ai/upload", &["Transfer-Encoding: chunked"]).await;
    let (reader, mut writer) = caller.into_split();
    let caller = Reader::start(reader);
    writer.write_all(&chunk("first")).await.unwrap();
    let (reader, mut answer) = stage.upstream().await.into_split();
    let upstream = Reader::start(reader);
    upstream.until("first").await;
    let started = begin_to_stop(&stage).await;
    let pieces = (0..20).map(|n| chunk(format!("piece {n}\n")));
    let mut writer = trickle(writer, Duration::from_millis(50), pieces).await.unwrap();
    writer.write_all(LAST_CHUNK.as_bytes()).await.unwrap();
    upstream.until(LAST_CHUNK).await;
    assert!((0..20).all(|n| upstream.text().contains(&format!("piece {n}\n"))), "{}", upstream.text());
    answer.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndone").await.unwrap();
    let text = caller.rest().await;
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n") && text.ends_with("\r\n\r\ndone"), "{text}");
    stage.ends(started).await;
}

#[tokio::test]
async fn a_bulk_upload_that_ends_in_time_is_answered_whole() {
    let mut stage = Stage::start(LONG).await;
    let (reader, writer) = stage.bulk_upload().await.into_split();
    let caller = Reader::start(reader);
    let every = Duration::from_millis(50);
    let writer = trickle(writer, every, events().take(2).map(chunk)).await.unwrap();
    caller.until("\"e1\"").await;
    let started = begin_to_stop(&stage).await;
    let mut writer = trickle(writer, every, events().skip(2).take(18).map(chunk)).await.unwrap();
    writer.write_all(LAST_CHUNK.as_bytes()).await.unwrap();
    let text = caller.rest().await;
    assert_eq!(answered(&text).len(), 20, "{text}");
    assert!(text.ends_with(LAST_CHUNK), "{text}");
    stage.ends(started).await;
    for id in answered(&text) {
        let stored = stage.server.client().get(&format!("/api/v1/slots/{id}")).await.unwrap();
        assert_eq!(stored.status, 200, "{id} was answered, and is stored");
    }
}
