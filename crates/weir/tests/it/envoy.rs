//! The example of `deploy/envoy` under a real Envoy. What the service answers to other clients is in `grpc.rs`.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use weir_testkit::envoy::Envoy;
use weir_testkit::http::{Client, Response};
use weir_testkit::{skip, wait};

use crate::fixtures::{InProcess, Store, TEST_TIMEOUT, operator, weir};

const CONFIGURATION: &str = include_str!("../../../../deploy/envoy/envoy.yaml");
const SHIPPED_TIMEOUT: &str = "timeout: 0.25s";
/// For tests in which a busy machine must not make Envoy give up on Weir.
const PATIENT: (&str, &str) = (SHIPPED_TIMEOUT, "timeout: 30s");
const ADMIN_KEY: &str = "the-key-that-the-example-reads-from-the-environment";

/// The limits of the example.
fn limits() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/envoy/weir.toml")
}

/// A service behind Envoy, which counts the calls that reach it.
struct Service {
    address: SocketAddr,
    calls: Arc<AtomicUsize>,
}

impl Service {
    async fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let calls = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&calls);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(respond(stream, Arc::clone(&counter)));
            }
        });
        Self { address, calls }
    }

    fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }
}

/// Responds with 200 to one request and closes the connection.
async fn respond(stream: TcpStream, calls: Arc<AtomicUsize>) -> std::io::Result<()> {
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    while line != "\r\n" {
        line.clear();
        if stream.read_line(&mut line).await? == 0 {
            return Ok(());
        }
    }
    calls.fetch_add(1, Ordering::SeqCst);
    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").await?;
    stream.shutdown().await
}

/// Envoy with the shipped configuration, except for ports and `changes`, in front of a service.
struct Edge {
    envoy: Envoy,
    client: Client,
    service: Service,
}

impl Edge {
    async fn start(limiter: SocketAddr, changes: &[(&str, &str)]) -> Self {
        let service = Service::start().await;
        let ports = [("9000", service.address.port()), ("8081", limiter.port())];
        let ports =
            ports.map(|(shipped, here)| (format!("port_value: {shipped} "), format!("port_value: {here} ")));
        let changes = changes.iter().map(|&(shipped, here)| (shipped.to_owned(), here.to_owned()));
        let text = changes.chain(ports).fold(CONFIGURATION.to_owned(), |text, (shipped, here)| {
            assert_eq!(text.matches(&shipped).count(), 1, "the file says {shipped:?} once");
            text.replace(&shipped, &here)
        });
        assert_eq!(text.matches("port_value: 10000 ").count(), 1);
        let on_port = move |port| text.replace("port_value: 10000 ", &format!("port_value: {port} "));
        let envoy = Envoy::start(on_port, vec![("WEIR_ADMIN_KEY".into(), ADMIN_KEY.into())]).await;
        let client = Client::new(format!("http://{}", envoy.address())).unchecked();
        Self { envoy, client, service }
    }

    async fn get(&self, path: &str) -> Response {
        self.client.get(path).await.unwrap()
    }

    /// The statuses of calls one after the other.
    async fn statuses(&self, path: &str, count: usize) -> Vec<u16> {
        let mut statuses = Vec::new();
        for _ in 0..count {
            statuses.push(self.get(path).await.status);
        }
        statuses
    }

    /// The status line of a call from another address of this machine.
    async fn status_line_from(&self, address: Ipv4Addr, path: &str) -> String {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::from((address, 0))).unwrap();
        let mut stream = socket.connect(self.envoy.address()).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).await.unwrap();
        response.lines().next().unwrap_or_default().to_owned()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn envoy_limits_each_address_and_its_headers_say_how_much_is_left() {
    if skip("envoy") {
        return;
    }
    let server = InProcess::start_with_file(Store::Embedded, &[], Some(&limits())).await;
    let edge = Edge::start(server.grpc_address(), &[PATIENT]).await;
    let both = r#"5, 5;w=60;name="edge-logins", 100;w=60;name="edge-calls""#;
    for left in ["4", "3", "2", "1", "0"] {
        let answer = edge.get("/login").await;
        assert_eq!((answer.status, answer.header("x-ratelimit-remaining")), (200, Some(left)));
        assert_eq!(answer.header("x-ratelimit-limit"), Some(both), "the route's limit and its host's");
    }
    let denied = edge.get("/login").await;
    assert_eq!(denied.status, 429);
    assert_eq!(denied.header("retry-after"), Some("12"));
    assert_eq!(denied.header("x-envoy-ratelimited"), Some("true"));
    assert_eq!(denied.header("x-ratelimit-remaining"), Some("0"));
    assert_eq!(denied.header("x-ratelimit-reset"), Some("12"));
    assert_eq!(edge.service.calls(), 5, "a denied call does not reach the service");
    let forged = [("x-forwarded-for", "10.9.9.9")];
    let denied = edge.client.request(http::Method::GET, "/login", &forged, "").await.unwrap();
    assert_eq!(denied.status, 429, "a caller cannot choose its address");
    let other = edge.get("/anything").await;
    assert_eq!(
        (other.status, other.header("x-ratelimit-limit")),
        (200, Some(r#"100, 100;w=60;name="edge-calls""#))
    );
    assert_eq!(other.header("x-ratelimit-remaining"), Some("94"), "logins count, those denied do not");
    let elsewhere = edge.status_line_from(Ipv4Addr::new(127, 0, 0, 2), "/login").await;
    assert_eq!(elsewhere, "HTTP/1.1 200 OK", "another address has its own bucket");
    server.clock.advance(Duration::from_secs(12));
    assert_eq!(edge.statuses("/login", 2).await, [200, 429]);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_example_uses_nothing_that_envoy_deprecates() {
    if skip("envoy") {
        return;
    }
    let server = InProcess::start_with_file(Store::Embedded, &[], Some(&limits())).await;
    let edge = Edge::start(server.grpc_address(), &[PATIENT]).await;
    assert_eq!(edge.statuses("/", 1).await, [200]);
    let log = edge.envoy.log();
    assert!(log.contains("starting main dispatch loop"), "it logs how it starts: {log}");
    let complaints: Vec<_> = log.lines().filter(|line| line.to_lowercase().contains("deprecated")).collect();
    assert_eq!(complaints, [""; 0]);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shadow_policy_counts_and_envoy_lets_every_call_pass() {
    if skip("envoy") {
        return;
    }
    let server = InProcess::start_with_file(Store::Embedded, &[], Some(&limits())).await;
    let edge = Edge::start(server.grpc_address(), &[PATIENT]).await;
    let shadow = json!({
        "kind": "token_bucket", "capacity": 5, "refill": 5, "period": "PT1M", "shadow": true,
        "match": {"domain": "edge", "entries": {"path": "/login", "remote_address": "*"}},
    });
    let operator = server.operator();
    assert_eq!(operator.put("/admin/policies/edge-logins", &shadow).await.unwrap().status, 200);
    assert_eq!(edge.statuses("/login", 7).await, [200; 7]);
    let metrics = operator.get("/metrics").await.unwrap();
    let metrics = String::from_utf8_lossy(&metrics.body).into_owned();
    let counted = metrics.lines().find(|line| line.starts_with("weir_tier_shadow_denied_total"));
    assert_eq!(counted.and_then(|line| line.split(' ').next_back()), Some("2"), "{counted:?}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_pass_while_weir_is_away_and_its_limits_are_back_when_it_is() {
    if skip("envoy") {
        return;
    }
    for (mode, while_away) in [("failure_mode_deny: false", 200), ("failure_mode_deny: true", 500)] {
        let mut weir = weir().env("WEIR_CONFIG", limits()).spawn().await;
        // Its bucket must not refill while the test runs.
        let logins = json!({
            "kind": "token_bucket", "capacity": 5, "refill": 5, "period": "P1D",
            "match": {"domain": "edge", "entries": {"path": "/login", "remote_address": "*"}},
        });
        assert_eq!(operator(&weir).put("/admin/policies/edge-logins", &logins).await.unwrap().status, 200);
        let edge = Edge::start(weir.grpc_addr(), &[PATIENT, ("failure_mode_deny: false", mode)]).await;
        assert_eq!(edge.statuses("/login", 3).await, [200; 3]);
        weir.terminate();
        assert!(weir.wait(TEST_TIMEOUT).await.success());
        assert_eq!(edge.statuses("/login", 3).await, [while_away; 3], "{mode}");
        weir.restart().await;
        assert_eq!(edge.statuses("/login", 3).await, [200, 200, 429], "it remembers, and {mode}");
        weir.kill_9();
        assert_eq!(edge.statuses("/login", 3).await, [while_away; 3], "{mode}");
        weir.restart().await;
        let answer = edge.get("/login").await;
        assert!(answer.header("x-ratelimit-limit").is_some(), "{mode}: Envoy asks Weir again: {answer:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_weir_that_does_not_answer_delays_a_call_by_the_timeout_of_the_example() {
    if skip("envoy") {
        return;
    }
    let weir = weir().env("WEIR_CONFIG", limits()).spawn().await;
    let edge = Edge::start(weir.grpc_addr(), &[]).await;
    weir.pause();
    for answer in [edge.get("/login").await, edge.get("/login").await] {
        assert_eq!((answer.status, answer.header("x-ratelimit-limit")), (200, None));
    }
    weir.resume();
    wait::until("Weir decides again", TEST_TIMEOUT, async || {
        edge.get("/other").await.header("x-ratelimit-limit").is_some()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_credentials_of_the_example_are_those_that_weir_requires() {
    if skip("envoy") {
        return;
    }
    let settings = [("WEIR_ALLOW_ANONYMOUS", "false"), ("WEIR_ADMIN_KEY", ADMIN_KEY)];
    let server = InProcess::start_with_file(Store::Embedded, &settings, Some(&limits())).await;
    let with =
        Edge::start(server.grpc_address(), &[PATIENT, ("# initial_metadata:", "initial_metadata:")]).await;
    assert_eq!(with.statuses("/login", 6).await, [200, 200, 200, 200, 200, 429]);
    let without = Edge::start(server.grpc_address(), &[PATIENT]).await;
    let answer = without.get("/login").await;
    assert_eq!((answer.status, answer.header("x-ratelimit-limit")), (200, None), "Weir refuses to answer");
    server.stop().await;
}
