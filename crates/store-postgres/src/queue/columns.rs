//! A settlement as the arrays of the statements that carry it out.

use weir_core::MessageId;
use weir_queue::{Position, Settlement};

use crate::time;

/// A settlement as the arrays of the statements that carry it out.
#[derive(Default)]
pub(super) struct Columns {
    pub(super) done: (Vec<i16>, Vec<i64>),
    /// Shards, ids, delays in microseconds, and the attempts that it costs.
    pub(super) retry: (Vec<i16>, Vec<i64>, Vec<i64>, Vec<i32>),
    pub(super) dead: (Vec<i16>, Vec<i64>, Vec<String>, Vec<String>),
}

impl Columns {
    /// Takes only what is `ours`: what nobody else may settle now.
    pub(super) fn of(
        settlement: Settlement,
        ours: impl Fn(Position) -> bool,
        letter: impl Fn() -> MessageId,
    ) -> Self {
        let mut columns = Self::default();
        for position in settlement.done.into_iter().filter(|position| ours(*position)) {
            columns.done.0.push(position.shard.cast_signed());
            columns.done.1.push(position.id);
        }
        let retries = settlement.retry.into_iter().map(|(position, delay)| (position, delay, 1));
        let put_off = settlement.deferred.into_iter().map(|(position, delay)| (position, delay, 0));
        for (position, delay, attempts) in retries.chain(put_off).filter(|(position, ..)| ours(*position)) {
            columns.retry.0.push(position.shard.cast_signed());
            columns.retry.1.push(position.id);
            columns.retry.2.push(time::micros(delay));
            columns.retry.3.push(attempts);
        }
        for (position, reason) in settlement.dead.into_iter().filter(|(position, _)| ours(*position)) {
            columns.dead.0.push(position.shard.cast_signed());
            columns.dead.1.push(position.id);
            columns.dead.2.push(letter().to_string());
            columns.dead.3.push(reason.replace('\0', "\u{fffd}"));
        }
        columns
    }

    pub(super) fn is_empty(&self) -> bool {
        self.done.0.is_empty() && self.retry.0.is_empty() && self.dead.0.is_empty()
    }

    /// Leaves out what was done otherwise.
    pub(super) fn forget_done(&mut self, is_gone: impl Fn(i16, i64) -> bool) {
        let (shards, ids) = std::mem::take(&mut self.done);
        self.done = shards.into_iter().zip(ids).filter(|(shard, id)| !is_gone(*shard, *id)).unzip();
    }
}
