//! What the writer thread knows that the tables do not say yet, and how it is undone with the transaction that changed it.

use std::collections::HashSet;

use rusqlite::Connection;
use weir_store::sale::ProductId;

use super::Turn;
use crate::quota_journal::{CountsMark, QuotaJournal};
use crate::request::idempotency_journal::IdempotencyJournal;
use crate::tier::Spent;

/// Rows of each journal that an idle writer folds at a time.
const IDLE_FOLD: usize = 256;

/// What the thread knows that the tables do not say yet.
#[derive(Debug, Default)]
pub(crate) struct Unflushed {
    pub(crate) counts: QuotaJournal,
    pub(crate) keys: IdempotencyJournal,
    pub(crate) spent: Spent,
    /// Products that are on their way out.
    pub(crate) deleting: HashSet<ProductId>,
}

impl Unflushed {
    pub(super) fn is_behind(&self) -> bool {
        self.counts.is_behind() || self.keys.is_behind() || self.spent.is_behind()
    }

    /// Whether there is something to fold for an idle writer.
    pub(super) fn is_due(&self) -> bool {
        self.counts.is_behind() || self.keys.is_behind() || self.spent.is_due()
    }

    /// What the transaction under way has changed so far.
    pub(super) fn mark(&self) -> Mark {
        Mark { counts: self.counts.mark(), keys: self.keys.mark(), spent: self.spent.mark() }
    }

    /// Undoes what was changed since a mark.
    pub(super) fn undo_to(&mut self, Mark { counts, keys, spent }: Mark) {
        self.counts.undo_to(counts);
        self.keys.undo_to(keys);
        self.spent.undo_to(spent);
        // A deletion that goes on says so again with its next turn.
        self.deleting.clear();
    }

    /// The transaction under way was committed.
    pub(super) fn commit(&mut self) {
        self.counts.commit();
        self.keys.commit();
        self.spent.commit();
    }

    /// Brings the tables up to date, as far as one turn allows.
    pub(super) fn fold(&mut self, connection: &Connection, turn: &Turn) -> rusqlite::Result<()> {
        self.counts.refresh(connection)?;
        while self.is_due() && turn.goes_on() {
            if self.counts.is_behind() {
                self.counts.fold(connection, IDLE_FOLD)?;
            }
            if self.keys.is_behind() {
                self.keys.fold(connection, IDLE_FOLD)?;
            }
            if self.spent.is_due() {
                self.spent.fold(connection, IDLE_FOLD)?;
            }
        }
        Ok(())
    }
}

/// Where a transaction stood. The default is its beginning.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Mark {
    counts: CountsMark,
    keys: usize,
    spent: usize,
}
