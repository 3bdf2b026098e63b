//! Products, purchases and a client of the event stream, for tests of sale.

use std::time::Duration;

use http::Method;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedReadHalf;
use tokio::sync::{Mutex, MutexGuard};
use weir_testkit::http::{Client, Response};
use weir_testkit::wait;

use crate::fixtures::TEST_TIMEOUT;

/// Connections of a test that opens many.
const CONNECTIONS: u64 = 10_000;
/// Connections of all other tests and servers meanwhile.
const SPARE: u64 = 2_000;

/// Raises the limit of open files of this process and the servers that it starts, so that they can have ten thousand
/// connections. Only one test at a time may have so many.
pub(super) async fn many_connections() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::const_new(());
    let turn = TURN.lock().await;
    let needed = CONNECTIONS + SPARE;
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current.is_some_and(|current| current < needed) {
        let limit = Rlimit { current: Some(needed), maximum: maximum.map(|maximum| maximum.max(needed)) };
        setrlimit(Resource::Nofile, limit).expect("this test needs 12,000 open files: raise `ulimit -Hn`");
    }
    turn
}

/// Capacity and timeouts for ten thousand concurrent calls on a slow machine. Opening so many connections may take long,
/// and idle ones would be closed meanwhile.
pub(super) const MANY_CALLERS: [(&str, &str); 3] =
    [("WEIR_HTTP_TIMEOUT", "120s"), ("WEIR_HTTP_READ_TIMEOUT", "120s"), ("WEIR_LANE_CAPACITY", "20000")];

/// The time `ms` milliseconds from now, as the API writes it.
pub(super) fn ms_from_now(ms: i64) -> String {
    let at = jiff::Timestamp::now() + jiff::SignedDuration::from_millis(ms);
    at.strftime("%Y-%m-%dT%H:%M:%S%.3fZ").to_string()
}

pub(super) fn product(sku: &str, stock: u32, start: &str, end: &str) -> Value {
    json!({
        "sku": sku,
        "productName": "Limited Edition Widget",
        "initialStock": stock,
        "startTime": start,
        "endTime": end,
    })
}

/// Creates a product, and expects that to succeed.
pub(super) async fn create(operator: &Client, product: &Value) -> Value {
    let response = operator.post("/api/v1/products", product).await.expect("an answer");
    assert_eq!(response.status, 201, "{:?}", response.body);
    response.json()["data"].clone()
}

/// Creates a product whose sale starts soon and lasts `lasts_ms`. The server refuses a start in the past, so the start is
/// as far away as a response of the API may take.
pub(super) async fn create_soon(operator: &Client, sku: &str, stock: u32, lasts_ms: i64) {
    const LEAD_MS: i64 = 2_000;
    create(operator, &product(sku, stock, &ms_from_now(LEAD_MS), &ms_from_now(LEAD_MS + lasts_ms))).await;
}

/// Creates a product and waits until its sale is active. It stays active for an hour.
pub(crate) async fn create_active(operator: &Client, sku: &str, stock: u32) {
    create_soon(operator, sku, stock, 3_600_000).await;
    wait_for_state(operator, sku, "ACTIVE").await;
}

pub(super) async fn status(client: &Client, sku: &str) -> Value {
    let response = client.get(&format!("/api/v1/sales?sku={sku}")).await.expect("an answer");
    assert_eq!(response.status, 200, "{:?}", response.body);
    response.json()["data"].clone()
}

pub(super) async fn wait_for_state(client: &Client, sku: &str, state: &str) {
    wait::until(&format!("{sku} is {state}"), TEST_TIMEOUT, async || {
        status(client, sku).await["state"] == state
    })
    .await;
}

/// Tries to buy a unit, and returns the response.
pub(super) async fn attempt(client: &Client, sku: &str, buyer: &str) -> Response {
    let headers = [("content-type", "application/json"), ("x-user-id", buyer)];
    let body = json!({"sku": sku, "qty": 1}).to_string();
    client.request(Method::POST, "/api/v1/purchases", &headers, body).await.expect("an answer")
}

/// Tries to buy a unit, and returns the purchase number or the error code.
pub(super) async fn buy(client: &Client, sku: &str, buyer: &str) -> Result<String, String> {
    let response = attempt(client, sku, buyer).await;
    assert_eq!(response.status, 200, "{:?}", response.body);
    let body = response.json();
    match body["success"].as_bool() {
        Some(true) => Ok(body["data"]["purchaseNo"].as_str().expect("a number").to_owned()),
        _ => Err(body["error"]["code"].as_str().expect("a code").to_owned()),
    }
}

pub(super) async fn purchase(client: &Client, sku: &str, buyer: &str) -> Response {
    let headers = [("x-user-id", buyer)];
    let path = format!("/api/v1/purchases?sku={sku}");
    client.request(Method::GET, &path, &headers, "").await.expect("an answer")
}

/// The value of a metric, 0 if it is not shown. `name` has the labels, too.
pub(super) async fn metric(client: &Client, name: &str) -> u64 {
    let metrics = client.get("/metrics").await.expect("an answer");
    let metrics = String::from_utf8_lossy(&metrics.body).into_owned();
    let value = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.unwrap_or("0").parse().expect("a whole number")
}

/// An event of the stream.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Event {
    pub(super) name: String,
    pub(super) id: String,
    pub(super) data: Value,
}

/// A client of the event stream.
pub(super) struct Listener {
    lines: tokio::io::Lines<BufReader<OwnedReadHalf>>,
    _writer: tokio::net::tcp::OwnedWriteHalf,
    /// The head of the response.
    pub(super) head: Vec<String>,
}

impl Listener {
    /// Connects with HTTP/1.0, so that the response is not chunked.
    pub(super) async fn connect(address: std::net::SocketAddr, query: &str, last: Option<&str>) -> Self {
        let stream = TcpStream::connect(address).await.expect("a connection");
        let (reader, mut writer) = stream.into_split();
        let last = last.map(|id| format!("Last-Event-ID: {id}\r\n")).unwrap_or_default();
        let request = format!("GET /api/v1/sales/events{query} HTTP/1.0\r\nHost: localhost\r\n{last}\r\n");
        writer.write_all(request.as_bytes()).await.expect("it is sent");
        let mut lines = BufReader::new(reader).lines();
        let mut head = Vec::new();
        while let Some(line) =
            in_time(lines.next_line()).await.expect("a head").filter(|line| !line.is_empty())
        {
            head.push(line);
        }
        Self { lines, _writer: writer, head }
    }

    pub(super) fn status(&self) -> &str {
        self.head[0].split(' ').nth(1).expect("a status")
    }

    /// The next event, or `None` at the end of the stream. Heartbeats are skipped, and do not extend the timeout.
    pub(super) async fn next(&mut self) -> Option<Event> {
        in_time(self.read()).await
    }

    async fn read(&mut self) -> Option<Event> {
        let mut event = Event { name: String::new(), id: String::new(), data: Value::Null };
        loop {
            let line = self.lines.next_line().await.ok().flatten()?;
            match line.split_once(": ") {
                Some(("event", name)) => event.name = name.to_owned(),
                Some(("id", id)) => event.id = id.to_owned(),
                Some(("data", data)) => event.data = serde_json::from_str(data).expect("JSON"),
                _ if line.is_empty() && !event.name.is_empty() => return Some(event),
                _ => {}
            }
        }
    }

    /// Reads until an event with this name arrives, and returns it.
    pub(super) async fn until(&mut self, name: &str) -> Event {
        loop {
            let event = self.next().await.expect("the stream must not end");
            if event.name == name {
                return event;
            }
        }
    }
}

async fn in_time<T>(read: impl Future<Output = T>) -> T {
    tokio::time::timeout(TEST_TIMEOUT * 2, read).await.expect("an event must arrive in time")
}

/// Disables the limit of attempts per user.
pub(super) const UNTHROTTLED: (&str, &str) = ("WEIR_SALE_USER_PER_SECOND", "0");

/// How far tests move the clock of servers in this process to start a sale that is one minute away.
pub(super) const MINUTE: Duration = Duration::from_secs(60);
