//! Lanes: concurrent single calls become batches, with no added wait.
//!
//! Quota, slot, request and sale have a set of lanes each (`start_lanes` in `server/src/<capability>/service.rs`), and tier has
//! one for permits (`permit`), which are in the store. What Redis decides for tier has lanes of its own, one or on a cluster 16,
//! with bounds of their own (`store-redis/src/tier/batch.rs`). A set has one lane on SQLite and `lane.postgres_lanes` on Postgres (`server/src/engines/store.rs`). Bulk loads of slots use none.
//! Bounds: `lane.capacity` calls wait in a lane, `lane.batch_max` are in a batch, and a call waits at most `http.timeout`.
//!
//! Each lane has one batch in flight, or a few (see [`LaneSettings::in_flight`]); calls that arrive meanwhile form the next
//! batch. So an idle server answers a call at once, and a busy one shares each commit among all calls that arrived during
//! the last one. A key always uses the same lane, so calls for one key are decided in the order of their arrival. A lane
//! holds a bounded number of waiting calls and refuses more at once ([`Error::Overloaded`]).
//!
//! The commands of a batch are selected when the engine takes it ([`Batch::take`]), not when the lane offers it: a batch
//! that waits behind another one at the engine grows until then.
//!
//! Every call is answered within the lanes' timeout. After it, callers in the batch get [`Error::Unavailable`] and those
//! behind it, whose commands are dropped, [`Error::NotDone`], while the batch itself continues, since only the engine knows its result. The lane checks the
//! time itself, for all calls together, rather than with one timer per call.
//!
//! A caller may disconnect at any time. Before its batch is taken, its command is dropped; after that, the command is
//! executed and the outcome discarded. The rest of the batch is not affected.

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use weir_core::TraceParent;

use crate::spans::{self, BatchSpan, batch_scope};
use crate::{Error, Result, shard};

/// How often within the timeout a lane checks for calls that have waited too long.
const CHECKS_PER_TIMEOUT: u32 = 20;

/// The dimensions of a set of lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneSettings {
    /// The number of lanes.
    pub lanes: u16,
    /// The number of calls that may wait in one lane.
    pub capacity: usize,
    /// The largest batch.
    pub batch_max: usize,
    /// How many batches of one lane may be at the engine at once. More than one suits engines that take batches in order:
    /// when one is committed, the next is there already, with all calls that arrived meanwhile.
    pub in_flight: usize,
    /// The time within which a call is answered.
    pub timeout: Duration,
}

/// Metrics of a set of lanes.
#[derive(Clone, Debug)]
pub struct LaneMetrics {
    /// Commands in each batch.
    pub batch_size: Histogram,
    /// How long the oldest command of each batch waited until the batch was taken, in seconds.
    pub wait_seconds: Histogram,
    /// Commands that were left waiting when the last batch was taken.
    pub depth: Gauge,
    /// Commands refused because the lane was full.
    pub rejected: Counter,
    /// Commands dropped because their caller disconnected before their batch was taken.
    pub abandoned: Counter,
}

/// Metrics that are not registered anywhere.
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
    lanes: Box<[Arc<Lane<C, R>>]>,
    closing: CancellationToken,
    workers: TaskTracker,
}

impl<C: Send + 'static, R: Send + 'static> Lanes<C, R> {
    /// Starts the lanes, spread over `runtimes`. `run` executes a batch and returns one outcome per command, in order. A
    /// batch may turn out empty when it is taken, if its callers have disconnected.
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
                let lane = Arc::new(Lane::new(name, settings, metrics.clone()));
                let worker = LaneWorker { lane: Arc::clone(&lane), settings, run: run.clone() };
                workers.spawn_on(worker.work(closing.clone()), runtime);
                lane
            })
            .collect();
        workers.close();
        Self { lanes, closing, workers }
    }

    /// Executes a command in the lane of `key`. Fails at once if the lane is full or closed.
    pub async fn submit(&self, key: &str, command: C) -> Result<R> {
        let count = u16::try_from(self.lanes.len()).unwrap_or(u16::MAX);
        let lane = &self.lanes[usize::from(shard::of(key, count))];
        let (sender, outcome) = oneshot::channel();
        let reply =
            Reply { sender, runtime: Handle::current(), queued_at: Instant::now(), span: spans::current() };
        lane.add(Call { command, reply })?;
        // Every call is answered. A dropped sender means that the lane's runtime is shutting down.
        outcome.await.unwrap_or(Err(Error::ShuttingDown))
    }

    /// Refuses new commands and waits until every accepted one is answered.
    pub async fn drain(&self) {
        self.closing.cancel();
        self.workers.wait().await;
    }
}

/// Commands to execute together. They are selected when the batch is taken.
pub struct Batch<C>(BatchSource<C>);

enum BatchSource<C> {
    /// The lane, and the number of the batch.
    Lane(Arc<dyn TakeBatch<C>>, u64),
    Commands(Vec<C>),
}

/// A lane, whatever the type of its outcomes.
trait TakeBatch<C>: Send + Sync {
    fn take(&self, number: u64) -> Vec<C>;
}

impl<C> Batch<C> {
    /// Selects the commands of the batch. There are none if all callers have disconnected.
    #[must_use]
    pub fn take(self) -> Vec<C> {
        match self.0 {
            BatchSource::Lane(lane, number) => lane.take(number),
            BatchSource::Commands(commands) => commands,
        }
    }
}

impl<C> From<Vec<C>> for Batch<C> {
    fn from(commands: Vec<C>) -> Self {
        Self(BatchSource::Commands(commands))
    }
}

impl<C> fmt::Debug for Batch<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch").finish_non_exhaustive()
    }
}

/// Offers the batches of one lane to the engine and answers the callers.
struct LaneWorker<C, R, F> {
    lane: Arc<Lane<C, R>>,
    settings: LaneSettings,
    run: F,
}

impl<C, R, F, Fut> LaneWorker<C, R, F>
where
    C: Send + 'static,
    R: Send + 'static,
    F: Fn(Batch<C>) -> Fut + Clone,
    Fut: Future<Output = Result<Vec<R>>>,
{
    async fn work(self, closing: CancellationToken) {
        let in_flight = self.settings.in_flight.max(1);
        let check_interval = self.settings.timeout / CHECKS_PER_TIMEOUT;
        let mut next_check = pin!(tokio::time::sleep(check_interval));
        let mut running = FuturesUnordered::new();
        let mut is_closed = false;
        for number in 0.. {
            while running.len() >= in_flight || !self.lane.offer(number) {
                if is_closed && running.is_empty() {
                    return;
                }
                tokio::select! {
                    biased;
                    Some((number, outcomes)) = running.next() => self.lane.finish(number, outcomes),
                    () = self.lane.arrived.notified(), if running.len() < in_flight => {}
                    () = closing.cancelled(), if !is_closed => {
                        self.lane.close();
                        is_closed = true;
                    }
                    () = &mut next_check, if !running.is_empty() => {
                        self.lane.time_out_calls();
                        next_check.as_mut().reset(tokio::time::Instant::now() + check_interval);
                    }
                }
            }
            // Tasks on this thread that are ready to submit get into this batch.
            tokio::task::yield_now().await;
            let span = BatchSpan::new();
            self.lane.state.lock().offered_span.clone_from(&span);
            let lane = Arc::clone(&self.lane) as Arc<dyn TakeBatch<C>>;
            let (run, batch) = (self.run.clone(), Batch(BatchSource::Lane(lane, number)));
            let name = self.lane.name;
            let mut batch = Box::pin(batch_scope(span.clone(), async move {
                let outcomes = run_batch(&run, batch).await;
                if let Some(span) = span {
                    span.finish(name, !matches!(outcomes, Some(Ok(_))));
                }
                (number, outcomes)
            }));
            // Polled once here, so that batches reach the engine in the order of their numbers.
            match futures_util::poll!(&mut batch) {
                Poll::Ready((number, outcomes)) => self.lane.finish(number, outcomes),
                Poll::Pending => running.push(batch),
            }
        }
    }
}

/// Runs a batch. Returns `None` if it panics, which fails this batch only.
async fn run_batch<C, R, F, Fut>(run: &F, batch: Batch<C>) -> Option<Result<Vec<R>>>
where
    F: Fn(Batch<C>) -> Fut,
    Fut: Future<Output = Result<Vec<R>>>,
{
    AssertUnwindSafe(async { run(batch).await }).catch_unwind().await.ok()
}

/// One lane: the waiting calls, and the callers of the batches that were taken.
#[derive(Debug)]
struct Lane<C, R> {
    name: &'static str,
    settings: LaneSettings,
    metrics: LaneMetrics,
    state: Mutex<LaneState<C, R>>,
    /// Notified when calls wait and no batch is offered.
    arrived: Notify,
}

#[derive(Debug)]
struct LaneState<C, R> {
    waiting: VecDeque<Call<C, R>>,
    /// The number of the batch that the engine has not taken yet. It gets the calls that arrive until then.
    offered: Option<u64>,
    /// The span of that batch, while spans are recorded.
    offered_span: Option<Arc<BatchSpan>>,
    /// The callers of each batch that was taken, by its number.
    running: Vec<(u64, Vec<Option<Reply<R>>>)>,
    is_closed: bool,
}

#[derive(Debug)]
struct Call<C, R> {
    command: C,
    reply: Reply<R>,
}

/// Where to send the outcome of a call. A batch has `None` for calls that have timed out.
#[derive(Debug)]
struct Reply<R> {
    sender: oneshot::Sender<Result<R>>,
    /// The caller's runtime.
    runtime: Handle,
    queued_at: Instant,
    /// The span of the caller, if it is sampled.
    span: Option<TraceParent>,
}

impl<R> Reply<R> {
    /// Sends the outcome, unless the caller has disconnected.
    fn send(self, outcome: Result<R>) {
        let _ = self.sender.send(outcome);
    }
}

impl<C, R: Send + 'static> Lane<C, R> {
    fn new(name: &'static str, settings: LaneSettings, metrics: LaneMetrics) -> Self {
        let state = LaneState {
            waiting: VecDeque::new(),
            offered: None,
            offered_span: None,
            running: Vec::new(),
            is_closed: false,
        };
        Self { name, settings, metrics, state: Mutex::new(state), arrived: Notify::new() }
    }

    /// Adds a call to the next batch.
    fn add(&self, call: Call<C, R>) -> Result<()> {
        let mut state = self.state.lock();
        if state.is_closed {
            return Err(Error::ShuttingDown);
        }
        if state.waiting.len() >= self.settings.capacity.max(1) {
            self.metrics.rejected.inc();
            return Err(Error::Overloaded { lane: self.name });
        }
        state.waiting.push_back(call);
        let needs_batch = state.waiting.len() == 1 && state.offered.is_none();
        drop(state);
        if needs_batch {
            self.arrived.notify_one();
        }
        Ok(())
    }

    /// Marks batch `number` as offered if calls wait and no other batch is offered. Returns whether it did.
    fn offer(&self, number: u64) -> bool {
        let mut state = self.state.lock();
        while state.waiting.front().is_some_and(|call| call.reply.sender.is_closed()) {
            state.waiting.pop_front();
            self.metrics.abandoned.inc();
        }
        let is_needed = state.offered.is_none() && !state.waiting.is_empty();
        if is_needed {
            state.offered = Some(number);
        }
        is_needed
    }

    /// Refuses new calls; waiting ones are still executed.
    fn close(&self) {
        self.state.lock().is_closed = true;
    }

    /// Answers the callers of a batch. A batch that was never taken fails for the calls that would be in it. `None` means
    /// that the batch panicked.
    fn finish(&self, number: u64, outcomes: Option<Result<Vec<R>>>) {
        let mut state = self.state.lock();
        if state.offered == Some(number) {
            self.take_from(&mut state, number);
        }
        let Some(index) = state.running.iter().position(|(other, _)| *other == number) else { return };
        let (_, replies) = state.running.remove(index);
        drop(state);
        let outcomes = outcomes.unwrap_or_else(|| Err(Error::failed(self.name, "a batch panicked")));
        let error = match outcomes {
            Ok(outcomes) if outcomes.len() == replies.len() => {
                return answer_all(replies.into_iter().zip(outcomes.into_iter().map(Ok)));
            }
            Ok(outcomes) => {
                let counts = format!("{} outcomes for a batch of {}", outcomes.len(), replies.len());
                Error::failed(self.name, counts)
            }
            Err(error) => error,
        };
        answer_all(replies.into_iter().map(|reply| (reply, Err(error.clone()))));
    }

    /// Takes the commands of batch `number`, dropping those whose callers have disconnected.
    fn take_from(&self, state: &mut LaneState<C, R>, number: u64) -> Vec<C> {
        state.offered = None;
        let size = self.settings.batch_max.max(1).min(state.waiting.len());
        let oldest = state.waiting.front().map(|call| call.reply.queued_at.elapsed());
        let (commands, replies): (Vec<_>, Vec<Option<Reply<R>>>) = state
            .waiting
            .drain(..size)
            .filter(|call| !call.reply.sender.is_closed())
            .map(|call| (call.command, Some(call.reply)))
            .unzip();
        self.metrics.abandoned.inc_by((size - replies.len()) as u64);
        self.metrics.depth.set(i64::try_from(state.waiting.len()).unwrap_or(i64::MAX));
        if let Some(span) = state.offered_span.take() {
            let calls = replies.iter().flatten().map(|reply| (reply.span.as_ref(), reply.queued_at));
            span.take(self.name, calls);
        }
        if !commands.is_empty() {
            self.metrics.batch_size.observe(commands.len() as f64);
            self.metrics.wait_seconds.observe(oldest.unwrap_or_default().as_secs_f64());
        }
        state.running.push((number, replies));
        commands
    }

    /// Fails calls that have waited too long, in a batch or for one. The batches continue.
    fn time_out_calls(&self) {
        let timeout = self.settings.timeout;
        let is_late = |queued_at: Instant| queued_at.elapsed() >= timeout - timeout / CHECKS_PER_TIMEOUT;
        let late = || Error::unavailable(self.name, "no answer in time");
        let mut state = self.state.lock();
        for reply in state.running.iter_mut().flat_map(|(_, replies)| replies) {
            if let Some(reply) = reply.take_if(|reply| is_late(reply.queued_at)) {
                reply.send(Err(late()));
            }
        }
        // Calls wait in the order of their arrival.
        let count = state.waiting.iter().take_while(|call| is_late(call.reply.queued_at)).count();
        for call in state.waiting.drain(..count) {
            // No batch has it, and none will.
            call.reply.send(Err(late().before_commit()));
        }
    }
}

impl<C: Send, R: Send + 'static> TakeBatch<C> for Lane<C, R> {
    fn take(&self, number: u64) -> Vec<C> {
        let mut state = self.state.lock();
        if state.offered != Some(number) {
            // The batch has failed already; the calls that wait now belong to a later one.
            return Vec::new();
        }
        let commands = self.take_from(&mut state, number);
        let has_more = !state.waiting.is_empty();
        drop(state);
        if has_more {
            self.arrived.notify_one();
        }
        commands
    }
}

/// Replies with their outcomes.
type Answers<R> = Vec<(Reply<R>, Result<R>)>;

/// Answers the callers of a batch. Waking a task on another runtime costs a system call, so one task per runtime answers
/// all callers there.
fn answer_all<R: Send + 'static>(outcomes: impl Iterator<Item = (Option<Reply<R>>, Result<R>)>) {
    let here = Handle::current().id();
    let mut elsewhere: Vec<(Handle, Answers<R>)> = Vec::new();
    for (reply, outcome) in outcomes {
        let Some(reply) = reply else { continue };
        let id = reply.runtime.id();
        if id == here {
            reply.send(outcome);
        } else if let Some((_, group)) = elsewhere.iter_mut().find(|(runtime, _)| runtime.id() == id) {
            group.push((reply, outcome));
        } else {
            elsewhere.push((reply.runtime.clone(), vec![(reply, outcome)]));
        }
    }
    for (runtime, group) in elsewhere {
        runtime.spawn(async move { group.into_iter().for_each(|(reply, outcome)| reply.send(outcome)) });
    }
}

#[cfg(test)]
mod tests;
