//! A stop is graceful whatever callers do. On SIGTERM the server refuses new connections, lets calls in progress continue for
//! three quarters of `http.shutdown_timeout`, cuts off the rest, drains its lanes, workers and journals, and exits with 0.
//!
//! Each test keeps a server busy in one way and stops it. What must hold for every stop is checked in one place:
//! [`BusyServer::stop`].

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
    FAR_FUTURE, Running, Store, TEST_TIMEOUT, audit, configure, message, on_each_engine, send_in_parallel,
};

/// The shutdown timeout for callers that have to be cut off: short, since the test waits for most of it.
const SHORT: Duration = Duration::from_secs(4);
/// The shutdown timeout for callers that end by themselves: long, so that a slow machine does not look like a slow stop.
const LONG: Duration = Duration::from_secs(20);
/// How long after the shutdown timeout the end of the process must be seen.
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
struct BusyServer {
    server: Running,
    upstream: TcpListener,
    shutdown: Duration,
}

impl BusyServer {
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
            // Without workers, callers that wait for a request wait until the stop.
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
            exp: FAR_FUTURE,
            tenant_id: Some("acme".into()),
            scope: Some("requests:create requests:read".into()),
        };
        jwt::sign(&secret, &claims).unwrap()
    }

    /// Connects a caller that has sent these bytes.
    async fn caller(&self, bytes: &str) -> TcpStream {
        let mut caller = TcpStream::connect(self.server.weir.addr()).await.unwrap();
        caller.set_nodelay(true).unwrap();
        caller.write_all(bytes.as_bytes()).await.unwrap();
        caller
    }

    /// Connects a caller that has sent the head of a request, with a token.
    async fn request(&self, line: &str, headers: &[&str]) -> TcpStream {
        let lines: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
        let token = self.token();
        self.caller(&format!(
            "{line} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n{lines}\r\n"
        ))
        .await
    }

    /// Returns the upstream's side of the next AI call, after reading its head.
    async fn upstream(&self) -> TcpStream {
        let accepted = tokio::time::timeout(TEST_TIMEOUT, self.upstream.accept()).await;
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

    /// Creates a sale and connects a caller that follows sales.
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

    /// Starts a bulk upload by sending its head.
    async fn bulk_upload(&self) -> TcpStream {
        let config = json!({"configName": "default", "maxPerWindow": 1_000, "windowSize": "PT4S"});
        let answer = self.server.operator().post("/admin/rate-limit/config", &config).await.unwrap();
        assert_eq!(answer.status, 200, "{:?}", answer.body);
        let headers = ["Content-Type: application/x-ndjson", "Transfer-Encoding: chunked"];
        self.request("POST /api/v1/slots/bulk", &headers).await
    }

    /// Waits until the server has accepted `count` connections besides the test's own.
    async fn wait_until_accepted(&self, count: usize) {
        let client = self.server.client();
        wait::until("the connections are accepted", TEST_TIMEOUT, async || {
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
        self.check_stopped(started).await
    }

    /// Sends messages, then SIGTERM. Returns the time of the signal.
    async fn terminate(&self) -> Instant {
        let tally = send_in_parallel(&[self.server.client()], "u", ACKNOWLEDGED).await;
        tally.expect(200, ACKNOWLEDGED);
        let started = Instant::now();
        self.server.weir.terminate();
        started
    }

    /// Checks a server that got SIGTERM at `started`: it exits with 0 in time, and after a restart it has counted every
    /// acknowledged message.
    async fn check_stopped(&mut self, started: Instant) -> Duration {
        let left = (self.shutdown + MARGIN).saturating_sub(started.elapsed());
        let status = self.server.weir.wait(left).await;
        let took = started.elapsed();
        assert!(status.success(), "{status} after {took:?} of {:?}", self.shutdown);
        self.server.weir.restart().await;
        self.check_counted(ACKNOWLEDGED).await;
        took
    }

    /// Checks that at least `acknowledged` messages are counted and that the audit finds nothing wrong.
    async fn check_counted(&self, acknowledged: usize) {
        let report = audit(&self.server.operator()).await;
        assert_eq!(report["ok"], true, "{report}");
        let counted = report["quota"]["accepted"].as_u64().unwrap();
        assert!(counted >= acknowledged as u64, "{acknowledged} were acknowledged: {report}");
    }
}

/// Stops a server while `callers` keep it busy, with a short shutdown timeout. Returns the restarted server and the result of
/// `callers`, whose connections stay open until the server has ended.
async fn stop_while<T>(callers: impl AsyncFnOnce(&BusyServer) -> T) -> (BusyServer, T) {
    let mut busy = BusyServer::start(SHORT).await;
    let open = Box::pin(callers(&busy)).await;
    busy.stop().await;
    (busy, open)
}

/// Like `stop_while`, for callers that the server must not wait for: it ends long before anything is cut off.
async fn stop_at_once_while<T>(callers: impl AsyncFnOnce(&BusyServer) -> T) -> (BusyServer, T) {
    let mut busy = BusyServer::start(LONG).await;
    let open = Box::pin(callers(&busy)).await;
    let took = busy.stop().await;
    assert!(took < LONG * 3 / 4, "it waited for {took:?}");
    (busy, open)
}

async fn read_head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(tokio::time::timeout(TEST_TIMEOUT, stream.read_u8()).await.expect("a head").unwrap());
    }
    String::from_utf8(head).unwrap()
}

/// Waits for the status line of a successful answer and leaves it unread.
async fn wait_for_status_line(caller: &TcpStream) {
    let mut status = [0; 15];
    wait::until("an answer begins", TEST_TIMEOUT, async || caller.peek(&mut status).await.unwrap() == 15)
        .await;
    assert_eq!(&status, b"HTTP/1.1 200 OK");
}

/// Encodes bytes as a chunk of a chunked body.
fn chunk(bytes: impl AsRef<[u8]>) -> Vec<u8> {
    let bytes = bytes.as_ref();
    [format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat()
}

/// Spawns a task that writes a piece at each interval until there are no more or the peer stops reading, and then returns the
/// open connection.
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

/// Writes the same bytes repeatedly in a task that keeps the connection open. Returns when the writer is blocked.
async fn flood(mut writer: impl AsyncWrite + Send + Unpin + 'static, bytes: Vec<u8>) {
    let written = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&written);
    let task = tokio::spawn(async move {
        while let Ok(more @ 1..) = writer.write(&bytes).await {
            count.fetch_add(more, Ordering::SeqCst);
        }
    });
    let (mut last, mut polls) = (0, 0);
    wait::until("the writer is blocked", TEST_TIMEOUT, async || {
        let now = written.load(Ordering::SeqCst);
        polls = if now == last { polls + 1 } else { 0 };
        last = now;
        now > 0 && polls >= POLLS_WITHOUT_PROGRESS
    })
    .await;
    assert!(!task.is_finished(), "the server closed the connection before it was stopped");
}

/// Reads a response in the background until the connection ends.
struct ResponseReader {
    bytes: Arc<Mutex<Vec<u8>>>,
    task: JoinHandle<()>,
}

impl ResponseReader {
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
        wait::until(&format!("{part:?} is read"), TEST_TIMEOUT, async || self.text().contains(part)).await;
    }

    /// Returns everything received, once the connection has ended.
    async fn rest(self) -> String {
        let Self { bytes, task } = self;
        tokio::time::timeout(TEST_TIMEOUT, task).await.expect("the connection ends").unwrap();
        let bytes = std::mem::take(&mut *bytes.lock());
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// Starts an AI call whose upstream sends a piece at each interval without end. Returns after the first pieces.
async fn endless_answer(busy: &BusyServer, every: Duration) -> ResponseReader {
    let caller = busy.request("GET /api/v1/ai/stream", &[]).await;
    let mut upstream = busy.upstream().await;
    upstream.write_all(CHUNKED_ANSWER.as_bytes()).await.unwrap();
    trickle(upstream, every, (0..).map(|n| chunk(format!("data: {n}\n\n"))));
    let reader = ResponseReader::start(caller);
    reader.until("data: 2\n").await;
    reader
}

async fn an_endless_answer_is_cut_off(every: Duration) {
    let (_stage, reader) = stop_while(async |busy| endless_answer(busy, every).await).await;
    let text = reader.rest().await;
    assert!(!text.ends_with(LAST_CHUNK), "it must not end like a complete answer: {text}");
}

#[tokio::test]
async fn an_ai_answer_with_a_piece_every_20_ms_does_not_delay_a_stop() {
    an_endless_answer_is_cut_off(Duration::from_millis(20)).await;
}

#[tokio::test]
async fn an_ai_answer_with_a_piece_every_100_ms_does_not_delay_a_stop() {
    an_endless_answer_is_cut_off(Duration::from_millis(100)).await;
}

#[tokio::test]
async fn an_ai_answer_with_a_piece_every_300_ms_does_not_delay_a_stop() {
    an_endless_answer_is_cut_off(Duration::from_millis(300)).await;
}

#[tokio::test]
async fn an_ai_answer_that_nobody_reads_does_not_delay_a_stop() {
    stop_while(async |busy| {
        let caller = busy.request("GET /api/v1/ai/large", &[]).await;
        let mut upstream = busy.upstream().await;
        upstream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\n").await.unwrap();
        flood(upstream, vec![b'x'; 64 << 10]).await;
        caller
    })
    .await;
}

#[tokio::test]
async fn an_ai_call_that_is_not_answered_does_not_delay_a_stop() {
    let (_stage, (reader, _upstream)) = stop_while(async |busy| {
        let caller = busy.request("GET /api/v1/ai/slow", &[]).await;
        (ResponseReader::start(caller), busy.upstream().await)
    })
    .await;
    let text = reader.rest().await;
    assert!(text.is_empty() || text.starts_with("HTTP/1.1 503 "), "{text}");
}

#[tokio::test]
async fn an_ai_upload_that_trickles_forever_does_not_delay_a_stop() {
    let (_stage, (_caller, upstream)) = stop_while(async |busy| {
        let caller = busy.request("POST /api/v1/ai/upload", &["Transfer-Encoding: chunked"]).await;
        let (reader, writer) = caller.into_split();
        trickle(writer, Duration::from_millis(20), std::iter::repeat_with(|| chunk("x")));
        let upstream = ResponseReader::start(busy.upstream().await);
        upstream.until("x").await;
        (ResponseReader::start(reader), upstream)
    })
    .await;
    let text = upstream.rest().await;
    assert!(!text.ends_with(LAST_CHUNK), "it must not end like a complete answer: {text}");
}

#[tokio::test]
async fn an_ai_upload_that_falls_silent_does_not_delay_a_stop() {
    stop_while(async |busy| {
        let caller = busy.request("POST /api/v1/ai/upload", &["Content-Length: 10"]).await;
        (caller, busy.upstream().await)
    })
    .await;
}

#[tokio::test]
async fn an_ai_upload_that_the_upstream_does_not_read_does_not_delay_a_stop() {
    stop_while(async |busy| {
        let caller = busy.request("POST /api/v1/ai/upload", &["Content-Length: 30000000"]).await;
        let upstream = busy.upstream().await;
        flood(caller, vec![b'x'; 64 << 10]).await;
        upstream
    })
    .await;
}

#[tokio::test]
async fn an_ai_call_whose_request_and_answer_both_continue_does_not_delay_a_stop() {
    stop_while(async |busy| {
        let every = Duration::from_millis(20);
        let caller = busy.request("POST /api/v1/ai/talk", &["Transfer-Encoding: chunked"]).await;
        let (reader, writer) = caller.into_split();
        trickle(writer, every, std::iter::repeat_with(|| chunk("question")));
        let (questions, mut answers) = busy.upstream().await.into_split();
        let questions = ResponseReader::start(questions);
        questions.until("question").await;
        answers.write_all(CHUNKED_ANSWER.as_bytes()).await.unwrap();
        trickle(answers, every, std::iter::repeat_with(|| chunk("answer")));
        let reader = ResponseReader::start(reader);
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

/// Returns the events that got a slot, from the answer to a bulk upload.
fn assigned_events(text: &str) -> Vec<String> {
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter_map(|line| Some(line.get("eventId")?.as_str()?.to_owned())).collect()
}

async fn a_bulk_upload_that_never_ends_is_cut_off(
    every: Duration,
    pieces: impl Iterator<Item = Vec<u8>> + Send + 'static,
) {
    let (busy, reader) = stop_while(async |busy| {
        let (reader, writer) = busy.bulk_upload().await.into_split();
        trickle(writer, every, pieces);
        let reader = ResponseReader::start(reader);
        reader.until("\"e2\"").await;
        reader
    })
    .await;
    let answered = assigned_events(&reader.rest().await);
    assert!(answered.len() >= 3, "{answered:?}");
    for id in answered {
        let stored = busy.server.client().get(&format!("/api/v1/slots/{id}")).await.unwrap();
        assert_eq!(stored.status, 200, "{id} was answered, and is stored");
    }
}

#[tokio::test]
async fn a_bulk_upload_that_trickles_lines_for_ever_does_not_delay_a_stop() {
    let lines = events().map(chunk);
    a_bulk_upload_that_never_ends_is_cut_off(Duration::from_millis(20), lines).await;
}

#[tokio::test]
async fn a_bulk_upload_that_trickles_bytes_for_ever_does_not_delay_a_stop() {
    let bytes = events().flat_map(String::into_bytes).map(|byte| chunk([byte]));
    a_bulk_upload_that_never_ends_is_cut_off(Duration::from_millis(8), bytes).await;
}

#[tokio::test]
async fn a_bulk_upload_whose_answers_nobody_reads_does_not_delay_a_stop() {
    stop_while(async |busy| {
        let upload = busy.bulk_upload().await;
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

async fn a_caller_that_pipelines_sends_and_never_reads_does_not_delay_a_stop(store: Store) {
    let mut busy = BusyServer::start_on(store, SHORT).await;
    let caller = busy.caller(&send("u").repeat(500)).await;
    let operator = busy.server.operator();
    wait::until("the calls are served", TEST_TIMEOUT, async || {
        audit(&operator).await["quota"]["accepted"].as_u64().unwrap() > 50
    })
    .await;
    busy.stop().await;
    let text = ResponseReader::start(caller).rest().await;
    let accepted = text.matches("HTTP/1.1 200 OK\r\n").count();
    assert!(accepted > 0, "{text}");
    busy.check_counted(ACKNOWLEDGED + accepted).await;
}

on_each_engine!(a_caller_that_pipelines_sends_and_never_reads_does_not_delay_a_stop);

#[tokio::test]
async fn a_caller_that_floods_sends_and_never_reads_does_not_delay_a_stop() {
    stop_while(async |busy| flood(busy.caller("").await, send("nobody").repeat(100).into()).await).await;
}

#[tokio::test]
async fn a_caller_that_floods_calls_with_large_answers_and_never_reads_does_not_delay_a_stop() {
    let get = "GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(100);
    stop_while(async |busy| flood(busy.caller("").await, get.into_bytes()).await).await;
}

#[tokio::test]
async fn a_caller_that_follows_sales_does_not_delay_a_stop() {
    let (_stage, reader) = stop_at_once_while(async |busy| {
        let reader = ResponseReader::start(busy.follow_sales().await);
        reader.until("event: initial").await;
        reader
    })
    .await;
    let text = reader.rest().await;
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
}

#[tokio::test]
async fn a_caller_that_follows_sales_and_does_not_read_does_not_delay_a_stop() {
    stop_at_once_while(async |busy| {
        let caller = busy.follow_sales().await;
        wait_for_status_line(&caller).await;
        caller
    })
    .await;
}

#[tokio::test]
async fn a_caller_that_follows_a_request_does_not_delay_a_stop() {
    let (_stage, reader) = stop_at_once_while(async |busy| {
        let id = busy.submit().await;
        let reader = ResponseReader::start(busy.request(&format!("GET /v1/requests/{id}/events"), &[]).await);
        reader.until("ACCEPTED").await;
        reader
    })
    .await;
    let text = reader.rest().await;
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
}

#[tokio::test]
async fn a_caller_that_follows_a_request_and_does_not_read_does_not_delay_a_stop() {
    stop_at_once_while(async |busy| {
        let id = busy.submit().await;
        let caller = busy.request(&format!("GET /v1/requests/{id}/events"), &[]).await;
        wait_for_status_line(&caller).await;
        caller
    })
    .await;
}

#[tokio::test]
async fn a_caller_that_waits_for_a_request_is_answered_at_once_by_a_stop() {
    let (_stage, reader) = stop_at_once_while(async |busy| {
        let id = busy.submit().await;
        let reader =
            ResponseReader::start(busy.request(&format!("GET /v1/requests/{id}?wait=30s"), &[]).await);
        busy.wait_until_accepted(1).await;
        reader
    })
    .await;
    let text = reader.rest().await;
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n") && text.contains("\"ACCEPTED\""), "{text}");
}

#[tokio::test]
async fn a_websocket_with_messages_both_ways_does_not_delay_a_stop() {
    stop_while(async |busy| {
        let (caller, upstream) = busy.websocket().await;
        let sides = [(caller, "question"), (upstream, "answer")].map(|(side, word)| {
            let (reader, writer) = side.into_split();
            let words = std::iter::repeat_with(move || word.as_bytes().to_vec());
            trickle(writer, Duration::from_millis(20), words);
            ResponseReader::start(reader)
        });
        sides[0].until("answeranswer").await;
        sides[1].until("questionquestion").await;
        sides
    })
    .await;
}

#[tokio::test]
async fn an_idle_websocket_does_not_delay_a_stop() {
    stop_while(async |busy| busy.websocket().await).await;
}

#[tokio::test]
async fn a_websocket_that_begins_with_a_body_is_refused_and_does_not_delay_a_stop() {
    stop_while(async |busy| {
        let headers = [&UPGRADE[..], &["Content-Length: 10000000"]].concat();
        let mut caller = busy.request("GET /api/v1/ai/socket", &headers).await;
        caller.write_all(&[b'x'; 1_000]).await.unwrap();
        let mut upstream = busy.upstream().await;
        // The server reads no more of the body, which would still be arriving when the protocol changes.
        upstream.write_all(SWITCHING.as_bytes()).await.unwrap();
        let head = read_head(&mut caller).await;
        assert!(head.starts_with("HTTP/1.1 502 "), "{head}");
        (caller, upstream)
    })
    .await;
}

#[tokio::test]
async fn a_websocket_whose_messages_nobody_reads_does_not_delay_a_stop() {
    stop_while(async |busy| {
        let (caller, upstream) = busy.websocket().await;
        flood(upstream, vec![b'x'; 64 << 10]).await;
        caller
    })
    .await;
}

#[tokio::test]
async fn a_half_sent_head_does_not_delay_a_stop() {
    stop_while(async |busy| {
        let callers = ["GET /livez HT", "GET /livez HTTP/1.1\r\nHost: localhost\r\nX-Half: ", "POST /api/se"];
        let mut open = Vec::new();
        for half in callers {
            open.push(busy.caller(half).await);
        }
        // A caller on a connection that has been used before.
        let mut second = busy.caller("GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\nGET /livez HT").await;
        read_head(&mut second).await;
        open.push(second);
        busy.wait_until_accepted(open.len()).await;
        open
    })
    .await;
}

#[tokio::test]
async fn a_half_sent_body_does_not_delay_a_stop() {
    stop_while(async |busy| {
        let mut open = Vec::new();
        for (path, headers) in [
            ("/api/send", "Content-Type: application/json\r\nContent-Length: 9"),
            ("/api/send", "Content-Type: application/json\r\nTransfer-Encoding: chunked"),
            ("/api/v1/slots/bulk", "Content-Type: application/x-ndjson\r\nContent-Length: 9"),
        ] {
            let half = format!("POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n\r\n1");
            open.push(busy.caller(&half).await);
        }
        busy.wait_until_accepted(open.len()).await;
        open
    })
    .await;
}

#[tokio::test]
async fn a_body_that_trickles_forever_does_not_delay_a_stop() {
    stop_while(async |busy| {
        let head = "POST /api/send HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n";
        let caller = busy.caller(head).await;
        trickle(caller, Duration::from_millis(20), std::iter::repeat_with(|| b" ".to_vec()));
        busy.wait_until_accepted(1).await;
    })
    .await;
}

#[tokio::test]
async fn a_stop_refuses_new_connections_while_an_answer_continues() {
    let mut busy = BusyServer::start(SHORT).await;
    let reader = endless_answer(&busy, Duration::from_millis(20)).await;
    let started = busy.terminate().await;
    wait::until("new connections are refused", SHORT / 2, async || {
        TcpStream::connect(busy.server.weir.addr()).await.is_err()
    })
    .await;
    let before = reader.text().len();
    wait::until("the answer continues", SHORT / 2, async || reader.text().len() > before).await;
    busy.check_stopped(started).await;
}

/// Sends SIGTERM and returns when the server has begun to stop.
async fn wait_until_stopping(busy: &BusyServer) -> Instant {
    let started = busy.terminate().await;
    busy.server.weir.wait_for_log(|line| line.contains("stopping"), TEST_TIMEOUT).await;
    started
}

#[tokio::test]
async fn an_ai_answer_that_ends_in_time_is_delivered_whole() {
    let mut busy = BusyServer::start(LONG).await;
    let caller = ResponseReader::start(busy.request("GET /api/v1/ai/stream", &[]).await);
    let mut upstream = busy.upstream().await;
    upstream.write_all(CHUNKED_ANSWER.as_bytes()).await.unwrap();
    upstream.write_all(&chunk("first")).await.unwrap();
    caller.until("first").await;
    let started = wait_until_stopping(&busy).await;
    let pieces = (0..20).map(|n| chunk(format!("piece {n}\n")));
    let mut upstream = trickle(upstream, Duration::from_millis(50), pieces).await.unwrap();
    upstream.write_all(LAST_CHUNK.as_bytes()).await.unwrap();
    let text = caller.rest().await;
    assert!((0..20).all(|n| text.contains(&format!("piece {n}\n"))) && text.ends_with(LAST_CHUNK), "{text}");
    let took = busy.check_stopped(started).await;
    assert!(took < LONG * 3 / 4, "it waited for {took:?}");
}

#[tokio::test]
async fn an_ai_upload_that_ends_in_time_is_passed_on_whole_and_answered() {
    let mut busy = BusyServer::start(LONG).await;
    let caller = busy.request("POST /api/v1/ai/upload", &["Transfer-Encoding: chunked"]).await;
    let (reader, mut writer) = caller.into_split();
    let caller = ResponseReader::start(reader);
    writer.write_all(&chunk("first")).await.unwrap();
    let (reader, mut answer) = busy.upstream().await.into_split();
    let upstream = ResponseReader::start(reader);
    upstream.until("first").await;
    let started = wait_until_stopping(&busy).await;
    let pieces = (0..20).map(|n| chunk(format!("piece {n}\n")));
    let mut writer = trickle(writer, Duration::from_millis(50), pieces).await.unwrap();
    writer.write_all(LAST_CHUNK.as_bytes()).await.unwrap();
    upstream.until(LAST_CHUNK).await;
    assert!((0..20).all(|n| upstream.text().contains(&format!("piece {n}\n"))), "{}", upstream.text());
    answer.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndone").await.unwrap();
    let text = caller.rest().await;
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n") && text.ends_with("\r\n\r\ndone"), "{text}");
    busy.check_stopped(started).await;
}

#[tokio::test]
async fn a_bulk_upload_that_ends_in_time_is_answered_whole() {
    let mut busy = BusyServer::start(LONG).await;
    let (reader, writer) = busy.bulk_upload().await.into_split();
    let caller = ResponseReader::start(reader);
    let every = Duration::from_millis(50);
    let writer = trickle(writer, every, events().take(2).map(chunk)).await.unwrap();
    caller.until("\"e1\"").await;
    let started = wait_until_stopping(&busy).await;
    let mut writer = trickle(writer, every, events().skip(2).take(18).map(chunk)).await.unwrap();
    writer.write_all(LAST_CHUNK.as_bytes()).await.unwrap();
    let text = caller.rest().await;
    assert_eq!(assigned_events(&text).len(), 20, "{text}");
    assert!(text.ends_with(LAST_CHUNK), "{text}");
    busy.check_stopped(started).await;
    for id in assigned_events(&text) {
        let stored = busy.server.client().get(&format!("/api/v1/slots/{id}")).await.unwrap();
        assert_eq!(stored.status, 200, "{id} was answered, and is stored");
    }
}
