//! Whether tenants delay each other: how soon the requests of a quiet tenant are called, alone, and beside one tenant with a large
//! backlog and many tenants with a waiting request each.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use jsonwebtoken::{EncodingKey, Header, encode};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{sleep, sleep_until, timeout};
use weir_bench::{Body, Target, Template, configure, resolve};
use weir_testkit::http::Client;

use super::{PAYLOAD, Server};
use crate::Bench;
use crate::results::{Row, Run, percentiles_ms};
use crate::weir::{Engines, HOST};

const API_ONLY: (&str, &str) = ("WEIR_ROLES", "api");
const CALLS: u64 = 400;
/// Between two submissions of the quiet tenant: they are sent when they are due, whether the ones before have been called or not.
const PACE: Duration = Duration::from_millis(50);
/// How long the downstream takes.
const CALL: Duration = Duration::from_millis(5);
const TIMEOUT: Duration = Duration::from_secs(60);
/// Submissions of other tenants at a time.
const AT_ONCE: u64 = 64;

pub(crate) struct Fairness {
    pub(crate) alone: Run,
    pub(crate) beside: Run,
    /// What was waiting when the quiet tenant began and when it had ended.
    pub(crate) note: String,
}

/// `backlog` requests of one tenant, and a tenth as many tenants with one each.
pub(crate) async fn measure(bench: &Bench, engines: Engines<'_>, backlog: u64) -> Result<Fairness> {
    let name = format!("weir {}, quiet tenant", engines.name());
    let (url, mut arrivals) = downstream().await?;
    let downstream = [("WEIR_DOWNSTREAM", url.as_str())];
    eprintln!("measuring: {name}, alone");
    let server = Server::start(bench, &name, engines, &downstream).await?;
    let alone = quiet(bench, &server, &name, "alone", &mut arrivals).await?;
    server.finished().await?;
    let mut failures = server.stop_and_audit(CALLS).await;
    eprintln!("measuring: {name}, beside {backlog} requests of another and {} tenants", backlog / 10);
    let server = Server::start(bench, &name, engines, &[API_ONLY]).await?;
    fill(bench, &server, &name, backlog).await?;
    failures.extend(server.stop_and_audit(0).await);
    let server = Server::start(bench, &name, engines, &downstream).await?;
    let before = in_flight(&server).await?;
    let beside = quiet(bench, &server, &name, "beside", &mut arrivals).await?;
    let after = in_flight(&server).await?;
    if after == 0 {
        failures.push(format!("{name}: the backlog was gone before the end"));
    }
    failures.extend(server.stop_and_audit(0).await);
    let note = format!("{name}: {before} requests in flight at the start, {after} at the end");
    let row = |what: &str, [p50, p99]: [f64; 2]| Row {
        p50_ms: Some(p50),
        p99_ms: Some(p99),
        ..Row::without_latency(format!("{name} {what}, until the call"), 0.0, 0)
    };
    let alone = Run { row: row("alone", alone), failures };
    Ok(Fairness { alone, beside: Run { row: row("beside a backlog", beside), failures: Vec::new() }, note })
}

async fn in_flight(server: &Server) -> Result<u64> {
    server.books().await?["inFlight"].as_u64().context("the books say how many are in flight")
}

/// Submits requests of the quiet tenant at its pace. Returns how long they took to be called, from when they were due.
async fn quiet(
    bench: &Bench,
    server: &Server,
    name: &str,
    phase: &str,
    arrivals: &mut mpsc::UnboundedReceiver<(String, Instant)>,
) -> Result<[f64; 2]> {
    let caller = Client::new(&server.url).with_header("authorization", &bearer(bench, name, "quiet")?);
    let (began, mut sent, mut calls) = (Instant::now() + PACE, HashMap::new(), JoinSet::new());
    for call in 0..CALLS {
        let due = began + PACE * u32::try_from(call)?;
        sleep_until(due.into()).await;
        let key = format!("{phase}-{call}");
        sent.insert(key.clone(), due);
        let caller = caller.clone();
        calls.spawn(async move {
            let body = json!({"idempotencyKey": key, "requestType": "quiet", "payload": key});
            let answer = caller.post("/v1/requests", &body).await.context("submit a request")?;
            ensure!(answer.status == 202, "a submission was answered {}", answer.status);
            Ok(())
        });
    }
    let mut latencies = Vec::with_capacity(sent.len());
    while !sent.is_empty() {
        let arrived = timeout(TIMEOUT, arrivals.recv()).await.context("the downstream is called")?;
        let (key, at) = arrived.context("the downstream runs")?;
        if let Some(due) = sent.remove(&key) {
            latencies.push(u64::try_from((at - due).as_micros()).unwrap_or(u64::MAX));
        }
    }
    while let Some(ended) = calls.join_next().await {
        ended??;
    }
    Ok(percentiles_ms(latencies, [50, 99]))
}

/// Submits the backlog of one tenant, and a request of each of many.
async fn fill(bench: &Bench, server: &Server, name: &str, backlog: u64) -> Result<()> {
    let (address, _) = resolve(&server.url, false).await?;
    let authorization = bearer(bench, name, "big")?;
    let body = Body { before: r#"{"idempotencyKey":"big-"#.to_owned(), after: PAYLOAD.to_owned() };
    let headers = [("Authorization", authorization.as_str())];
    let template = Template::post_json_with(HOST, "/v1/requests", &headers, &body);
    configure(&Target { name: "the backlog".to_owned(), address, template }, backlog).await?;
    let (next, mut clients) = (Arc::new(AtomicU64::new(0)), JoinSet::new());
    let secret = secret(bench, name)?;
    for _ in 0..AT_ONCE {
        let (caller, next, secret) = (Client::new(&server.url), Arc::clone(&next), secret.clone());
        clients.spawn(async move {
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                if n >= backlog / 10 {
                    return Ok(());
                }
                let caller =
                    caller.clone().with_header("authorization", &sign(&secret, &format!("tenant-{n}"))?);
                let body = json!({"idempotencyKey": "k", "requestType": "other", "payload": n});
                let answer = caller.post("/v1/requests", &body).await.context("submit a request")?;
                ensure!(answer.status == 202, "a submission was answered {}", answer.status);
            }
        });
    }
    while let Some(ended) = clients.join_next().await {
        ended??;
    }
    Ok(())
}

fn secret(bench: &Bench, name: &str) -> Result<String> {
    let path = bench.path().join(name).join("data").join("jwt.secret");
    Ok(std::fs::read_to_string(path).context("read the secret of tokens")?.trim().to_owned())
}

fn bearer(bench: &Bench, name: &str, tenant: &str) -> Result<String> {
    sign(&secret(bench, name)?, tenant)
}

fn sign(secret: &str, tenant: &str) -> Result<String> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let scope = "requests:create requests:read";
    let claims = json!({"sub": "bench", "tenant_id": tenant, "scope": scope, "exp": now + 7_200});
    let token = encode(&Header::default(), &claims, &EncodingKey::from_secret(secret.as_bytes()))?;
    Ok(format!("Bearer {token}"))
}

/// Starts a downstream that says when requests of the quiet tenant arrive.
async fn downstream() -> Result<(String, mpsc::UnboundedReceiver<(String, Instant)>)> {
    let listener = TcpListener::bind("127.0.0.1:0").await.context("listen for calls")?;
    let url = format!("http://{}/", listener.local_addr()?);
    let (arrivals, received) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let arrivals = arrivals.clone();
            let answer = service_fn(move |call: Request<Incoming>| {
                let (at, arrivals) = (Instant::now(), arrivals.clone());
                async move {
                    let body = call.into_body().collect().await.map(http_body_util::Collected::to_bytes);
                    let body: Value = serde_json::from_slice(&body.unwrap_or_default()).unwrap_or_default();
                    if let (Some("quiet"), Some(key)) =
                        (body["requestType"].as_str(), body["payload"].as_str())
                    {
                        let _ = arrivals.send((key.to_owned(), at));
                    }
                    sleep(CALL).await;
                    Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("{}")))
                }
            });
            let connection = hyper::server::conn::http1::Builder::new();
            tokio::spawn(connection.serve_connection(TokioIo::new(stream), answer));
        }
    });
    Ok((url, received))
}
