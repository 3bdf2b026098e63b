//! Lanes: concurrent single calls become batches, with no added wait.
//!
//! Each lane has one batch under way (or a few, see [`LaneSettings::in_flight`]); whatever arrives meanwhile is the
//! next batch. So an idle server answers a call at once, and a busy one spreads the cost of a commit over as many calls as came during the last one. A key always
//! goes to the same lane, so calls for one key are decided in the order they came. A lane holds a bounded number of
//! waiting calls; past that, calls are refused at once ([`Error::Overloaded`]).
//!
//! Every call is answered within the lanes' timeout. A batch that takes longer goes on, since its fate is the
//! engine's; its callers, and those who wait behind it for too long, are told [`Error::Unavailable`]. The lane watches
//! the time itself, once a batch, rather than with a timer for every call.
//!
//! A caller may go away at any time. Before its batch starts its command is dropped; after that the command is
//! carried out and the answer thrown away. Either way the rest of the batch never notices.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

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
    /// How many batches of one lane may be under way at once. More than one is for engines that take batches in the
    /// order in which they were given: one is then made and handed over while another is being committed.
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

/// A set of lanes for one kind of command.
#[derive(Debug)]
pub struct Lanes<C, R> {
    name: &'static str,
    lanes: Box<[mpsc::Sender<Entry<C, R>>]>,
    metrics: LaneMetrics,
    closing: CancellationToken,
    workers: TaskTracker,
}

#[derive(Debug)]
struct Entry<C, R> {
    command: C,
    reply: oneshot::Sender<Result<R>>,
    queued_at: Instant,
}

impl<C: Send + 'static, R: Send + 'static> Lanes<C, R> {
    /// Starts the lanes; `run` carries out one batch and answers with one outcome per command, in order.
    pub fn start<F, Fut>(name: &'static str, settings: LaneSettings, metrics: LaneMetrics, run: F) -> Self
    where
        F: Fn(Vec<C>) -> Fut + Clone + Send + Sync + 'static,
        Fut: Future<Output = Result<Vec<R>>> + Send + 'static,
    {
        let closing = CancellationToken::new();
        let workers = TaskTracker::new();
        let lanes = (0..settings.lanes.max(1))
            .map(|_| {
                let (sender, receiver) = mpsc::channel(settings.capacity.max(1));
                let worker = Worker {
                    name,
                    receiver,
                    waiting: Vec::with_capacity(settings.batch_max.min(1_024)),
                    under_way: Vec::new(),
                    settings,
                    metrics: metrics.clone(),
                    run: run.clone(),
                };
                workers.spawn(worker.work(closing.clone()));
                sender
            })
            .collect();
        workers.close();
        Self { name, lanes, metrics, closing, workers }
    }

    /// Carries out one command in the lane of `key`.
    ///
    /// # Errors
    /// At once when the lane is full or closed; otherwise whatever its batch came to.
    pub async fn submit(&self, key: &str, command: C) -> Result<R> {
        let count = u16::try_from(self.lanes.len()).unwrap_or(u16::MAX);
        let lane = &self.lanes[usize::from(shard::of(key, count))];
        let (reply, answer) = oneshot::channel();
        match lane.try_send(Entry { command, reply, queued_at: Instant::now() }) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => {
                self.metrics.rejected.inc();
                return Err(Error::Overloaded { lane: self.name });
            }
            Err(TrySendError::Closed(_)) => return Err(Error::ShuttingDown),
        }
        // A worker answers every entry it takes; a dropped one means that the runtime itself is going down.
        answer.await.unwrap_or(Err(Error::ShuttingDown))
    }

    /// Takes no new commands and waits until every accepted one is answered.
    pub async fn drain(&self) {
        self.closing.cancel();
        self.workers.wait().await;
    }
}

struct Worker<C, R, F> {
    name: &'static str,
    receiver: mpsc::Receiver<Entry<C, R>>,
    /// Taken from the channel, not yet in a batch.
    waiting: Vec<Entry<C, R>>,
    /// Whom to answer when the batches under way are done, each by its number.
    under_way: Vec<(u64, Replies<R>)>,
    settings: LaneSettings,
    metrics: LaneMetrics,
    run: F,
}

/// Whom to answer, in the order of the batch; nobody where the caller was told that it took too long.
type Replies<R> = Vec<Option<Reply<R>>>;

struct Reply<R> {
    to: oneshot::Sender<Result<R>>,
    queued_at: Instant,
}

impl<C, R, F, Fut> Worker<C, R, F>
where
    F: Fn(Vec<C>) -> Fut + Clone,
    Fut: Future<Output = Result<Vec<R>>>,
{
    async fn work(mut self, closing: CancellationToken) {
        let (batch_max, in_flight) = (self.settings.batch_max.max(1), self.settings.in_flight.max(1));
        let tick = self.settings.timeout / TICKS_PER_TIMEOUT;
        let mut next_look = pin!(tokio::time::sleep(tick));
        let mut running = FuturesUnordered::new();
        for number in 0.. {
            while self.waiting.is_empty() || running.len() >= in_flight {
                let has_room = running.len() < in_flight;
                if running.is_empty() && self.receiver.is_closed() && self.receiver.is_empty() {
                    return;
                }
                tokio::select! {
                    biased;
                    Some((number, outcomes)) = running.next() => self.finish(number, outcomes),
                    taken = self.receiver.recv_many(&mut self.waiting, batch_max), if has_room && !self.ended() => {
                        // Whoever is about to submit, and only waits for a turn on this thread, gets into this batch.
                        if taken > 0 { tokio::task::yield_now().await }
                    }
                    () = closing.cancelled(), if !self.receiver.is_closed() => self.receiver.close(),
                    () = &mut next_look, if !running.is_empty() => {
                        self.answer_late();
                        next_look.as_mut().reset(tokio::time::Instant::now() + tick);
                    }
                }
            }
            if let Some(commands) = self.take_batch(number) {
                let (name, run) = (self.name, self.run.clone());
                let mut batch = Box::pin(async move { (number, outcomes(name, &run, commands).await) });
                // Polled now, so that batches reach the engine in the order in which they were made.
                match futures_util::poll!(&mut batch) {
                    Poll::Ready((number, outcomes)) => self.finish(number, outcomes),
                    Poll::Pending => running.push(batch),
                }
            }
        }
    }

    /// Whether nothing will come any more.
    fn ended(&self) -> bool {
        self.receiver.is_closed() && self.receiver.is_empty()
    }

    /// The next batch, without those whose callers have gone.
    fn take_batch(&mut self, number: u64) -> Option<Vec<C>> {
        let batch_max = self.settings.batch_max.max(1);
        take_up_to(batch_max, &mut self.receiver, &mut self.waiting);
        let rest = self.waiting.split_off(batch_max.min(self.waiting.len()));
        let batch = std::mem::replace(&mut self.waiting, rest);
        let (taken, oldest) = (batch.len(), batch.first().map(|entry| entry.queued_at.elapsed()));
        let (commands, replies): (Vec<_>, Replies<R>) = batch
            .into_iter()
            .filter(|entry| !entry.reply.is_closed())
            .map(|entry| (entry.command, Some(Reply { to: entry.reply, queued_at: entry.queued_at })))
            .unzip();
        self.metrics.abandoned.inc_by((taken - replies.len()) as u64);
        self.metrics.depth.set(i64::try_from(self.receiver.len()).unwrap_or(i64::MAX));
        if commands.is_empty() {
            return None;
        }
        self.metrics.batch_size.observe(commands.len() as f64);
        if let Some(oldest) = oldest {
            self.metrics.wait_seconds.observe(oldest.as_secs_f64());
        }
        self.under_way.push((number, replies));
        Some(commands)
    }

    fn finish(&mut self, number: u64, outcomes: Result<Vec<R>>) {
        let Some(place) = self.under_way.iter().position(|(other, _)| *other == number) else { return };
        let (_, replies) = self.under_way.remove(place);
        match outcomes {
            Ok(outcomes) => {
                let answers = replies.into_iter().zip(outcomes);
                answers.for_each(|(reply, outcome)| answer(reply, Ok(outcome)));
            }
            Err(error) => replies.into_iter().for_each(|reply| answer(reply, Err(error.clone()))),
        }
    }

    /// Tells whoever has waited for too long, in a batch or behind them, that it took too long. The batches go on.
    fn answer_late(&mut self) {
        let LaneSettings { capacity, timeout, .. } = self.settings;
        let is_late = |queued_at: Instant| queued_at.elapsed() >= timeout - timeout / TICKS_PER_TIMEOUT;
        let late = || Error::unavailable(self.name, "no answer in time");
        for reply in self.under_way.iter_mut().flat_map(|(_, replies)| replies) {
            let reply = reply.take_if(|reply| is_late(reply.queued_at));
            answer(reply, Err(late()));
        }
        take_up_to(capacity, &mut self.receiver, &mut self.waiting);
        for entry in self.waiting.extract_if(.., |entry| is_late(entry.queued_at)) {
            let _ = entry.reply.send(Err(late()));
        }
    }
}

/// A caller that has gone, or was told already, needs no answer.
fn answer<R>(reply: Option<Reply<R>>, outcome: Result<R>) {
    if let Some(reply) = reply {
        let _ = reply.to.send(outcome);
    }
}

/// Takes what is there, without waiting for any.
fn take_up_to<E>(count: usize, receiver: &mut mpsc::Receiver<E>, waiting: &mut Vec<E>) {
    while waiting.len() < count
        && let Ok(entry) = receiver.try_recv()
    {
        waiting.push(entry);
    }
}

/// Runs a batch; a panic or a wrong number of outcomes fails this batch and leaves the lane standing.
async fn outcomes<C, R, F, Fut>(name: &'static str, run: &F, commands: Vec<C>) -> Result<Vec<R>>
where
    F: Fn(Vec<C>) -> Fut,
    Fut: Future<Output = Result<Vec<R>>>,
{
    let expected = commands.len();
    match AssertUnwindSafe(async { run(commands).await }).catch_unwind().await {
        Ok(Ok(outcomes)) if outcomes.len() == expected => Ok(outcomes),
        Ok(Ok(outcomes)) => {
            let counts = format!("{} outcomes for a batch of {expected}", outcomes.len());
            Err(Error::failed(name, counts))
        }
        Ok(Err(error)) => Err(error),
        Err(_panic) => Err(Error::failed(name, "a batch panicked")),
    }
}

#[cfg(test)]
mod tests;
