//! Tests of each mode against an echo server.

use std::time::Instant;

use tokio::time::timeout;

use super::*;

const TEST_TIMEOUT: Duration = Duration::from_secs(5);
/// How long to wait for bytes that must not come; if it is too short, a test may pass wrongly but never fail wrongly.
const SILENCE: Duration = Duration::from_millis(100);

async fn echo_server() -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut from, mut to) = stream.split();
                let _ = tokio::io::copy(&mut from, &mut to).await;
            });
        }
    });
    addr
}

async fn proxied() -> (Proxy, TcpStream) {
    let proxy = Proxy::start(echo_server().await).await;
    let mut stream = TcpStream::connect(proxy.addr()).await.unwrap();
    assert_eq!(echo(&mut stream, b"hello").await.unwrap(), b"hello");
    (proxy, stream)
}

async fn echo(stream: &mut TcpStream, bytes: &[u8]) -> io::Result<Vec<u8>> {
    stream.write_all(bytes).await?;
    let mut answer = vec![0; bytes.len()];
    timeout(TEST_TIMEOUT, stream.read_exact(&mut answer)).await.expect("an answer in time")?;
    Ok(answer)
}

async fn assert_silent(stream: &mut TcpStream) {
    let read = timeout(SILENCE, stream.read_u8()).await;
    assert!(read.is_err(), "expected silence, got {read:?}");
}

#[tokio::test]
async fn pass_forwards_bytes_and_the_end_of_the_stream() {
    let (_proxy, mut stream) = proxied().await;
    let large = vec![7; 300_000];
    let (mut from, mut to) = stream.split();
    let mut answer = Vec::new();
    let send = async {
        to.write_all(&large).await.unwrap();
        to.shutdown().await.unwrap();
    };
    timeout(TEST_TIMEOUT, async { tokio::join!(send, from.read_to_end(&mut answer)) })
        .await
        .unwrap()
        .1
        .unwrap();
    assert_eq!(answer, large);
}

#[tokio::test]
async fn delay_applies_to_each_chunk_in_both_directions() {
    let (proxy, mut stream) = proxied().await;
    proxy.delay(Duration::from_millis(50));
    let started = Instant::now();
    echo(&mut stream, b"slow").await.unwrap();
    assert!(started.elapsed() >= Duration::from_millis(100));
}

#[tokio::test]
async fn a_delayed_chunk_is_forwarded_when_the_delay_is_lifted() {
    let (proxy, mut stream) = proxied().await;
    proxy.delay(Duration::from_secs(3600));
    stream.write_all(b"held").await.unwrap();
    assert_silent(&mut stream).await;
    proxy.pass();
    let mut answer = [0; 4];
    timeout(TEST_TIMEOUT, stream.read_exact(&mut answer)).await.unwrap().unwrap();
}

#[tokio::test]
async fn cut_resets_open_connections_and_only_those() {
    let (proxy, mut stream) = proxied().await;
    proxy.cut();
    let error = timeout(TEST_TIMEOUT, stream.read_u8()).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    let mut next = TcpStream::connect(proxy.addr()).await.unwrap();
    echo(&mut next, b"again").await.unwrap();
}

#[tokio::test]
async fn refuse_closes_new_connections_and_leaves_open_ones() {
    let (proxy, mut stream) = proxied().await;
    proxy.refuse();
    let mut next = TcpStream::connect(proxy.addr()).await.unwrap();
    assert!(timeout(TEST_TIMEOUT, next.read_u8()).await.unwrap().is_err());
    echo(&mut stream, b"still here").await.unwrap();
}

#[tokio::test]
async fn black_hole_is_silent_until_it_heals() {
    let (proxy, mut stream) = proxied().await;
    proxy.black_hole();
    stream.write_all(b"lost").await.unwrap();
    let mut next = TcpStream::connect(proxy.addr()).await.unwrap();
    next.write_all(b"also").await.unwrap();
    assert_silent(&mut stream).await;
    assert_silent(&mut next).await;

    proxy.pass();
    let mut answer = [0; 4];
    timeout(TEST_TIMEOUT, stream.read_exact(&mut answer)).await.unwrap().unwrap();
    assert_eq!(&answer, b"lost");
    timeout(TEST_TIMEOUT, next.read_exact(&mut answer)).await.unwrap().unwrap();
    assert_eq!(&answer, b"also");
}

#[tokio::test]
async fn black_hole_hides_the_end_of_the_upstream() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let proxy = Proxy::start(listener.local_addr().unwrap()).await;
    let mut client = TcpStream::connect(proxy.addr()).await.unwrap();
    let (server, _) = listener.accept().await.unwrap();
    proxy.black_hole();
    drop(server);
    assert_silent(&mut client).await;
    proxy.cut();
    assert!(timeout(TEST_TIMEOUT, client.read_u8()).await.unwrap().is_err());
}

#[tokio::test]
async fn half_open_after_forwards_exactly_this_many_bytes() {
    let (proxy, mut stream) = proxied().await;
    proxy.half_open_after(10 + 4);
    stream.write_all(b"0123456789").await.unwrap();
    let mut answer = [0; 4];
    timeout(TEST_TIMEOUT, stream.read_exact(&mut answer)).await.unwrap().unwrap();
    assert_eq!(&answer, b"0123");
    assert_silent(&mut stream).await;
}

#[tokio::test]
async fn dropping_the_proxy_ends_its_connections() {
    let (proxy, mut stream) = proxied().await;
    drop(proxy);
    assert!(timeout(TEST_TIMEOUT, stream.read_u8()).await.unwrap().is_err());
}
