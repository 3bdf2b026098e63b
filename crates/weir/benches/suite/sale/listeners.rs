//! Ten thousand event streams of a sale: the memory of each, and the time until all have received that it is sold out.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use weir_bench::resolve;
use weir_testkit::http::Client;

use super::{SKU, Server};
use crate::Bench;
use crate::startup::resident_kb;
use crate::weir::{Engines, HOST};

pub(crate) const COUNT: usize = 10_000;
/// Connections opened concurrently.
const CONCURRENCY: usize = 200;
const LIMIT: Duration = Duration::from_secs(60);

pub(crate) struct StreamResults {
    pub(crate) notified_ms: f64,
    pub(crate) kb_each: f64,
    pub(crate) failures: Vec<String>,
}

pub(crate) async fn measure(bench: &Bench) -> Result<StreamResults> {
    let name = "weir embedded, ten thousand streams";
    eprintln!("measuring: {name}");
    let server = Server::start(bench, name, Engines::EMBEDDED, 1).await?;
    let (address, _) = resolve(&server.url, false).await?;
    let before_kb = resident_kb(server.process.id())?;
    let streams = listen(address).await?;
    let after_kb = resident_kb(server.process.id())?;
    let (notify, mut notified) = mpsc::unbounded_channel();
    let mut listeners = JoinSet::new();
    for stream in streams {
        let notify = notify.clone();
        listeners.spawn(async move {
            if until_sold_out(stream).await.is_ok() {
                let _ = notify.send(Instant::now());
            }
        });
    }
    drop(notify);
    let bought_at = Instant::now();
    let buyer = Client::new(&server.url).with_header("x-user-id", "the-one");
    let body = serde_json::json!({"sku": SKU, "qty": 1});
    let answer = buyer.post("/api/v1/purchases", &body).await.context("buy the unit")?;
    ensure!(answer.json()["success"] == true, "the unit was not sold: {:?}", answer.body);
    let mut received = (0, bought_at);
    let all = async {
        while let Some(at) = notified.recv().await {
            received = (received.0 + 1, received.1.max(at));
        }
    };
    tokio::time::timeout(LIMIT, all).await.context("not every stream received that it is sold out")?;
    ensure!(received.0 == COUNT, "{} of {COUNT} streams received that it is sold out", received.0);
    let failures = server.stop_and_audit(1).await;
    let notified_ms = received.1.duration_since(bought_at).as_secs_f64() * 1e3;
    let kb_each = after_kb.saturating_sub(before_kb) as f64 * 1.024 / COUNT as f64;
    Ok(StreamResults { notified_ms, kb_each, failures })
}

/// Opens the streams and waits for their first event.
async fn listen(address: SocketAddr) -> Result<Vec<TcpStream>> {
    let (mut streams, mut opening) = (Vec::with_capacity(COUNT), JoinSet::new());
    for n in 0..COUNT {
        if opening.len() >= CONCURRENCY
            && let Some(opened) = opening.join_next().await
        {
            streams.push(opened??);
        }
        opening.spawn(async move {
            tokio::time::timeout(LIMIT, open(address)).await.with_context(|| format!("open stream {n}"))?
        });
    }
    while let Some(opened) = opening.join_next().await {
        streams.push(opened??);
    }
    Ok(streams)
}

async fn open(address: SocketAddr) -> Result<TcpStream> {
    let mut stream = TcpStream::connect(address).await.context("connect")?;
    let request =
        format!("GET /api/v1/sales/events HTTP/1.1\r\nHost: {HOST}\r\nAccept: text/event-stream\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    read_until(&mut stream, "initial").await?;
    Ok(stream)
}

async fn until_sold_out(mut stream: TcpStream) -> Result<()> {
    read_until(&mut stream, "SOLD_OUT").await
}

async fn read_until(stream: &mut TcpStream, word: &str) -> Result<()> {
    let (mut text, mut buffer) = (Vec::new(), [0; 1024]);
    loop {
        let read = stream.read(&mut buffer).await?;
        ensure!(read > 0, "the stream ended: {}", String::from_utf8_lossy(&text));
        text.extend_from_slice(&buffer[..read]);
        if String::from_utf8_lossy(&text).contains(word) {
            return Ok(());
        }
    }
}
