//! Jobs: what the writer thread is given to do, and how long each may keep it.
//!
//! A job that may be long is done in turns. When its turn is over it commits what it has, lets others have the writer, and
//! goes on later. It is answered when all of it is on disk.

use std::cell::Cell;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use rusqlite::Connection;
use tokio::sync::oneshot;
use weir_store::{Batch, Error, Result};

use super::Unflushed;
use crate::ENGINE;

/// How long a job may work before it lets others have the writer.
#[derive(Debug)]
pub(crate) struct Turn {
    ends: Instant,
    has_begun: Cell<bool>,
}

impl Turn {
    pub(crate) fn begin(length: Duration) -> Self {
        Self { ends: Instant::now() + length, has_begun: Cell::new(false) }
    }

    /// Whether there is time for one more step. The first is always granted, so every turn makes progress.
    pub(crate) fn goes_on(&self) -> bool {
        !self.has_begun.replace(true) || Instant::now() < self.ends
    }
}

/// Whether jobs may overtake each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Others may be done before this one has come to its end.
    Any,
    /// The same, for a job that others wait for: every other turn of those that were put off is for such a job.
    Awaited,
    /// Jobs of this kind are done one after the other, as they came.
    Arrival,
}

/// A unit of work that is applied, and answered once its group is committed.
pub(super) trait Job: Send {
    fn order(&self) -> Order;
    /// Works for one turn. `Continue` when there is more to do.
    fn apply(
        &mut self,
        connection: &Connection,
        unflushed: &mut Unflushed,
        turn: &Turn,
    ) -> rusqlite::Result<ControlFlow<()>>;
    fn answer(self: Box<Self>, committed: Result<()>);
}

/// A job that is a closure.
pub(super) struct Write<F, T> {
    pub(super) order: Order,
    pub(super) work: F,
    pub(super) value: Option<T>,
    pub(super) reply: oneshot::Sender<Result<T>>,
}

impl<F, T> Job for Write<F, T>
where
    F: FnMut(&Connection, &mut Unflushed, &Turn) -> rusqlite::Result<ControlFlow<T>> + Send,
    T: Send,
{
    fn order(&self) -> Order {
        self.order
    }

    fn apply(
        &mut self,
        connection: &Connection,
        unflushed: &mut Unflushed,
        turn: &Turn,
    ) -> rusqlite::Result<ControlFlow<()>> {
        Ok(match (self.work)(connection, unflushed, turn)? {
            ControlFlow::Continue(()) => ControlFlow::Continue(()),
            ControlFlow::Break(value) => {
                self.value = Some(value);
                ControlFlow::Break(())
            }
        })
    }

    fn answer(self: Box<Self>, committed: Result<()>) {
        let Self { work, value, reply, .. } = *self;
        // Whoever is answered may close the engine, and nothing of it may be left here then.
        drop(work);
        let unfinished = || Error::failed(ENGINE, "a job was answered before it was applied");
        let _ = reply.send(committed.and_then(|()| value.ok_or_else(unfinished)));
    }
}

/// A batch that is carried out in turns: what is left of it, and what came of the rest.
#[derive(Debug)]
pub(crate) struct BatchInTurns<C, O> {
    batch: Option<Batch<C>>,
    rest: std::vec::IntoIter<C>,
    /// In the order of the commands.
    pub(crate) outcomes: Vec<O>,
}

impl<C, O> BatchInTurns<C, O> {
    /// The batch is taken when the writer comes to it, with all that waits by then.
    pub(crate) fn new(batch: impl Into<Batch<C>>) -> Self {
        Self { batch: Some(batch.into()), rest: Vec::new().into_iter(), outcomes: Vec::new() }
    }

    /// The next command, while the turn goes on.
    pub(crate) fn next(&mut self, turn: &Turn) -> Option<C> {
        if self.is_done() || !turn.goes_on() {
            return None;
        }
        self.rest.next()
    }

    /// The next commands, as many as asked for at most, while the turn goes on.
    pub(crate) fn next_chunk(&mut self, most: usize, turn: &Turn) -> Vec<C> {
        if self.is_done() || !turn.goes_on() {
            return Vec::new();
        }
        self.rest.by_ref().take(most).collect()
    }

    /// How many commands are left.
    pub(crate) fn left(&mut self) -> usize {
        if let Some(batch) = self.batch.take() {
            self.rest = batch.take().into_iter();
        }
        self.rest.len()
    }

    /// Whether no command is left.
    pub(crate) fn is_done(&mut self) -> bool {
        self.left() == 0
    }

    /// All outcomes once every command is done.
    pub(crate) fn finish(&mut self) -> ControlFlow<Vec<O>> {
        if self.is_done() {
            ControlFlow::Break(std::mem::take(&mut self.outcomes))
        } else {
            ControlFlow::Continue(())
        }
    }
}
