//! Ten thousand concurrent event streams.

use std::net::SocketAddr;
use std::time::Duration;

use futures_util::{StreamExt, stream};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use weir_testkit::http::Client;
use weir_testkit::wait;

use super::fixtures::{buy, create_active, many_connections};
use crate::fixtures::{Running, Store, TEST_TIMEOUT};

const COUNT: usize = 10_000;
/// Connections that are opened, and streams that are read, concurrently.
const CONCURRENCY: usize = 200;
/// Long enough for a slow machine: the test is about complete delivery, not about time.
const LIMIT: Duration = Duration::from_secs(600);

/// Reads until the stream has contained `word`.
async fn read_until(stream: &mut TcpStream, word: &str) {
    let (mut received, mut buffer) = (Vec::new(), [0; 1_024]);
    while !String::from_utf8_lossy(&received).contains(word) {
        let read = tokio::time::timeout(LIMIT, stream.read(&mut buffer)).await.expect("in time");
        let read = read.expect("the stream must not break off");
        assert!(read > 0, "the stream ended before {word}: {}", String::from_utf8_lossy(&received));
        received.extend_from_slice(&buffer[..read]);
    }
}

async fn listen(address: SocketAddr) -> TcpStream {
    let connecting = tokio::time::timeout(LIMIT, TcpStream::connect(address)).await;
    let mut stream = connecting.expect("in time").expect("a connection");
    let request = "GET /api/v1/sales/events HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n";
    stream.write_all(request.as_bytes()).await.expect("it is sent");
    read_until(&mut stream, "event: initial").await;
    stream
}

async fn listeners(client: &Client) -> String {
    let metrics = client.get("/metrics").await.expect("an answer");
    let metrics = String::from_utf8_lossy(&metrics.body).into_owned();
    let line = metrics.lines().find_map(|line| line.strip_prefix("weir_sale_streams "));
    line.expect("the metric is there").to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_streams_are_cheap_and_all_get_the_last_event() {
    let _turn = many_connections().await;
    // All streams come from one address, so its limit is disabled.
    let running = Running::start_with(Store::Embedded, &[("WEIR_EDGE_SSE_PER_IP", "0")]).await;
    create_active(&running.operator(), "W", 1).await;
    let before = running.weir.memory();
    let address = running.weir.addr();
    let streams: Vec<TcpStream> =
        stream::iter((0..COUNT).map(|_| listen(address))).buffer_unordered(CONCURRENCY).collect().await;
    assert_eq!(listeners(&running.client()).await, COUNT.to_string());
    let bytes_per_stream = running.weir.memory().saturating_sub(before) / COUNT as u64;
    assert!(bytes_per_stream <= 10_000, "a stream costs {bytes_per_stream} bytes");
    buy(&running.client(), "W", "the-one").await.expect("a unit is in stock");
    let notified = stream::iter(streams).map(|mut stream| async move {
        read_until(&mut stream, "SOLD_OUT").await;
        stream
    });
    let streams: Vec<TcpStream> = notified.buffer_unordered(CONCURRENCY).collect().await;
    assert_eq!(streams.len(), COUNT);
    drop(streams);
    wait::until("the server has noticed all disconnects", TEST_TIMEOUT * 4, async || {
        listeners(&running.client()).await == "0"
    })
    .await;
}
