//! Lanes: concurrent single calls become batches, with no added wait.
//!
//! Each lane has one batch under way (or a few, see [`LaneSettings::in_flight`]); whatever arrives meanwhile is the
//! next batch. So an idle server answers a call at once, and a busy one spreads the cost of a commit over as many calls as came during the last one. A key always
//! goes to the same lane, so calls for one key are decided in the order they came. A lane holds a bounded number of
//! waiting calls; past that, calls are refused at once ([`Error::Overloaded`]).
//!
//! A batch is made when it is taken ([`Batch::take`]), not when it is handed over: one that waits behind another at an engine
//! grows until its turn has come.
//!
//! Every call is answered within the lanes' timeout. A batch that takes longer goes on, since its fate is the
//! engine's; its callers, and those who wait behind it for too long, are told [`Error::Unavailable`]. The lane watches
//! the time itself, once a batch, rather than with a timer for every call.
//!
//! A caller may go away at any time. Before its batch is taken its command is dropped; after that the command is
//! carried out and the answer thrown away. Either way the rest of the batch never notices.

mod batch;
mod queue;

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use batch::Batch;
use queue::{Entry, Queue};

use crate::{Error, Result, shard};

/// How often within its timeout a lane looks for calls that have waited for too long.
const TICKS_PER_TIMEOUT: u32 = 20;

/// How wide and how deep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneSettings {
    /// How many lanes: batches that can be under way at once.
    pub lanes: u16,
    /// How many calls may wait in one lane.
    pub capacity: usize,
    /// The largest batch.
    pub batch_max: usize,
    /// How many batches of one lane may be handed over at once. More than one is for engines that take batches in the
    /// order in which they were given: the next is there already when one is committed, with all that came meanwhile.
    pub in_flight: usize,
    /// How long a call may take.
    pub timeout: Duration,
}

/// What lanes tell about themselves.
#[derive(Clone, Debug)]
pub struct LaneMetrics {
    /// Commands in each batch.
    pub batch_size: Histogram,
    /// How long the oldest command of each batch waited for it to start, in seconds.
    pub wait_seconds: Histogram,
    /// Commands waiting behind the batch that was last started.
    pub depth: Gauge,
    /// Commands refused because the lane was full.
    pub rejected: Counter,
    /// Commands dropped because their caller had gone before their batch started.
    pub abandoned: Counter,
}

/// Handles that nobody reads.
impl Default for LaneMetrics {
    fn default() -> Self {
        Self {
            batch_size: Histogram::new([]),
            wait_seconds: Histogram::new([]),
            depth: Gauge::default(),
            rejected: Counter::default(),
            abandoned: Counter::default(),
        }
    }
}

/// A set of lanes for one kind of command.
#[derive(Debug)]
pub struct Lanes<C, R> {
    lanes: Box<[Arc<Queue<C, R>>]>,
    closing: CancellationToken,
    workers: TaskTracker,
}

impl<C: Send + 'static, R: Send + 'static> Lanes<C, R> {
    /// Starts the lanes, spread over `runtimes`. `run` carries out one batch and answers with one outcome per command, in
    /// order. The batch grows until it is taken, and may be empty by then: its callers may have gone.
    pub fn start<F, Fut>(
        name: &'static str,
        settings: LaneSettings,
        metrics: LaneMetrics,
        runtimes: &[Handle],
        run: F,
    ) -> Self
    where
        F: Fn(Batch<C>) -> Fut + Clone + Send + Sync + 'static,
        Fut: Future<Output = Result<Vec<R>>> + Send + 'static,
    {
        let closing = CancellationToken::new();
        let workers = TaskTracker::new();
        let here = [Handle::current()];
        let runtimes = if runtimes.is_empty() { &here } else { runtimes };
        let lanes = (0..settings.lanes.max(1))
            .zip(runtimes.iter().cycle())
            .map(|(_, runtime)| {
                let queue = Arc::new(Queue::new(name, settings, metrics.clone()));
                let worker = Worker { queue: Arc::clone(&queue), settings, run: run.clone() };
                workers.spawn_on(worker.work(closing.clone()), runtime);
                queue
            })
            .collect();
        workers.close();
        Self { lanes, closing, workers }
    }

    /// Carries out one command in the lane of `key`.
    /// At once when the lane is full or closed; otherwise whatever its batch came to.
    pub async fn submit(&self, key: &str, command: C) -> Result<R> {
        let count = u16::try_from(self.lanes.len()).unwrap_or(u16::MAX);
        let lane = &self.lanes[usize::from(shard::of(key, count))];
        let (reply, answer) = oneshot::channel();
        lane.add(Entry { command, reply, runtime: Handle::current(), queued_at: Instant::now() })?;
        // Every entry that is taken is answered; a dropped one means that the runtime itself is going down.
        answer.await.unwrap_or(Err(Error::ShuttingDown))
    }

    /// Takes no new commands and waits until every accepted one is answered.
    pub async fn drain(&self) {
        self.closing.cancel();
        self.workers.wait().await;
    }
}

/// Hands batches of one lane to the engine, and tells callers what came of them.
struct Worker<C, R, F> {
    queue: Arc<Queue<C, R>>,
    settings: LaneSettings,
    run: F,
}

impl<C, R, F, Fut> Worker<C, R, F>
where
    C: Send + 'static,
    R: Send + 'static,
    F: Fn(Batch<C>) -> Fut + Clone,
    Fut: Future<Output = Result<Vec<R>>>,
{
    async fn work(self, closing: CancellationToken) {
        let in_flight = self.settings.in_flight.max(1);
        let tick = self.settings.timeout / TICKS_PER_TIMEOUT;
        let mut next_look = pin!(tokio::time::sleep(tick));
        let mut running = FuturesUnordered::new();
        let mut is_closed = false;
        for number in 0.. {
            while running.len() >= in_flight || !self.queue.promise(number) {
                if is_closed && running.is_empty() {
                    return;
                }
                tokio::select! {
                    biased;
                    Some((number, outcomes)) = running.next() => self.queue.finish(number, outcomes),
                    () = self.queue.arrived(), if running.len() < in_flight => {}
                    () = closing.cancelled(), if !is_closed => {
                        self.queue.close();
                        is_closed = true;
                    }
                    () = &mut next_look, if !running.is_empty() => {
                        self.queue.answer_late();
                        next_look.as_mut().reset(tokio::time::Instant::now() + tick);
                    }
                }
            }
            // Whoever is about to submit, and only waits for a turn on this thread, gets into this batch.
            tokio::task::yield_now().await;
            let (run, batch) = (self.run.clone(), Batch::promised(&self.queue, number));
            let mut batch = Box::pin(async move { (number, outcomes(&run, batch).await) });
            // Polled now, so that batches reach the engine in the order in which they were promised.
            match futures_util::poll!(&mut batch) {
                Poll::Ready((number, outcomes)) => self.queue.finish(number, outcomes),
                Poll::Pending => running.push(batch),
            }
        }
    }
}

/// Runs a batch; none when it panics, which fails this batch and leaves the lane standing.
async fn outcomes<C, R, F, Fut>(run: &F, batch: Batch<C>) -> Option<Result<Vec<R>>>
where
    F: Fn(Batch<C>) -> Fut,
    Fut: Future<Output = Result<Vec<R>>>,
{
    AssertUnwindSafe(async { run(batch).await }).catch_unwind().await.ok()
}

#[cfg(test)]
mod tests;
