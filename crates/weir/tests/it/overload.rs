//! Overload: callers that exhaust memory, connections or event streams get 503 with `Retry-After`, and other callers are
//! not affected.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use futures_util::future::join_all;
use futures_util::{StreamExt, stream};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use weir_server::auth::jwt::{self, Claims};
use weir_testkit::http::Client;
use weir_testkit::wait;

use crate::fixtures::{FAR_FUTURE, Running, Store, TEST_TIMEOUT, configure, message, weir};

const MIB: u64 = 1 << 20;

/// Opens a connection and sends these bytes. The server may close it before it has read all of them.
async fn send(address: SocketAddr, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let _ = stream.write_all(bytes).await;
    stream
}

/// Reads the head of the next response and its body, if any.
async fn read_answer(stream: &mut TcpStream) -> (String, String) {
    let mut text = Vec::new();
    let reading = async {
        loop {
            let so_far = String::from_utf8_lossy(&text).into_owned();
            if let Some((head, body)) = so_far.split_once("\r\n\r\n") {
                let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
                if body.len() >= length.map_or(0, |length| length.parse().unwrap()) {
                    return (head.to_owned(), body.to_owned());
                }
            }
            let read = stream.read_buf(&mut text).await.expect("an answer");
            assert!(read > 0, "the connection ended: {so_far:?}");
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, reading).await.expect("an answer in time")
}

fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n")
}

/// Asserts that a response is 503 with `Retry-After`.
fn expect_unavailable((head, body): &(String, String)) {
    assert!(head.starts_with("HTTP/1.1 503 "), "{head}\n{body}");
    assert!(head.contains("\r\nretry-after: 1"), "{head}");
    assert!(head.contains("\r\nx-request-id: "), "{head}");
    let body: Value = serde_json::from_str(body).unwrap();
    let code = if body["success"] == false { &body["error"]["code"] } else { &body["code"] };
    assert!(code == "DEPENDENCY_UNAVAILABLE" || code == "SERVICE_UNAVAILABLE", "{body}");
}

/// Asserts that at least `count` of these calls get 503. The others are stalled and get no response.
async fn expect_refused(stalled: &mut [TcpStream], count: usize) {
    let all = stalled.len();
    let answers = stream::iter(stalled.iter_mut().map(read_answer)).buffer_unordered(all);
    answers.take(count).for_each(async |answer| expect_unavailable(&answer)).await;
}

/// The metrics by name and labels.
async fn metrics(client: &Client) -> BTreeMap<String, f64> {
    let text = client.get("/metrics").await.unwrap();
    let text = String::from_utf8(text.body.to_vec()).unwrap();
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    samples
        .filter_map(|line| line.rsplit_once(' '))
        .map(|(name, value)| (name.to_owned(), value.parse().unwrap()))
        .collect()
}

async fn wait_until_nothing_is_buffered(client: &Client) {
    wait::until("nothing is buffered", TEST_TIMEOUT, async || {
        metrics(client).await["weir_http_buffered_bytes"] == 0.0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stalled_bodies_share_one_budget() {
    let running = Running::start_with(Store::Embedded, &[("WEIR_HTTP_READ_TIMEOUT", "60s")]).await;
    let (client, address) = (running.client(), running.weir.addr());
    configure(&client, "u", 1_000, 60).await;
    let before = running.weir.peak_memory();
    let head = "POST /api/send HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
    let half = format!("{head}content-length: {MIB}\r\n\r\n{}", " ".repeat(1_048_000));
    let mut stalled = join_all((0..300).map(|_| send(address, half.as_bytes()))).await;
    expect_refused(&mut stalled, 200).await;
    let buffered = metrics(&client).await["weir_http_buffered_bytes"];
    assert!((1.0..=32.0 * MIB as f64).contains(&buffered), "{buffered}");
    let grown = running.weir.peak_memory() - before;
    assert!(grown < 200 * MIB, "{} MiB for 300 bodies", grown / MIB);
    assert_eq!(client.post("/api/send", &message("u", "small")).await.unwrap().status, 200);
    let refused = metrics(&client).await[r#"weir_http_shortages_total{of="memory"}"#];
    assert!(refused >= 200.0, "{refused}");
    drop(stalled);
    wait_until_nothing_is_buffered(&client).await;
    let large = message("u", &"x".repeat(1_000_000));
    assert_eq!(client.post("/api/send", &large).await.unwrap().status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endless_heads_are_small_and_share_the_budget() {
    let settings = [("WEIR_HTTP_READ_TIMEOUT", "60s"), ("WEIR_HTTP_MAX_BUFFERED", "2MiB")];
    let running = Running::start_with(Store::Embedded, &settings).await;
    let (client, address) = (running.client(), running.weir.addr());
    let before = running.weir.peak_memory();
    let endless = format!("GET /livez HTTP/1.1\r\nhost: localhost\r\nx: {}", "x".repeat(400_000));
    let mut ended = join_all((0..400).map(|_| send(address, endless.as_bytes()))).await;
    for stream in &mut ended {
        let (head, _) = read_answer(stream).await;
        assert!(head.starts_with("HTTP/1.1 431 ") || head.starts_with("HTTP/1.1 503 "), "{head}");
    }
    drop(ended);
    wait_until_nothing_is_buffered(&client).await;
    // Almost as long as a head may be, without its end.
    let half = &endless[..30_000];
    let mut stalled = join_all((0..100).map(|_| send(address, half.as_bytes()))).await;
    expect_refused(&mut stalled, 50).await;
    assert_eq!(client.get("/livez").await.unwrap().status, 200, "small heads are free");
    let grown = running.weir.peak_memory() - before;
    assert!(grown < 60 * MIB, "{} MiB for 500 heads", grown / MIB);
    drop(stalled);
    wait_until_nothing_is_buffered(&client).await;
    let whole = format!("{half}\r\n\r\n");
    let (head, _) = read_answer(&mut send(address, whole.as_bytes()).await).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upload_of_long_ids_takes_little_memory() {
    const LINES: usize = 1_500;
    let running = Running::start(Store::Embedded).await;
    let id = "x".repeat(65_400);
    let line =
        format!("{{\"eventId\":\"{id}\",\"configName\":\"c\",\"requestedTime\":\"2026-01-01T00:00:00Z\"}}\n");
    let before = running.weir.peak_memory();
    let head = "POST /api/v1/slots/bulk HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
                content-type: application/x-ndjson\r\n";
    let head = format!("{head}content-length: {}\r\n\r\n", LINES * line.len());
    let mut stream = send(running.weir.addr(), head.as_bytes()).await;
    // The answers are not read yet, so they must be small enough to be buffered.
    let sending = async {
        for _ in 0..LINES {
            stream.write_all(line.as_bytes()).await.unwrap();
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, sending).await.expect("the upload continues");
    let mut answer = String::new();
    tokio::time::timeout(TEST_TIMEOUT, stream.read_to_string(&mut answer)).await.expect("in time").unwrap();
    let grown = running.weir.peak_memory() - before;
    assert!(grown < 32 * MIB, "{} MiB", grown / MIB);
    let refusal = "\"code\":\"INVALID_REQUEST\",\"message\":\"eventId must have at most 255 characters\"";
    assert_eq!(answer.matches(refusal).count(), LINES, "{answer:.1000}");
    assert!(!answer.contains("xxx"), "an invalid id is not repeated");
}

const BULK_HEAD: &str =
    "POST /api/v1/slots/bulk HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/x-ndjson\r\n";

/// Uploads lines that each get an error of some 90 bytes, and reads no response.
async fn upload_and_read_nothing(address: SocketAddr) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4_096).unwrap();
    let mut stream = socket.connect(address).await.unwrap();
    let lines = "x\n".repeat(4 << 20);
    let head = format!("{BULK_HEAD}content-length: {}\r\n\r\n", lines.len());
    stream.write_all(head.as_bytes()).await.unwrap();
    let _ = stream.write_all(lines.as_bytes()).await;
    std::future::pending().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uploads_with_unread_responses_leave_memory_to_other_requests() {
    let settings = [("WEIR_HTTP_READ_TIMEOUT", "2s"), ("WEIR_HTTP_MAX_BUFFERED", "2MiB")];
    let running = Running::start_with(Store::Embedded, &settings).await;
    let (client, address) = (running.client(), running.weir.addr());
    configure(&client, "u", 1_000, 60).await;
    let unread: Vec<_> = (0..4).map(|_| tokio::spawn(upload_and_read_nothing(address))).collect();
    let upload = format!("{BULK_HEAD}connection: close\r\ncontent-length: 2\r\n\r\nx\n");
    wait::until("uploads buffer as much as they may", TEST_TIMEOUT, async || {
        let mut answer = String::new();
        let mut stream = send(address, upload.as_bytes()).await;
        let reading = stream.read_to_string(&mut answer);
        tokio::time::timeout(TEST_TIMEOUT, reading).await.expect("an upload ends in time").unwrap();
        answer.contains("\"code\":\"DEPENDENCY_UNAVAILABLE\"")
    })
    .await;
    let large = message("u", &"x".repeat(500_000));
    assert_eq!(client.post("/api/send", &large).await.unwrap().status, 200);
    let buffered = metrics(&client).await["weir_http_buffered_bytes"];
    assert!(buffered <= MIB as f64, "{buffered} bytes are more than half");
    unread.iter().for_each(tokio::task::JoinHandle::abort);
    wait_until_nothing_is_buffered(&client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operations_routes_respond_when_all_connections_are_taken() {
    let settings = [("WEIR_HTTP_READ_TIMEOUT", "60s"), ("WEIR_HTTP_MAX_CONNECTIONS", "4")];
    let running = Running::start_with(Store::Embedded, &settings).await;
    let address = running.weir.addr();
    let mut connections = Vec::new();
    for _ in 0..4 {
        let mut stream = send(address, get("/livez").as_bytes()).await;
        assert!(read_answer(&mut stream).await.0.starts_with("HTTP/1.1 200 "));
        connections.push(stream);
    }
    // Silent connections are waited for, but not for long.
    let silent = join_all((0..64).map(|_| send(address, b""))).await;
    for path in ["/livez", "/readyz", "/metrics", "/health"] {
        let (head, _) = read_answer(&mut send(address, get(path).as_bytes()).await).await;
        assert!(
            head.starts_with("HTTP/1.1 200 ") && head.contains("\r\nconnection: close"),
            "{path}: {head}"
        );
    }
    for path in ["/api/config/u", "/api/v1/sales", "/", "/nowhere"] {
        let answer = read_answer(&mut send(address, get(path).as_bytes()).await).await;
        expect_unavailable(&answer);
        assert!(answer.0.contains("\r\nconnection: close"), "{path}: {}", answer.0);
    }
    let mut health = std::process::Command::new(env!("CARGO_BIN_EXE_weir"));
    health.args(["health", "--listen", &address.to_string()]);
    let health = tokio::task::spawn_blocking(move || health.output().unwrap()).await.unwrap();
    assert!(health.status.success(), "{}", String::from_utf8_lossy(&health.stderr));
    // Existing connections are not affected.
    connections[0].write_all(get("/api/config/u").as_bytes()).await.unwrap();
    assert!(read_answer(&mut connections[0]).await.0.starts_with("HTTP/1.1 404 "));
    drop((connections.pop(), silent));
    wait::until("a connection is available again", TEST_TIMEOUT, async || {
        let mut stream = send(address, get("/api/config/u").as_bytes()).await;
        read_answer(&mut stream).await.0.starts_with("HTTP/1.1 404 ")
    })
    .await;
}

/// A client with a token that may read and create a tenant's requests.
fn tenant(running: &Running) -> Client {
    running.client().with_header("authorization", &format!("Bearer {}", token(running)))
}

fn token(running: &Running) -> String {
    let secret = std::fs::read_to_string(running.weir.data_dir().join("jwt.secret")).unwrap();
    let (tenant_id, scope) = (Some("acme".to_owned()), Some("requests:create requests:read".to_owned()));
    jwt::sign(&secret, &Claims { sub: "a@b.c".into(), exp: FAR_FUTURE, tenant_id, scope }).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn event_streams_and_long_polls_leave_connections_to_other_callers() {
    // Without workers the request keeps its status.
    let settings =
        [("WEIR_HTTP_MAX_STREAMS", "6"), ("WEIR_ROLES", "api"), ("WEIR_SLOT_DISPATCH_TOPIC", "due")];
    let running = Running::start_with(Store::Embedded, &settings).await;
    let address = running.weir.addr();
    let submission = json!({"idempotencyKey": "k", "requestType": "pay", "payload": 1});
    let accepted = tenant(&running).post("/v1/requests", &submission).await.unwrap().json();
    let at = format!("/v1/requests/{}", accepted["requestId"].as_str().unwrap());
    let bearer = format!("HTTP/1.1\r\nauthorization: Bearer {}\r\n", token(&running));
    let watch = get(&format!("{at}/events")).replace("HTTP/1.1\r\n", &bearer);
    let poll = get(&format!("{at}?wait=30s")).replace("HTTP/1.1\r\n", &bearer);
    crate::sale::fixtures::create_active(&running.operator(), "W", 5).await;
    let mut open = Vec::new();
    for call in [&get("/api/v1/sales/events"), &watch, &get("/api/v1/sales/events"), &watch, &watch] {
        let mut stream = send(address, call.as_bytes()).await;
        let (head, _) = read_answer(&mut stream).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        open.push(stream);
    }
    let polling = send(address, poll.as_bytes()).await;
    wait::until("the maximum of streams is reached", TEST_TIMEOUT, async || {
        metrics(&running.client()).await["weir_http_long_lived"] == 6.0
    })
    .await;
    let claim = json!({"topic": "due", "waitSeconds": 20}).to_string();
    let claim = format!(
        "POST /admin/queue/claim HTTP/1.1\r\nhost: localhost\r\nx-admin-key: {}\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{claim}",
        running.weir.admin_key(),
        claim.len(),
    );
    for call in [get("/api/v1/sales/events"), watch, poll, claim] {
        expect_unavailable(&read_answer(&mut send(address, call.as_bytes()).await).await);
    }
    let (head, _) = read_answer(&mut send(address, get("/api/config/u").as_bytes()).await).await;
    assert!(head.starts_with("HTTP/1.1 404 "), "{head}");
    drop((open.pop(), polling));
    wait::until("a stream is available again", TEST_TIMEOUT, async || {
        let mut stream = send(address, get("/api/v1/sales/events").as_bytes()).await;
        read_answer(&mut stream).await.0.starts_with("HTTP/1.1 200 ")
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heads_with_much_white_space_take_no_more_of_the_budget_than_one_of_them() {
    let weir = weir().spawn().await;
    let mut caller = TcpStream::connect(weir.addr()).await.unwrap();
    let head = format!("GET /livez HTTP/1.1\r\nHost: localhost\r\nA:{}b\r\n\r\n", " ".repeat(20_000));
    for _ in 0..50 {
        caller.write_all(head.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        while !answer.ends_with(b"ok") {
            let mut part = [0; 1_024];
            let read = caller.read(&mut part).await.unwrap();
            assert!(read > 0, "{}", String::from_utf8_lossy(&answer));
            answer.extend_from_slice(&part[..read]);
        }
    }
    let metrics = Client::new(weir.base_url()).get("/metrics").await.unwrap().body;
    let metrics = String::from_utf8(metrics.to_vec()).unwrap();
    let used = metrics.lines().find_map(|line| line.strip_prefix("weir_http_buffered_bytes ")).unwrap();
    assert!(used.parse::<f64>().unwrap() < 65_536.0, "{used} bytes are buffered");
}
