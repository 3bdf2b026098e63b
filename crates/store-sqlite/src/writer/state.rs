//! State in the writer thread's memory that is newer than the tables. It is rolled back with the transaction that changed
//! it.

use std::collections::HashSet;

use rusqlite::Connection;
use weir_store::sale::ProductId;

use super::WriterTurn;
use crate::quota::{QuotaRows, QuotaSavepoint};
use crate::request::idempotency_journal::IdempotencyJournal;
use crate::tier::SpentJournal;

/// Rows of each journal that an idle writer folds at a time.
const IDLE_FOLD_ROWS: usize = 256;

/// In-memory state that belongs to the database: journals and their caches, and deletions in progress.
#[derive(Debug, Default)]
pub(crate) struct WriterState {
    pub(crate) quota: QuotaRows,
    pub(crate) idempotency: IdempotencyJournal,
    pub(crate) spent: SpentJournal,
    /// Products whose deletion has started. They cannot be bought any more.
    pub(crate) deleted_products: HashSet<ProductId>,
}

impl WriterState {
    pub(super) fn has_unfolded_rows(&self) -> bool {
        self.quota.has_unfolded_rows()
            || self.idempotency.has_unfolded_rows()
            || self.spent.has_unfolded_rows()
    }

    /// Whether an idle writer should fold.
    pub(super) fn is_fold_due(&self) -> bool {
        self.quota.has_unfolded_rows() || self.idempotency.has_unfolded_rows() || self.spent.is_fold_due()
    }

    pub(super) fn savepoint(&self) -> Savepoint {
        Savepoint {
            quota: self.quota.savepoint(),
            idempotency: self.idempotency.savepoint(),
            spent: self.spent.savepoint(),
        }
    }

    pub(super) fn roll_back_to(&mut self, Savepoint { quota, idempotency, spent }: Savepoint) {
        self.quota.roll_back_to(quota);
        self.idempotency.roll_back_to(idempotency);
        self.spent.roll_back_to(spent);
        // A deletion that continues adds its product again in its next turn.
        self.deleted_products.clear();
    }

    /// Forgets how to roll back: the transaction was committed.
    pub(super) fn commit(&mut self) {
        self.quota.commit();
        self.idempotency.commit();
        self.spent.commit();
    }

    /// Folds journals into their tables until nothing is due or the turn is over.
    pub(super) fn fold(&mut self, connection: &Connection, turn: &WriterTurn) -> rusqlite::Result<()> {
        self.quota.refresh(connection)?;
        while self.is_fold_due() && turn.has_time() {
            if self.quota.has_unfolded_rows() {
                self.quota.fold(connection, IDLE_FOLD_ROWS)?;
            }
            if self.idempotency.has_unfolded_rows() {
                self.idempotency.fold(connection, IDLE_FOLD_ROWS)?;
            }
            if self.spent.is_fold_due() {
                self.spent.fold(connection, IDLE_FOLD_ROWS)?;
            }
        }
        Ok(())
    }
}

/// A point within a transaction. The default is its beginning.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Savepoint {
    quota: QuotaSavepoint,
    idempotency: usize,
    spent: usize,
}
