//! Jobs of the writer thread, and how long each may keep it.
//!
//! A job that may be long works in turns. When its turn ends, the writer commits what the job has done, runs other jobs
//! and continues this one later. The caller is answered when all of the job is on disk.

use std::cell::Cell;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use rusqlite::Connection;
use tokio::sync::oneshot;
use weir_store::{Batch, Error, Result};

use super::WriterState;
use crate::ENGINE;

/// The time that a job may work before other jobs get the writer.
#[derive(Debug)]
pub(crate) struct WriterTurn {
    ends_at: Instant,
    has_started: Cell<bool>,
}

impl WriterTurn {
    pub(crate) fn begin(length: Duration) -> Self {
        Self { ends_at: Instant::now() + length, has_started: Cell::new(false) }
    }

    /// Whether there is time for one more step. The first step is always granted, so every turn makes progress.
    pub(crate) fn has_time(&self) -> bool {
        !self.has_started.replace(true) || Instant::now() < self.ends_at
    }
}

/// Which jobs run between the turns of a long job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scheduling {
    /// Any other job may run before this one is finished.
    Interleaved,
    /// As `Interleaved`, but with priority among unfinished jobs: every other turn goes to a prioritized job, because
    /// other calls wait for it.
    Prioritized,
    /// Jobs of this kind run one after another in order of arrival; none overtakes an unfinished one.
    Fifo,
}

/// A unit of work: applied in a transaction, and answered once that is committed.
pub(super) trait WriterJob: Send {
    fn scheduling(&self) -> Scheduling;
    /// Works for one turn. `Continue` means that there is more to do.
    fn apply(
        &mut self,
        connection: &Connection,
        state: &mut WriterState,
        turn: &WriterTurn,
    ) -> rusqlite::Result<ControlFlow<()>>;
    fn answer(self: Box<Self>, committed: Result<()>);
}

/// A job whose work is a closure.
pub(super) struct ClosureJob<F, T> {
    pub(super) scheduling: Scheduling,
    pub(super) work: F,
    pub(super) value: Option<T>,
    pub(super) caller: oneshot::Sender<Result<T>>,
}

impl<F, T> WriterJob for ClosureJob<F, T>
where
    F: FnMut(&Connection, &mut WriterState, &WriterTurn) -> rusqlite::Result<ControlFlow<T>> + Send,
    T: Send,
{
    fn scheduling(&self) -> Scheduling {
        self.scheduling
    }

    fn apply(
        &mut self,
        connection: &Connection,
        state: &mut WriterState,
        turn: &WriterTurn,
    ) -> rusqlite::Result<ControlFlow<()>> {
        Ok(match (self.work)(connection, state, turn)? {
            ControlFlow::Continue(()) => ControlFlow::Continue(()),
            ControlFlow::Break(value) => {
                self.value = Some(value);
                ControlFlow::Break(())
            }
        })
    }

    fn answer(self: Box<Self>, committed: Result<()>) {
        let Self { work, value, caller, .. } = *self;
        // The answered caller may close the engine, and `work` may hold a clone of it, which would keep the engine open.
        drop(work);
        let unfinished = || Error::failed(ENGINE, "bug in Weir: a write was answered before it was finished");
        let _ = caller.send(committed.and_then(|()| value.ok_or_else(unfinished)));
    }
}

/// A batch that is worked off in turns: the remaining commands, and the outcomes of the finished ones.
#[derive(Debug)]
pub(crate) struct BatchInTurns<C, O> {
    /// `None` once its commands have moved to `commands`.
    batch: Option<Batch<C>>,
    commands: std::vec::IntoIter<C>,
    /// In the order of the commands.
    pub(crate) outcomes: Vec<O>,
}

impl<C, O> BatchInTurns<C, O> {
    /// The commands are taken out of `batch` when the job's first turn starts, so that it includes all that arrived by
    /// then.
    pub(crate) fn new(batch: impl Into<Batch<C>>) -> Self {
        Self { batch: Some(batch.into()), commands: Vec::new().into_iter(), outcomes: Vec::new() }
    }

    /// The next command, or `None` when the batch is finished or the turn is over.
    pub(crate) fn next(&mut self, turn: &WriterTurn) -> Option<C> {
        if self.is_done() || !turn.has_time() {
            return None;
        }
        self.commands.next()
    }

    /// At most `max` next commands; none when the batch is finished or the turn is over.
    pub(crate) fn next_chunk(&mut self, max: usize, turn: &WriterTurn) -> Vec<C> {
        if self.is_done() || !turn.has_time() {
            return Vec::new();
        }
        self.commands.by_ref().take(max).collect()
    }

    /// The commands that are not taken yet.
    pub(crate) fn waiting(&mut self) -> &[C] {
        self.remaining();
        self.commands.as_slice()
    }

    pub(crate) fn remaining(&mut self) -> usize {
        if let Some(batch) = self.batch.take() {
            self.commands = batch.take().into_iter();
        }
        self.commands.len()
    }

    pub(crate) fn is_done(&mut self) -> bool {
        self.remaining() == 0
    }

    /// Breaks with all outcomes once every command is done.
    pub(crate) fn finish(&mut self) -> ControlFlow<Vec<O>> {
        if self.is_done() {
            ControlFlow::Break(std::mem::take(&mut self.outcomes))
        } else {
            ControlFlow::Continue(())
        }
    }
}
