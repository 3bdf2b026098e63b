//! Samples of a server's memory and of what it stores, and how much they grow: by the slope of a line through the samples of the
//! second half, so that neither caches that fill nor a single peak decide.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use tokio::time::sleep;
use weir_testkit::postgres::Database;

const SAMPLES: u32 = 120;
const SHOWN_EVERY: usize = 12;
/// Requests, all that is stored, and the jobs' table with its indexes.
const SIZES: &str = "
    SELECT (SELECT coalesce(sum(accepted), 0)::bigint FROM request_ledger), pg_database_size(current_database()),
           pg_total_relation_size('request_job')";
const MB: f64 = 1e6;

#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    seconds: f64,
    memory: f64,
    stored: f64,
    jobs: f64,
    /// Requests; 0 where the store cannot be asked, and then time stands for them: the rate is constant.
    requests: f64,
}

/// By how much something grows in a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Growth {
    pub(super) memory_mb: f64,
    pub(super) jobs_mb: f64,
    /// Bytes stored for each request in the second half of the run / in the first.
    pub(super) stored_ratio: f64,
}

/// Samples a server for so long.
pub(super) async fn growth(
    process: u32,
    data: &Path,
    database: Option<&Database>,
    duration: Duration,
) -> Result<Growth> {
    let samples = take(process, data, database, duration).await?;
    ensure!(samples.len() >= 8, "too few samples");
    let second_half = &samples[samples.len() / 2..];
    let span = second_half.last().zip(second_half.first()).map_or(0.0, |(b, a)| b.seconds - a.seconds);
    let growth = |value: fn(&Sample) -> f64| slope(second_half, value) * span / MB;
    let [first, middle, last] = [0, samples.len() / 2, samples.len() - 1].map(|at| samples[at]);
    let rate = |from: Sample, to: Sample| {
        let count = if to.requests > 0.0 { to.requests - from.requests } else { to.seconds - from.seconds };
        (to.stored - from.stored) / count.max(1e-9)
    };
    Ok(Growth {
        memory_mb: growth(|sample| sample.memory),
        jobs_mb: growth(|sample| sample.jobs),
        stored_ratio: rate(middle, last) / rate(first, middle),
    })
}

async fn take(
    process: u32,
    data: &Path,
    database: Option<&Database>,
    duration: Duration,
) -> Result<Vec<Sample>> {
    let (begun, pause) = (Instant::now(), duration / SAMPLES);
    let mut samples = Vec::new();
    while begun.elapsed() < duration {
        let mut sample = Sample {
            seconds: begun.elapsed().as_secs_f64(),
            memory: memory(process)?,
            stored: stored(data)?,
            ..Sample::default()
        };
        if let Some(database) = database {
            let rows = database.query_strings(SIZES).await;
            let mut sizes = rows.iter().flatten().flatten().filter_map(|size| size.parse().ok());
            let mut next = || sizes.next().context("PostgreSQL did not say how large its tables are");
            (sample.requests, sample.stored, sample.jobs) = (next()?, next()?, next()?);
        }
        if samples.len().is_multiple_of(SHOWN_EVERY) {
            eprintln!(
                "  {:>5.0} s: {:.1} MB in memory, {:.1} MB stored, {:.2} MB of jobs",
                sample.seconds,
                sample.memory / MB,
                sample.stored / MB,
                sample.jobs / MB
            );
        }
        samples.push(sample);
        sleep(pause).await;
    }
    Ok(samples)
}

/// Resident memory of a process.
fn memory(process: u32) -> Result<f64> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).context("the server has ended")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("it has no memory")?;
    let kilobytes: f64 = line.trim().trim_end_matches(" kB").parse().context("a number of kB")?;
    Ok(kilobytes * 1024.0)
}

/// The size of the files of the embedded engine, without the write-ahead log, whose size comes and goes.
fn stored(data: &Path) -> Result<f64> {
    let mut total = 0;
    for entry in fs::read_dir(data).context("read the data directory")? {
        let entry = entry?;
        let name = entry.file_name();
        if !name.as_encoded_bytes().ends_with(b"-wal") && !name.as_encoded_bytes().ends_with(b"-shm") {
            total += entry.metadata()?.len();
        }
    }
    Ok(total as f64)
}

/// The slope of the line with the least squares, in units per second.
fn slope(samples: &[Sample], value: fn(&Sample) -> f64) -> f64 {
    let count = samples.len() as f64;
    let mean = |of: &dyn Fn(&Sample) -> f64| samples.iter().map(of).sum::<f64>() / count;
    let (time, height) = (mean(&|sample| sample.seconds), mean(&value));
    let covariance: f64 =
        samples.iter().map(|sample| (sample.seconds - time) * (value(sample) - height)).sum();
    let variance: f64 = samples.iter().map(|sample| (sample.seconds - time).powi(2)).sum();
    if variance > 0.0 { covariance / variance } else { 0.0 }
}
