//! How soon an idle worker starts: from sending a submission to the call of its downstream.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use super::Server;
use crate::Bench;
use crate::results::{Row, Run, percentiles_ms};
use crate::weir::Engines;

const CALLS: usize = 200;
/// Long enough for a worker to become idle.
const IDLE: Duration = Duration::from_millis(20);
const TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) async fn measure(bench: &Bench, engines: Engines<'_>) -> Result<Run> {
    let name = format!("weir {}, idle, until the downstream is called", engines.name());
    eprintln!("measuring: {name}");
    let (url, mut arrivals) = downstream().await?;
    let server = Server::start(bench, &name, engines, &[("WEIR_DOWNSTREAM", &url)]).await?;
    let caller = server.caller();
    let mut latencies = Vec::with_capacity(CALLS);
    for call in 0..CALLS {
        let body =
            json!({"idempotencyKey": format!("wake-{call}"), "requestType": "payment", "payload": call});
        let sent = Instant::now();
        let answer = caller.post("/v1/requests", &body).await.context("submit a request")?;
        ensure!(answer.status == 202, "a submission was answered {}", answer.status);
        let arrived = timeout(TIMEOUT, arrivals.recv()).await.context("the downstream is called")?;
        let arrived = arrived.context("the downstream runs")?;
        latencies.push(u64::try_from((arrived - sent).as_micros()).unwrap_or(u64::MAX));
        sleep(IDLE).await;
    }
    server.finished().await?;
    let failures = server.stop_and_audit(CALLS as u64).await;
    let [p50, p99] = percentiles_ms(latencies, [50, 99]);
    let row = Row { p50_ms: Some(p50), p99_ms: Some(p99), ..Row::without_latency(name, 0.0, 0) };
    Ok(Run { row, failures })
}

/// Starts a downstream that reports when it is called.
async fn downstream() -> Result<(String, mpsc::UnboundedReceiver<Instant>)> {
    let listener = TcpListener::bind("127.0.0.1:0").await.context("listen for calls")?;
    let url = format!("http://{}/", listener.local_addr()?);
    let (arrivals, received) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let arrivals = arrivals.clone();
            let answer = service_fn(move |_call: Request<Incoming>| {
                let _ = arrivals.send(Instant::now());
                async { Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("{}"))) }
            });
            let connection = hyper::server::conn::http1::Builder::new();
            tokio::spawn(connection.serve_connection(TokioIo::new(stream), answer));
        }
    });
    Ok((url, received))
}
