//! Reads statuses at a rate while others submit. A read is begun when it is due, whether the ones before have been answered or not.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::sleep_until;
use weir_testkit::http::Client;

/// Requests that are read.
const IDS: usize = 200;

#[derive(Clone, Copy)]
pub(super) struct Statuses {
    pub(super) p95_ms: f64,
    /// Reads that were not answered with 200.
    pub(super) failed: usize,
}

pub(super) async fn probe(
    caller: Client,
    rate: u32,
    warmup: Duration,
    duration: Duration,
) -> Result<Statuses> {
    let begun = Instant::now();
    let mut ids = Vec::with_capacity(IDS);
    for n in 0..IDS {
        let body = json!({"idempotencyKey": format!("status-{n}"), "requestType": "payment", "payload": n});
        let answer = caller.post("/v1/requests", &body).await.context("submit a request")?;
        ensure!(answer.status == 202, "a submission was answered {}", answer.status);
        ids.push(format!("/v1/requests/{}", answer.json()["requestId"].as_str().context("it has an id")?));
    }
    let measured_from = begun + warmup;
    let interval = Duration::from_secs(1) / rate.max(1);
    let (mut due, end) = (measured_from, measured_from + duration);
    let (mut reads, mut latencies, mut failed) = (JoinSet::new(), Vec::new(), 0);
    for path in ids.iter().cycle() {
        if due >= end {
            break;
        }
        sleep_until(due.into()).await;
        let (caller, path) = (caller.clone(), path.clone());
        reads.spawn(async move {
            let answer = caller.get(&path).await;
            (answer.is_ok_and(|answer| answer.status == 200), due.elapsed())
        });
        due += interval;
        while let Some(read) = reads.try_join_next() {
            take(read?, &mut latencies, &mut failed);
        }
    }
    while let Some(read) = reads.join_next().await {
        take(read?, &mut latencies, &mut failed);
    }
    latencies.sort_unstable();
    let p95 = latencies.get(latencies.len() * 95 / 100).copied().unwrap_or(Duration::MAX);
    Ok(Statuses { p95_ms: p95.as_secs_f64() * 1e3, failed })
}

fn take((is_ok, latency): (bool, Duration), latencies: &mut Vec<Duration>, failed: &mut usize) {
    latencies.push(latency);
    *failed += usize::from(!is_ok);
}
