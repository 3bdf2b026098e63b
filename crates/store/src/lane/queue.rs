//! What waits in a lane, and whom to tell what came of what was taken.

use std::collections::VecDeque;
use std::time::Instant;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot};

use super::batch::Waiting;
use super::{LaneMetrics, LaneSettings, TICKS_PER_TIMEOUT};
use crate::{Error, Result};

#[derive(Debug)]
pub(super) struct Entry<C, R> {
    pub(super) command: C,
    pub(super) reply: oneshot::Sender<Result<R>>,
    /// The runtime of the caller.
    pub(super) runtime: Handle,
    pub(super) queued_at: Instant,
}

#[derive(Debug)]
pub(super) struct Queue<C, R> {
    name: &'static str,
    settings: LaneSettings,
    pub(super) metrics: LaneMetrics,
    state: Mutex<State<C, R>>,
    /// Rung when there is something for a batch that nobody has been promised yet.
    arrived: Notify,
}

#[derive(Debug)]
struct State<C, R> {
    waiting: VecDeque<Entry<C, R>>,
    /// The batch that was handed over and is not taken yet: it gets whatever comes until then.
    promised: Option<u64>,
    /// Whom to answer when the batches that were taken are done, each by its number.
    under_way: Vec<(u64, Replies<R>)>,
    is_closed: bool,
}

/// Whom to answer, in the order of the batch; nobody where the caller was told that it took too long.
type Replies<R> = Vec<Option<Reply<R>>>;

#[derive(Debug)]
struct Reply<R> {
    to: oneshot::Sender<Result<R>>,
    runtime: Handle,
    queued_at: Instant,
}

impl<C, R: Send + 'static> Queue<C, R> {
    pub(super) fn new(name: &'static str, settings: LaneSettings, metrics: LaneMetrics) -> Self {
        let state =
            State { waiting: VecDeque::new(), promised: None, under_way: Vec::new(), is_closed: false };
        Self { name, settings, metrics, state: Mutex::new(state), arrived: Notify::new() }
    }

    /// Lets a call wait for the next batch.
    pub(super) fn add(&self, entry: Entry<C, R>) -> Result<()> {
        let mut state = self.state.lock();
        if state.is_closed {
            return Err(Error::ShuttingDown);
        }
        if state.waiting.len() >= self.settings.capacity.max(1) {
            self.metrics.rejected.inc();
            return Err(Error::Overloaded { lane: self.name });
        }
        state.waiting.push_back(entry);
        let is_news = state.waiting.len() == 1 && state.promised.is_none();
        drop(state);
        if is_news {
            self.arrived.notify_one();
        }
        Ok(())
    }

    /// Waits until there may be something to promise.
    pub(super) async fn arrived(&self) {
        self.arrived.notified().await;
    }

    /// Whether there is to be a batch of this number: there is somebody to be in it, and no other that they will be in.
    pub(super) fn promise(&self, number: u64) -> bool {
        let mut state = self.state.lock();
        while state.waiting.front().is_some_and(|entry| entry.reply.is_closed()) {
            state.waiting.pop_front();
            self.metrics.abandoned.inc();
        }
        let is_wanted = state.promised.is_none() && !state.waiting.is_empty();
        if is_wanted {
            state.promised = Some(number);
        }
        is_wanted
    }

    /// Takes no new calls; those that wait are still carried out.
    pub(super) fn close(&self) {
        self.state.lock().is_closed = true;
    }

    /// Answers those who were in a batch. One that was never taken came to nothing for all that would be in it; no outcomes
    /// at all mean that it panicked.
    pub(super) fn finish(&self, number: u64, outcomes: Option<Result<Vec<R>>>) {
        let mut state = self.state.lock();
        if state.promised == Some(number) {
            self.take_from(&mut state, number);
        }
        let Some(place) = state.under_way.iter().position(|(other, _)| *other == number) else { return };
        let (_, replies) = state.under_way.remove(place);
        drop(state);
        let outcomes = outcomes.unwrap_or_else(|| Err(Error::failed(self.name, "a batch panicked")));
        match outcomes {
            Ok(outcomes) if outcomes.len() == replies.len() => {
                answer_all(replies.into_iter().zip(outcomes.into_iter().map(Ok)));
            }
            Ok(outcomes) => {
                let counts = format!("{} outcomes for a batch of {}", outcomes.len(), replies.len());
                fail(replies, &Error::failed(self.name, counts));
            }
            Err(error) => fail(replies, &error),
        }
    }

    /// Makes the batch of this number, without those whose callers have gone.
    fn take_from(&self, state: &mut State<C, R>, number: u64) -> Vec<C> {
        state.promised = None;
        let size = self.settings.batch_max.max(1).min(state.waiting.len());
        let oldest = state.waiting.front().map(|entry| entry.queued_at.elapsed());
        let (commands, replies): (Vec<_>, Replies<R>) = state
            .waiting
            .drain(..size)
            .filter(|entry| !entry.reply.is_closed())
            .map(|entry| {
                (
                    entry.command,
                    Some(Reply { to: entry.reply, runtime: entry.runtime, queued_at: entry.queued_at }),
                )
            })
            .unzip();
        self.metrics.abandoned.inc_by((size - replies.len()) as u64);
        self.metrics.depth.set(i64::try_from(state.waiting.len()).unwrap_or(i64::MAX));
        if !commands.is_empty() {
            self.metrics.batch_size.observe(commands.len() as f64);
            self.metrics.wait_seconds.observe(oldest.unwrap_or_default().as_secs_f64());
        }
        state.under_way.push((number, replies));
        commands
    }

    /// Tells whoever has waited for too long, in a batch or behind them, that it took too long. The batches go on.
    pub(super) fn answer_late(&self) {
        let timeout = self.settings.timeout;
        let is_late = |queued_at: Instant| queued_at.elapsed() >= timeout - timeout / TICKS_PER_TIMEOUT;
        let late = || Error::unavailable(self.name, "no answer in time");
        let mut state = self.state.lock();
        for reply in state.under_way.iter_mut().flat_map(|(_, replies)| replies) {
            let reply = reply.take_if(|reply| is_late(reply.queued_at));
            answer(reply, Err(late()));
        }
        // They wait in the order in which they came.
        let count = state.waiting.iter().take_while(|entry| is_late(entry.queued_at)).count();
        for entry in state.waiting.drain(..count) {
            let _ = entry.reply.send(Err(late()));
        }
    }
}

impl<C: Send, R: Send + 'static> Waiting<C> for Queue<C, R> {
    fn take(&self, number: u64) -> Vec<C> {
        let mut state = self.state.lock();
        if state.promised != Some(number) {
            // It was given up meanwhile: whoever waits now is promised to another.
            return Vec::new();
        }
        let commands = self.take_from(&mut state, number);
        let is_more = !state.waiting.is_empty();
        drop(state);
        if is_more {
            self.arrived.notify_one();
        }
        commands
    }
}

fn fail<R: Send + 'static>(replies: Replies<R>, error: &Error) {
    answer_all(replies.into_iter().map(|reply| (reply, Err(error.clone()))));
}

/// Answers to callers of one runtime.
struct Answers<R> {
    runtime: Handle,
    answers: Vec<(Reply<R>, Result<R>)>,
}

/// Answers the callers of a batch. Waking a task of another runtime costs a system call; so callers elsewhere are answered by
/// a task on their own runtime, one for all of them.
fn answer_all<R: Send + 'static>(answers: impl Iterator<Item = (Option<Reply<R>>, Result<R>)>) {
    let here = Handle::current().id();
    let mut elsewhere: Vec<Answers<R>> = Vec::new();
    for (reply, outcome) in answers {
        let Some(reply) = reply else { continue };
        if reply.runtime.id() == here {
            let _ = reply.to.send(outcome);
        } else if let Some(group) =
            elsewhere.iter_mut().find(|group| group.runtime.id() == reply.runtime.id())
        {
            group.answers.push((reply, outcome));
        } else {
            let runtime = reply.runtime.clone();
            elsewhere.push(Answers { runtime, answers: vec![(reply, outcome)] });
        }
    }
    for Answers { runtime, answers } in elsewhere {
        runtime.spawn(async move {
            for (reply, outcome) in answers {
                let _ = reply.to.send(outcome);
            }
        });
    }
}

/// A caller that has gone, or was told already, needs no answer.
fn answer<R>(reply: Option<Reply<R>>, outcome: Result<R>) {
    if let Some(reply) = reply {
        let _ = reply.to.send(outcome);
    }
}
