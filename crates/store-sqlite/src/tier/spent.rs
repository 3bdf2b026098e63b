//! What keys have spent, as the writer thread knows it. Every key that was used is written twenty times a second, so batches of many
//! go through `tier_spent_journal` (see `journal.rs`).

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
use crate::writer::Turn;

const KEEP: &str = "INSERT OR REPLACE INTO tier_spent (scope, key, spent, saved_at) VALUES (?1, ?2, ?3, ?4)";
const REMOVE: &str = "DELETE FROM tier_spent WHERE scope = ?1 AND key = ?2";
const LOAD: &str = "
    SELECT scope, key, spent, saved_at FROM tier_spent WHERE (scope, key) > (?1, ?2) ORDER BY scope, key LIMIT ?3";

/// In the place of a time: it is not known.
const NO_TIME: i64 = i64::MIN;

/// What the writer thread knows of rows that are not in `tier_spent`.
#[derive(Debug, Default)]
pub(crate) struct Spent {
    journal: Journal<SpentTable>,
    /// Scopes of policies that were deleted and whose rows are being removed.
    dropped: Arc<Mutex<HashSet<u32>>>,
}

/// While it lives, nothing of a scope is saved, so that what is left only gets less.
#[derive(Debug)]
pub(super) struct DroppedScope {
    scope: u32,
    dropped: Arc<Mutex<HashSet<u32>>>,
}

impl Drop for DroppedScope {
    fn drop(&mut self) {
        self.dropped.lock().remove(&self.scope);
    }
}

/// The table `tier_spent`.
#[derive(Debug)]
struct SpentTable;

/// What a key has spent as text, empty when it need not be kept, and when it was written.
type Saved = (String, i64);

impl JournaledTable for SpentTable {
    /// Scope and key.
    type Key = (u32, String);
    type Value = Saved;

    const NAME: &'static str = "tier_spent_journal";
    const APPEND: &'static str = "INSERT INTO tier_spent_journal (entries) VALUES (?1)";
    const READ: &'static str = "SELECT id, entries FROM tier_spent_journal ORDER BY id";
    const CLEAR: &'static str = "DELETE FROM tier_spent_journal WHERE id <= ?1";
    const FOLD_AT: usize = 65_536;
    const FOLD_AFTER: Duration = Duration::from_secs(5);

    fn encode((scope, key): &(u32, String), (spent, saved_at): &Saved, entries: &mut Vec<u8>) {
        entries.extend_from_slice(&scope.to_le_bytes());
        put_text(entries, key);
        put_text(entries, spent);
        entries.extend_from_slice(&saved_at.to_le_bytes());
    }

    fn decode(entries: &mut &[u8]) -> Option<((u32, String), Saved)> {
        let scope = u32::from_le_bytes(take_bytes(entries)?);
        let (key, spent) = (take_text(entries)?.to_owned(), take_text(entries)?.to_owned());
        Some(((scope, key), (spent, i64::from_le_bytes(take_bytes(entries)?))))
    }

    fn save(connection: &Connection, rows: &[((u32, String), Saved)]) -> rusqlite::Result<()> {
        let (mut keep, mut remove) = (connection.prepare_cached(KEEP)?, connection.prepare_cached(REMOVE)?);
        for ((scope, key), (spent, saved_at)) in rows {
            if spent.is_empty() {
                remove.execute(params![scope, key])?;
            } else {
                let saved_at = Some(*saved_at).filter(|at| *at != NO_TIME);
                keep.execute(params![scope, key, spent, saved_at])?;
            }
        }
        Ok(())
    }
}

impl Spent {
    /// Saves rows in the transaction under way, other than those of policies that were deleted.
    pub(super) fn save(&mut self, connection: &Connection, mut rows: Vec<SpentRow>) -> rusqlite::Result<()> {
        self.journal.load(connection)?;
        let dropped = self.dropped.lock();
        rows.retain(|row| !dropped.contains(&row.scope));
        drop(dropped);
        let count = rows.len();
        let rows = rows.into_iter().map(|SpentRow { scope, key, record, saved_at }| {
            let saved_at = saved_at.map_or(NO_TIME, Timestamp::as_micros);
            ((scope, key), (record.map(|record| record.to_text()).unwrap_or_default(), saved_at))
        });
        if count > IN_PLACE_MAX || self.is_behind() {
            let mut entries = Vec::with_capacity(count * 96);
            rows.for_each(|(key, saved)| self.journal.add(key, saved, &mut entries));
            self.journal.append(connection, &entries)?;
        } else {
            SpentTable::save(connection, &rows.collect::<Vec<_>>())?;
        }
        self.journal.fold_if_due(connection, count)
    }

    /// Saves nothing more of a policy that was deleted, until what is returned is dropped.
    pub(super) fn drop_scope(&self, scope: u32) -> DroppedScope {
        self.dropped.lock().insert(scope);
        DroppedScope { scope, dropped: Arc::clone(&self.dropped) }
    }

    /// The transaction under way was committed.
    pub(crate) fn commit(&mut self) {
        self.journal.commit();
    }

    /// What the transaction under way has changed so far, for [`Spent::undo_to`].
    pub(crate) fn mark(&self) -> usize {
        self.journal.mark()
    }

    /// Undoes the changes since a mark.
    pub(crate) fn undo_to(&mut self, mark: usize) {
        self.journal.undo_to(mark);
    }

    /// Whether the table is behind.
    pub(crate) fn is_behind(&self) -> bool {
        self.journal.is_behind()
    }

    /// Whether an idle writer should fold it. While the server runs only the sweep of limits reads the table, once a second, and
    /// folds first; so the table may be behind, and what is written twenty times a second is folded once.
    pub(crate) fn is_due(&self) -> bool {
        self.journal.is_due()
    }

    /// Brings the table up to date by so many rows, in the transaction under way.
    pub(crate) fn fold(&mut self, connection: &Connection, most: usize) -> rusqlite::Result<()> {
        self.journal.fold(connection, most)
    }

    /// Brings the table up to date for one turn, with what the journal had at the first (see [`Journal::fold_for_a_turn`]).
    pub(super) fn fold_for_a_turn(
        &mut self,
        connection: &Connection,
        target: &mut Option<u64>,
        turn: &Turn,
    ) -> rusqlite::Result<ControlFlow<()>> {
        self.journal.fold_for_a_turn(connection, target, turn)
    }
}

/// Rows of the table, which must have what the caller wants to find, after the one named.
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
    let kept = SpentRecord::parse(row.get_ref(2)?.as_str()?).map_err(fault)?;
    let saved_at: Option<i64> = row.get(3)?;
    Ok(SpentRow {
        scope: row.get(0)?,
        key: row.get(1)?,
        record: Some(kept),
        saved_at: saved_at.map(Timestamp::from_micros),
    })
}

#[cfg(test)]
mod tests {
    use weir_core::tier::{FixedWindow, Limit, LimitUsage as SpentOfLimit};

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
            record: SpentRecord::of_limit(&limit, SpentOfLimit(amount, 1, 0)),
            saved_at: n.is_multiple_of(2).then(|| Timestamp::from_seconds(9)),
        }
    }

    fn rows(numbers: std::ops::Range<usize>, amount: i64) -> Vec<SpentRow> {
        numbers.map(|n| row(n, amount)).collect()
    }

    fn fold_all(spent: &mut Spent, connection: &Connection) {
        while spent.is_behind() {
            spent.fold(connection, 7).unwrap();
        }
    }

    #[test]
    fn a_small_batch_is_in_the_table_at_once() {
        let (connection, mut spent) = (database(), Spent::default());
        spent.save(&connection, rows(0..IN_PLACE_MAX, 5)).unwrap();
        assert_eq!(load(&connection, None, 100).unwrap(), rows(0..IN_PLACE_MAX, 5));
        assert!(!spent.is_behind());
    }

    #[test]
    fn what_is_written_again_and_again_is_folded_once_and_survives_a_restart() {
        let (connection, mut spent) = (database(), Spent::default());
        for amount in 1..=5 {
            spent.save(&connection, rows(0..20, amount)).unwrap();
        }
        // One that has nothing to keep any more, behind the others.
        spent.save(&connection, vec![SpentRow { record: None, ..row(3, 0) }]).unwrap();
        assert_eq!(load(&connection, None, 100).unwrap(), [], "only the journal has them");
        assert!(!spent.is_due(), "and they may stay there");
        spent.fold(&connection, 5).unwrap();
        spent.save(&connection, vec![row(0, 9)]).unwrap();
        let mut expected = rows(0..20, 5);
        expected[0] = row(0, 9);
        expected.remove(3);
        for mut spent in [Spent::default(), spent] {
            fold_all(&mut spent, &connection);
            assert_eq!(load(&connection, None, 100).unwrap(), expected);
        }
    }

    #[test]
    fn no_more_rows_wait_for_the_table_than_the_bound() {
        let (connection, mut spent) = (database(), Spent::default());
        connection.execute_batch("BEGIN").unwrap();
        for first in (0..SpentTable::FOLD_AT * 2).step_by(1_024) {
            spent.save(&connection, rows(first..first + 1_024, 5)).unwrap();
            let (pending, folding) = spent.journal.sizes();
            assert!(pending <= SpentTable::FOLD_AT + 1_024 && folding <= SpentTable::FOLD_AT + 1_024);
        }
        assert!(load(&connection, None, usize::MAX).unwrap().len() >= SpentTable::FOLD_AT / 2);
    }
}
