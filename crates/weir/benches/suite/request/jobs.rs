//! The effect of finished jobs: the time of a claim on an empty table, and after as many jobs as a busy month has.
//!
//! Uses the store directly, without HTTP, so that a million jobs take minutes.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use weir_core::request::canonical::{CanonicalJson, Fingerprint};
use weir_core::request::retry::{RetryDecision, RetryPolicy};
use weir_core::request::state::WorkerReport;
use weir_core::{IdempotencyKey, RequestId, RequestType, TenantId, Timestamp};
use weir_store::request::{ClaimOrder, DownstreamCapacity, JobReport, RequestStore, Sealed, Submit};

use crate::postgres::Postgres;
use crate::table::grouped;

/// Jobs per claim.
const BATCH: usize = 500;
/// The number of claims at either end whose median is compared.
const COMPARED: usize = 50;

pub(crate) struct ClaimComparison {
    pub(crate) name: String,
    /// The ratio of the median time of a claim, after to before.
    pub(crate) ratio: f64,
    pub(crate) note: String,
}

pub(crate) async fn measure(postgres: &Postgres, jobs: u64) -> Result<ClaimComparison> {
    let name = format!("a claim on Postgres after {} jobs / at the start", grouped(jobs as f64));
    eprintln!("measuring: {name}");
    let database = postgres.database().await;
    let target = database.url().parse().context("read the database's address")?;
    let store = weir_store_postgres::Postgres::open(target, 4).await?;
    let mut claims = Vec::new();
    for batch in 0..jobs.div_ceil(BATCH as u64) {
        claims.push(round(&store, batch).await?);
    }
    let books = store.audit_requests().await;
    drop(store);
    postgres.drop_database(database).await?;
    if let Ok(books) = books {
        ensure!(books.difference() == 0 && books.jobs == 0, "the books do not balance: {books:?}");
    }
    ensure!(claims.len() >= 2 * COMPARED, "too few claims to compare");
    let (before, after) = (median(&claims[..COMPARED]), median(&claims[claims.len() - COMPARED..]));
    let note = format!(
        "a claim of {BATCH} jobs took {:.1} ms at the start and {:.1} ms after {} jobs (medians of {COMPARED})",
        before.as_secs_f64() * 1e3,
        after.as_secs_f64() * 1e3,
        grouped(jobs as f64)
    );
    Ok(ClaimComparison { name, ratio: after.as_secs_f64() / before.as_secs_f64(), note })
}

/// Submits a batch, claims it and reports it as done. Returns the duration of the claim.
async fn round(store: &dyn RequestStore, batch: u64) -> Result<Duration> {
    let policy = RetryPolicy::default();
    let submits: Result<Vec<Submit>> = (0..BATCH as u64).map(|n| submit(batch * BATCH as u64 + n)).collect();
    store.submit_batch(submits?.into()).await?;
    let capacity = [DownstreamCapacity { downstream: "default".to_owned(), jobs: BATCH }];
    let began = Instant::now();
    let claimed = store.claim_jobs(&capacity, &ClaimOrder::default(), &policy).await?;
    let took = began.elapsed();
    ensure!(claimed.jobs.len() == BATCH, "{} of {BATCH} jobs were claimed", claimed.jobs.len());
    let reports = claimed.jobs.into_iter().map(|job| JobReport {
        id: job.id,
        token: job.token,
        report: WorkerReport::Called(RetryDecision::Complete),
        result: Some(job.payload),
        detail: None,
        random: 0,
    });
    let outcomes = store.report_batch(reports.collect(), &policy).await?;
    ensure!(outcomes.iter().all(Result::is_ok), "a report was refused");
    Ok(took)
}

fn submit(n: u64) -> Result<Submit> {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
    let now = Timestamp::from_micros(i64::try_from(now.as_micros())?);
    let request_type = RequestType::parse("payment")?;
    let mut random = [0; 10];
    random[2..].copy_from_slice(&n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes());
    Ok(Submit {
        id: RequestId::new(now, random),
        tenant: TenantId::parse("bench")?,
        key: IdempotencyKey::parse(n.to_string())?,
        fingerprint: Fingerprint::new(&request_type, &CanonicalJson::parse(b"{}")?),
        request_type,
        plain: None,
        payload: Sealed { key_id: "bench".to_owned(), bytes: vec![7; 128] },
        downstream: "default".to_owned(),
        callback_url: None,
        trace: None,
        needs_broker: false,
        limits: None,
    })
}

fn median(times: &[Duration]) -> Duration {
    let mut times = times.to_vec();
    times.sort_unstable();
    times[times.len() / 2]
}
