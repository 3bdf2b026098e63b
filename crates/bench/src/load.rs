//! The load generator: many keep-alive connections on a few threads, cheap enough not to be the bottleneck.
//!
//! A request is measured if it was due in the measured time, even if its response arrives later. Benchmarks decide what
//! to send, and `report` prints the results.

mod configure;
mod connection;
mod link;
mod pace;
mod response;
mod schedule;
mod stats;
mod template;

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{sleep_until, timeout_at};

pub use configure::configure;
pub use template::{Body, Template};

use crate::expect::Expect;
use crate::report::{Progress, Report};
use schedule::{Schedule, Tickets};
use stats::Stats;

/// How long to wait for a generator thread beyond the timeout of its last requests.
const HARD_STOP_MARGIN: Duration = Duration::from_secs(2);

/// Where requests are sent, and their contents.
#[derive(Debug, Clone)]
pub struct Target {
    /// The name in the report and the progress line.
    pub name: String,
    pub address: SocketAddr,
    pub template: Template,
}

/// How to load a target.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    pub connections: usize,
    /// Threads of the generator, each with a runtime of its own.
    pub threads: usize,
    pub warmup: Duration,
    pub duration: Duration,
    /// Limit on connecting and on each request.
    pub timeout: Duration,
    /// Requests per second over all connections (open loop). Without it, each response starts the next request.
    pub rate_per_s: Option<NonZeroU32>,
    /// Requests after which a connection is replaced. Without it, connections stay open.
    pub requests_per_connection: Option<NonZeroU32>,
    /// The number of keys, over which requests are spread uniformly.
    pub keys: u64,
    /// The expected status. The report counts other statuses separately.
    pub expect: Expect,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            connections: 128,
            threads: 1,
            warmup: Duration::from_secs(2),
            duration: Duration::from_secs(10),
            timeout: Duration::from_secs(10),
            rate_per_s: None,
            requests_per_connection: None,
            keys: 1,
            expect: Expect::Success,
        }
    }
}

/// Counts of one thread for the progress line, on a cache line of their own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Live {
    pub(crate) answered: AtomicU64,
    pub(crate) failed: AtomicU64,
}

/// One run, shared by its connections.
struct Run {
    target: Target,
    load: LoadOptions,
    start: Instant,
    measure_from: Instant,
    end: Instant,
    tickets: Option<Arc<Tickets>>,
    live: Vec<Live>,
    abandoned: AtomicBool,
}

impl Run {
    fn new(target: &Target, load: &LoadOptions) -> Self {
        let start = Instant::now();
        let measure_from = start + load.warmup;
        let tickets = load.rate_per_s.map(|rate| Arc::new(Tickets::new(Schedule::new(rate), start)));
        Self {
            target: target.clone(),
            load: load.clone(),
            start,
            measure_from,
            end: measure_from + load.duration,
            tickets,
            live: (0..load.threads).map(|_| Live::default()).collect(),
            abandoned: AtomicBool::new(false),
        }
    }

    fn is_over(&self, now: Instant) -> bool {
        now >= self.end || self.abandoned.load(Ordering::Relaxed)
    }

    fn unsent(&self) -> u64 {
        let since_start = |instant: Instant| instant - self.start;
        let (from, end) = (since_start(self.measure_from), since_start(self.end));
        self.tickets.as_ref().map_or(0, |tickets| tickets.unsent(from, end))
    }
}

/// Stops the threads when the caller drops the future.
struct Abandon(Arc<Run>);

impl Drop for Abandon {
    fn drop(&mut self) {
        self.0.abandoned.store(true, Ordering::Relaxed);
    }
}

/// The result of one generator thread.
struct Share {
    stats: Stats,
    /// Processor time used in the measured time.
    cpu: Duration,
}

/// Loads `target` as `load` says and reports its responses. Dropping the future stops the load.
pub async fn measure(target: &Target, load: &LoadOptions) -> Result<Report> {
    ensure!(load.connections > 0 && load.threads > 0, "a load needs at least one connection and one thread");
    ensure!(!load.duration.is_zero() && load.keys > 0, "a load needs a duration and at least one key");
    let run = Arc::new(Run::new(target, load));
    let _abandon = Abandon(Arc::clone(&run));
    let threads = (0..load.threads).map(|worker| spawn_worker(&run, worker)).collect::<Result<Vec<_>>>()?;
    let progress = Progress::timed(&target.name, run.start, run.end);
    let shares = progress.watch(&run.live, collect(threads)).await?;
    let (mut stats, mut cpu) = (Stats::new(), Duration::ZERO);
    for share in &shares {
        stats.merge(&share.stats);
        cpu += share.cpu;
    }
    Ok(report(&run, &stats, cpu))
}

fn spawn_worker(run: &Arc<Run>, worker: usize) -> Result<oneshot::Receiver<Result<Share>>> {
    let (done, receiver) = oneshot::channel();
    let run = Arc::clone(run);
    std::thread::Builder::new()
        .name(format!("weir-load-{worker}"))
        // The receiver is dropped if the caller has abandoned the run.
        .spawn(move || drop(done.send(generate(&run, worker))))
        .context("start a generator thread")?;
    Ok(receiver)
}

async fn collect(threads: Vec<oneshot::Receiver<Result<Share>>>) -> Result<Vec<Share>> {
    let mut shares = Vec::with_capacity(threads.len());
    for thread in threads {
        shares.push(thread.await.context("a generator thread panicked")??);
    }
    Ok(shares)
}

/// Runs one thread's share of the connections on a runtime of its own.
fn generate(run: &Arc<Run>, worker: usize) -> Result<Share> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("start a runtime")?;
    runtime.block_on(async {
        let mut connections = JoinSet::new();
        for index in (worker..run.load.connections).step_by(run.load.threads) {
            connections.spawn(connection::drive(Arc::clone(run), worker, index as u64));
        }
        sleep_until(run.measure_from.into()).await;
        let cpu_before = cpu_time();
        sleep_until(run.end.into()).await;
        let cpu = cpu_time().saturating_sub(cpu_before);
        let hard_stop = run.end + run.load.timeout + HARD_STOP_MARGIN;
        let stats =
            timeout_at(hard_stop.into(), join(connections)).await.context("connections did not end")??;
        Ok(Share { stats, cpu })
    })
}

async fn join(mut connections: JoinSet<Stats>) -> Result<Stats> {
    let mut total = Stats::new();
    while let Some(stats) = connections.join_next().await {
        total.merge(&stats.context("a connection's task panicked")?);
    }
    Ok(total)
}

/// Processor time of the calling thread.
fn cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

fn report(run: &Run, stats: &Stats, cpu: Duration) -> Report {
    let seconds = run.load.duration.as_secs_f64();
    Report {
        name: run.target.name.clone(),
        address: run.target.address,
        connections: run.load.connections,
        threads: run.load.threads,
        keys: run.load.keys,
        expect: run.load.expect,
        rate_per_s: run.load.rate_per_s,
        warmup_s: run.load.warmup.as_secs_f64(),
        duration_s: seconds,
        requests: stats.requests(),
        requests_per_s: stats.requests() as f64 / seconds,
        latency_ms: stats.latency_ms(),
        statuses: stats.statuses().iter().copied().collect(),
        errors: *stats.errors(),
        unsent: run.unsent(),
        generator_cores: cpu.as_secs_f64() / seconds,
    }
}
