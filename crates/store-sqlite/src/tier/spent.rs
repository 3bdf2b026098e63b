//! What keys have spent. Every key in use is saved up to twenty times a second, so large batches go through
//! `tier_spent_journal` (see `journal.rs`).

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rusqlite::{Connection, Row, params};
use weir_core::Timestamp;
use weir_store::tier::{SpentRecord, SpentRow};

use crate::error::fault;
use crate::journal::{IN_PLACE_MAX, Journal, JournaledTable, put_text, take_bytes, take_text};
use crate::writer::WriterTurn;

const SAVE: &str = "INSERT OR REPLACE INTO tier_spent (scope, key, spent, saved_at) VALUES (?1, ?2, ?3, ?4)";
const REMOVE: &str = "DELETE FROM tier_spent WHERE scope = ?1 AND key = ?2";
const LOAD: &str = "
    SELECT scope, key, spent, saved_at FROM tier_spent WHERE (scope, key) > (?1, ?2) ORDER BY scope, key LIMIT ?3";

/// Stands for an unknown time in the journal.
const NO_TIME: i64 = i64::MIN;

/// The journal of `tier_spent`.
#[derive(Debug, Default)]
pub(crate) struct SpentJournal {
    journal: Journal<SpentTable>,
    /// Scopes of deleted policies whose rows are being removed.
    deleted_scopes: Arc<Mutex<HashSet<u32>>>,
}

/// Until it is dropped, no rows of its scope are saved, so that the deletion of its rows comes to an end.
#[derive(Debug)]
pub(super) struct DeletedScope {
    scope: u32,
    deleted_scopes: Arc<Mutex<HashSet<u32>>>,
}

impl Drop for DeletedScope {
    fn drop(&mut self) {
        self.deleted_scopes.lock().remove(&self.scope);
    }
}

/// The table `tier_spent`.
#[derive(Debug)]
struct SpentTable;

/// What a key has spent as text (empty: the row is to be deleted), and when it was saved.
type SpentText = (String, i64);

impl JournaledTable for SpentTable {
    /// Scope and key.
    type Key = (u32, String);
    type Value = SpentText;

    const NAME: &'static str = "tier_spent_journal";
    const APPEND: &'static str = "INSERT INTO tier_spent_journal (entries) VALUES (?1)";
    const READ: &'static str = "SELECT id, entries FROM tier_spent_journal ORDER BY id";
    const CLEAR: &'static str = "DELETE FROM tier_spent_journal WHERE id <= ?1";
    const FOLD_AT: usize = 65_536;
    const FOLD_AFTER: Duration = Duration::from_secs(5);

    fn encode((scope, key): &(u32, String), (spent, saved_at): &SpentText, entries: &mut Vec<u8>) {
        entries.extend_from_slice(&scope.to_le_bytes());
        put_text(entries, key);
        put_text(entries, spent);
        entries.extend_from_slice(&saved_at.to_le_bytes());
    }

    fn decode(entries: &mut &[u8]) -> Option<((u32, String), SpentText)> {
        let scope = u32::from_le_bytes(take_bytes(entries)?);
        let (key, spent) = (take_text(entries)?.to_owned(), take_text(entries)?.to_owned());
        Some(((scope, key), (spent, i64::from_le_bytes(take_bytes(entries)?))))
    }

    fn save(connection: &Connection, rows: &[((u32, String), SpentText)]) -> rusqlite::Result<()> {
        let (mut save, mut remove) = (connection.prepare_cached(SAVE)?, connection.prepare_cached(REMOVE)?);
        for ((scope, key), (spent, saved_at)) in rows {
            if spent.is_empty() {
                remove.execute(params![scope, key])?;
            } else {
                let saved_at = Some(*saved_at).filter(|at| *at != NO_TIME);
                save.execute(params![scope, key, spent, saved_at])?;
            }
        }
        Ok(())
    }
}

impl SpentJournal {
    /// Saves rows within the current transaction, except for those of deleted policies.
    pub(super) fn save(&mut self, connection: &Connection, mut rows: Vec<SpentRow>) -> rusqlite::Result<()> {
        self.journal.load(connection)?;
        let deleted_scopes = self.deleted_scopes.lock();
        rows.retain(|row| !deleted_scopes.contains(&row.scope));
        drop(deleted_scopes);
        let count = rows.len();
        let rows = rows.into_iter().map(|SpentRow { scope, key, record, saved_at }| {
            let saved_at = saved_at.map_or(NO_TIME, Timestamp::as_micros);
            ((scope, key), (record.map(|record| record.to_text()).unwrap_or_default(), saved_at))
        });
        if count > IN_PLACE_MAX || self.has_unfolded_rows() {
            let mut entries = Vec::with_capacity(count * 96);
            rows.for_each(|(key, saved)| self.journal.add_row(key, saved, &mut entries));
            self.journal.append(connection, &entries)?;
        } else {
            SpentTable::save(connection, &rows.collect::<Vec<_>>())?;
        }
        self.journal.fold_if_due(connection, count)
    }

    /// Saves no more rows of a deleted policy until the returned guard is dropped.
    pub(super) fn reject_scope(&self, scope: u32) -> DeletedScope {
        self.deleted_scopes.lock().insert(scope);
        DeletedScope { scope, deleted_scopes: Arc::clone(&self.deleted_scopes) }
    }

    /// Forgets how to roll back: the transaction was committed.
    pub(crate) fn commit(&mut self) {
        self.journal.commit();
    }

    pub(crate) fn savepoint(&self) -> usize {
        self.journal.savepoint()
    }

    pub(crate) fn roll_back_to(&mut self, savepoint: usize) {
        self.journal.roll_back_to(savepoint);
    }

    pub(crate) fn has_unfolded_rows(&self) -> bool {
        self.journal.has_unfolded_rows()
    }

    /// Whether an idle writer should fold. Only the sweep of limits reads the table while the server runs, once a second,
    /// and it folds first. So rows may stay in the journal, and a key that is saved twenty times a second is folded once.
    pub(crate) fn is_fold_due(&self) -> bool {
        self.journal.is_fold_due()
    }

    pub(crate) fn fold(&mut self, connection: &Connection, max: usize) -> rusqlite::Result<()> {
        self.journal.fold(connection, max)
    }

    /// See [`Journal::fold_for_one_turn`].
    pub(super) fn fold_for_one_turn(
        &mut self,
        connection: &Connection,
        target: &mut Option<u64>,
        turn: &WriterTurn,
    ) -> rusqlite::Result<ControlFlow<()>> {
        self.journal.fold_for_one_turn(connection, target, turn)
    }
}

/// Reads rows of the table behind `after`. Rows that are not folded yet are missing.
pub(super) fn load(
    connection: &Connection,
    after: Option<(u32, String)>,
    limit: usize,
) -> rusqlite::Result<Vec<SpentRow>> {
    let (scope, key) = after.map_or((-1, String::new()), |(scope, key)| (i64::from(scope), key));
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    connection.prepare_cached(LOAD)?.query_map(params![scope, key, limit], read)?.collect()
}

fn read(row: &Row<'_>) -> rusqlite::Result<SpentRow> {
    let record = SpentRecord::parse(row.get_ref(2)?.as_str()?).map_err(fault)?;
    let saved_at: Option<i64> = row.get(3)?;
    Ok(SpentRow {
        scope: row.get(0)?,
        key: row.get(1)?,
        record: Some(record),
        saved_at: saved_at.map(Timestamp::from_micros),
    })
}

#[cfg(test)]
mod tests {
    use weir_core::tier::{FixedWindow, Limit, LimitUsage};

    use super::*;

    fn database() -> Connection {
        let mut connection = Connection::open_in_memory().unwrap();
        crate::migrate::run(&mut connection).unwrap();
        connection
    }

    fn row(n: usize, amount: i64) -> SpentRow {
        let limit = Limit::FixedWindow(FixedWindow::new(1_000, Duration::from_secs(60)).unwrap());
        SpentRow {
            scope: 7,
            key: format!("key-{n:06}"),
            record: SpentRecord::of_limit(&limit, LimitUsage(amount, 1, 0)),
            saved_at: n.is_multiple_of(2).then(|| Timestamp::from_seconds(9)),
        }
    }

    fn rows(numbers: std::ops::Range<usize>, amount: i64) -> Vec<SpentRow> {
        numbers.map(|n| row(n, amount)).collect()
    }

    fn fold_all(spent: &mut SpentJournal, connection: &Connection) {
        while spent.has_unfolded_rows() {
            spent.fold(connection, 7).unwrap();
        }
    }

    #[test]
    fn a_small_batch_is_in_the_table_at_once() {
        let (connection, mut spent) = (database(), SpentJournal::default());
        spent.save(&connection, rows(0..IN_PLACE_MAX, 5)).unwrap();
        assert_eq!(load(&connection, None, 100).unwrap(), rows(0..IN_PLACE_MAX, 5));
        assert!(!spent.has_unfolded_rows());
    }

    #[test]
    fn a_row_that_is_saved_repeatedly_is_folded_once_and_survives_a_restart() {
        let (connection, mut spent) = (database(), SpentJournal::default());
        for amount in 1..=5 {
            spent.save(&connection, rows(0..20, amount)).unwrap();
        }
        // A later save deletes one row.
        spent.save(&connection, vec![SpentRow { record: None, ..row(3, 0) }]).unwrap();
        assert_eq!(load(&connection, None, 100).unwrap(), [], "the rows are in the journal only");
        assert!(!spent.is_fold_due(), "no fold is due yet");
        spent.fold(&connection, 5).unwrap();
        spent.save(&connection, vec![row(0, 9)]).unwrap();
        let mut expected = rows(0..20, 5);
        expected[0] = row(0, 9);
        expected.remove(3);
        for mut spent in [SpentJournal::default(), spent] {
            fold_all(&mut spent, &connection);
            assert_eq!(load(&connection, None, 100).unwrap(), expected);
        }
    }

    #[test]
    fn no_more_rows_wait_for_the_table_than_the_bound() {
        let (connection, mut spent) = (database(), SpentJournal::default());
        connection.execute_batch("BEGIN").unwrap();
        for first in (0..SpentTable::FOLD_AT * 2).step_by(1_024) {
            spent.save(&connection, rows(first..first + 1_024, 5)).unwrap();
            let (pending, folding) = spent.journal.sizes();
            assert!(pending <= SpentTable::FOLD_AT + 1_024 && folding <= SpentTable::FOLD_AT + 1_024);
        }
        assert!(load(&connection, None, usize::MAX).unwrap().len() >= SpentTable::FOLD_AT / 2);
    }
}
