//! A settlement as arrays for the statements that save it.

use weir_core::MessageId;
use weir_queue::{Position, Settlement};

use crate::time;

#[derive(Default)]
pub(super) struct SettlementColumns {
    /// Shards and ids.
    pub(super) done: (Vec<i16>, Vec<i64>),
    /// Shards, ids, delays in microseconds, and the number of attempts to add.
    pub(super) retry: (Vec<i16>, Vec<i64>, Vec<i64>, Vec<i32>),
    /// Shards, ids, ids of the dead letters, and reasons.
    pub(super) dead: (Vec<i16>, Vec<i64>, Vec<String>, Vec<String>),
}

impl SettlementColumns {
    /// Takes only the positions that the caller has locked (`is_ours`).
    pub(super) fn new(
        settlement: Settlement,
        is_ours: impl Fn(Position) -> bool,
        dead_letter_id: impl Fn() -> MessageId,
    ) -> Self {
        let mut columns = Self::default();
        for position in settlement.done.into_iter().filter(|position| is_ours(*position)) {
            columns.done.0.push(position.shard.cast_signed());
            columns.done.1.push(position.id);
        }
        let retries = settlement.retry.into_iter().map(|(position, delay)| (position, delay, 1));
        let deferred = settlement.deferred.into_iter().map(|(position, delay)| (position, delay, 0));
        for (position, delay, attempts) in retries.chain(deferred).filter(|(position, ..)| is_ours(*position))
        {
            columns.retry.0.push(position.shard.cast_signed());
            columns.retry.1.push(position.id);
            columns.retry.2.push(time::micros(delay));
            columns.retry.3.push(attempts);
        }
        for (position, reason) in settlement.dead.into_iter().filter(|(position, _)| is_ours(*position)) {
            columns.dead.0.push(position.shard.cast_signed());
            columns.dead.1.push(position.id);
            columns.dead.2.push(dead_letter_id().to_string());
            columns.dead.3.push(reason.replace('\0', "\u{fffd}"));
        }
        columns
    }

    pub(super) fn is_empty(&self) -> bool {
        self.done.0.is_empty() && self.retry.0.is_empty() && self.dead.0.is_empty()
    }

    /// Removes positions that are done already.
    pub(super) fn remove_done(&mut self, is_done: impl Fn(i16, i64) -> bool) {
        let (shards, ids) = std::mem::take(&mut self.done);
        self.done = shards.into_iter().zip(ids).filter(|(shard, id)| !is_done(*shard, *id)).unzip();
    }
}
