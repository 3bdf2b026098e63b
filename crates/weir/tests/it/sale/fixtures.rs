//! What tests of sale start from: sales, buyers, and somebody who listens.

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

use crate::fixtures::PATIENCE;

/// Connections that a test of many has, and those that all other tests and servers have meanwhile.
const CONNECTIONS: u64 = 10_000;
const SPARE: u64 = 2_000;

/// Lets this process, and the servers that it starts, have ten thousand connections; one test at a time, for there may not be
/// files for more.
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

/// Room and time for ten thousand calls at once on a machine that is slow. It may take long to make so many connections, and
/// those that nothing comes by would be closed meanwhile.
pub(super) const CROWDED: [(&str, &str); 3] =
    [("WEIR_HTTP_TIMEOUT", "120s"), ("WEIR_HTTP_READ_TIMEOUT", "120s"), ("WEIR_LANE_CAPACITY", "20000")];

/// A time so long from now, as the API writes it.
pub(super) fn in_ms(ms: i64) -> String {
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

/// Makes a product and expects it to work.
pub(super) async fn create(operator: &Client, product: &Value) -> Value {
    let response = operator.post("/api/v1/products", product).await.expect("an answer");
    assert_eq!(response.status, 201, "{:?}", response.body);
    response.json()["data"].clone()
}

/// Makes a product whose sale begins soon and lasts so long. A start that has passed when the server looks at it is refused: it
/// is as far away as an answer of the API may be.
pub(super) async fn soon(operator: &Client, sku: &str, stock: u32, lasts_ms: i64) {
    const LEAD_MS: i64 = 2_000;
    create(operator, &product(sku, stock, &in_ms(LEAD_MS), &in_ms(LEAD_MS + lasts_ms))).await;
}

/// A sale that runs, for a long time.
pub(crate) async fn active(operator: &Client, sku: &str, stock: u32) {
    soon(operator, sku, stock, 3_600_000).await;
    becomes(operator, sku, "ACTIVE").await;
}

pub(super) async fn status(client: &Client, sku: &str) -> Value {
    let response = client.get(&format!("/api/v1/sales?sku={sku}")).await.expect("an answer");
    assert_eq!(response.status, 200, "{:?}", response.body);
    response.json()["data"].clone()
}

/// Waits until a sale is in a state.
pub(super) async fn becomes(client: &Client, sku: &str, state: &str) {
    wait::until(&format!("{sku} is {state}"), PATIENCE, async || status(client, sku).await["state"] == state)
        .await;
}

/// Tries to buy, whatever comes of it.
pub(super) async fn attempt(client: &Client, sku: &str, buyer: &str) -> Response {
    let headers = [("content-type", "application/json"), ("x-user-id", buyer)];
    let body = json!({"sku": sku, "qty": 1}).to_string();
    client.request(Method::POST, "/api/v1/purchases", &headers, body).await.expect("an answer")
}

/// What comes of an attempt to buy: the purchase number, or the code of the refusal.
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

/// An event as it was heard.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Event {
    pub(super) name: String,
    pub(super) id: String,
    pub(super) data: Value,
}

/// Somebody who listens.
pub(super) struct Listener {
    lines: tokio::io::Lines<BufReader<OwnedReadHalf>>,
    _writer: tokio::net::tcp::OwnedWriteHalf,
    /// The head of the answer.
    pub(super) head: Vec<String>,
}

impl Listener {
    /// Connects; HTTP/1.0, so that the answer is not cut into chunks.
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

    /// The next event; none at the end of the stream. Heartbeats are not events, and no reason to wait for longer.
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

    /// Reads until an event of that name comes, and returns it.
    pub(super) async fn until(&mut self, name: &str) -> Event {
        loop {
            let event = self.next().await.expect("the stream must go on");
            if event.name == name {
                return event;
            }
        }
    }
}

async fn in_time<T>(read: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE * 2, read).await.expect("something must be heard")
}

/// No limit of attempts for one user.
pub(super) const UNTHROTTLED: (&str, &str) = ("WEIR_SALE_USER_PER_SECOND", "0");

/// The clock of servers in this process moves by this until sales begin that were made for a minute later.
pub(super) const MINUTE: Duration = Duration::from_secs(60);
