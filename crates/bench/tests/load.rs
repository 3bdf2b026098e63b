//! Tests the generator's counts with small servers, correct and faulty ones. No timing is asserted.
#![expect(clippy::unwrap_used, reason = "a server that cannot be set up has to fail its test")]

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::post;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use weir_bench::{Body, ErrorCounts, Expect, LoadOptions, Report, Target, Template, configure, measure};

const OK: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

fn load() -> LoadOptions {
    LoadOptions {
        connections: 8,
        warmup: Duration::from_millis(20),
        duration: Duration::from_millis(400),
        ..LoadOptions::default()
    }
}

fn target(address: SocketAddr) -> Target {
    let body = Body { before: r#"{"userId":"bench-"#.into(), after: r#"","message":"hello"}"#.into() };
    Target { name: "test".into(), address, template: Template::post_json("localhost", "/api/send", &body) }
}

async fn serve(router: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

async fn serve_ok() -> SocketAddr {
    serve(Router::new().route("/api/send", post(|| async { "ok" }))).await
}

/// Runs `behave` on every connection.
async fn serve_raw<F>(behave: impl Fn(TcpStream) -> F + Send + 'static) -> SocketAddr
where
    F: Future<Output = std::io::Result<()>> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(behave(stream));
        }
    });
    address
}

/// Requests of this size arrive in one piece.
async fn read_request(stream: &mut TcpStream) -> std::io::Result<()> {
    match stream.read(&mut [0; 1024]).await? {
        0 => Err(std::io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(()),
    }
}

async fn measured(address: SocketAddr, load: &LoadOptions) -> Report {
    measure(&target(address), load).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_loop_counts_only_answers() {
    let report = measured(serve_ok().await, &load()).await;
    assert!(report.requests > 0);
    assert_eq!(report.statuses.get(&200), Some(&report.requests));
    assert_eq!((report.errors, report.unsent), (ErrorCounts::default(), 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals_count_as_expected_only_if_they_are_expected() {
    let address =
        serve(Router::new().route("/api/send", post(|| async { StatusCode::TOO_MANY_REQUESTS }))).await;
    let report = measured(address, &LoadOptions { expect: Expect::Status(429), ..load() }).await;
    assert!(report.requests > 0);
    assert_eq!(report.expected(), report.requests);
    assert_eq!(measured(address, &load()).await.expected(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn threads_share_the_connections_and_add_up() {
    let report = measured(serve_ok().await, &LoadOptions { threads: 3, ..load() }).await;
    assert_eq!(report.statuses.values().sum::<u64>(), report.requests);
    assert!(report.requests > 0 && report.errors == ErrorCounts::default());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_loop_accounts_for_every_request_that_was_due() {
    let options = LoadOptions { rate_per_s: NonZeroU32::new(1000), ..load() };
    let report = measured(serve_ok().await, &options).await;
    assert_eq!(report.requests + report.unsent, 400, "{report:?}");
    assert_eq!(report.errors, ErrorCounts::default());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_loop_counts_requests_that_a_slow_server_kept_from_being_sent() {
    let slow = post(|| async { tokio::time::sleep(Duration::from_millis(100)).await });
    let address = serve(Router::new().route("/api/send", slow)).await;
    let options = LoadOptions { connections: 1, rate_per_s: NonZeroU32::new(1000), ..load() };
    let report = measured(address, &options).await;
    assert!(report.unsent > 0);
    assert_eq!(report.requests + report.unsent, 400, "{report:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_connection_is_counted_and_comes_back() {
    // One response, then the end of the connection.
    let address = serve_raw(|mut stream| async move {
        read_request(&mut stream).await?;
        stream.write_all(OK).await?;
        read_request(&mut stream).await
    })
    .await;
    let report = measured(address, &load()).await;
    assert!(report.errors.reset > 0 && report.requests > 8, "{report:?}");
    assert_eq!(report.errors.total(), report.errors.reset);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_that_asks_to_close_is_not_an_error() {
    let address = serve_raw(|mut stream| async move {
        read_request(&mut stream).await?;
        stream.write_all(b"HTTP/1.1 503 Busy\r\nconnection: close\r\ncontent-length: 0\r\n\r\n").await
    })
    .await;
    let report = measured(address, &load()).await;
    assert!(report.requests > 8);
    assert_eq!((report.statuses.get(&503), report.errors.total()), (Some(&report.requests), 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_server_gives_timeouts_and_an_end() {
    let address = serve_raw(|mut stream| async move {
        while stream.read(&mut [0; 1024]).await? > 0 {}
        Ok(())
    })
    .await;
    let options = LoadOptions { warmup: Duration::ZERO, timeout: Duration::from_millis(20), ..load() };
    let report = measured(address, &options).await;
    assert!(report.errors.timeout >= 8, "{report:?}");
    assert_eq!(report.requests, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_is_a_protocol_error() {
    for garbage in [&b"SSH-2.0-OpenSSH_9.2\r\n"[..], &[OK, b"more"].concat()] {
        let garbage = garbage.to_vec();
        let address = serve_raw(move |mut stream| {
            let garbage = garbage.clone();
            async move {
                read_request(&mut stream).await?;
                stream.write_all(&garbage).await
            }
        })
        .await;
        let report = measured(address, &load()).await;
        assert!(report.errors.protocol > 0 && report.requests == 0, "{report:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_listening_is_a_connect_error() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let report = measured(address, &LoadOptions { warmup: Duration::ZERO, ..load() }).await;
    assert!(report.errors.connect >= 8 && report.requests == 0, "{report:?}");
}

/// A server that records the bodies of requests.
async fn serve_recorder() -> (SocketAddr, Arc<Mutex<Vec<String>>>) {
    let bodies = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&bodies);
    let keep = post(move |body: String| async move { kept.lock().unwrap().push(body) });
    (serve(Router::new().route("/api/send", keep)).await, bodies)
}

fn body(key: u64) -> String {
    format!(r#"{{"userId":"bench-{key:010}","message":"hello"}}"#)
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_spread_over_the_keys_and_no_others() {
    let (address, bodies) = serve_recorder().await;
    measured(address, &LoadOptions { keys: 5, ..load() }).await;
    let seen: BTreeSet<String> = bodies.lock().unwrap().drain(..).collect();
    assert_eq!(seen, (0..5).map(body).collect());
}

#[tokio::test(flavor = "multi_thread")]
async fn configuring_sends_each_key_once() {
    let (address, bodies) = serve_recorder().await;
    configure(&target(address), 1003).await.unwrap();
    let mut sent = std::mem::take(&mut *bodies.lock().unwrap());
    sent.sort_unstable();
    assert_eq!(sent, (0..1003).map(body).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn configuring_fails_on_an_answer_that_is_not_2xx() {
    let address = serve(Router::new().route("/api/send", post(|| async { StatusCode::BAD_REQUEST }))).await;
    let error = configure(&target(address), 3).await.unwrap_err().to_string();
    assert!(error.contains("answered 400"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_load_without_connections_or_time_is_refused() {
    let target = target("127.0.0.1:1".parse().unwrap());
    for options in [
        LoadOptions { connections: 0, ..load() },
        LoadOptions { threads: 0, ..load() },
        LoadOptions { keys: 0, ..load() },
        LoadOptions { duration: Duration::ZERO, ..load() },
    ] {
        assert!(measure(&target, &options).await.is_err(), "{options:?}");
    }
}
