//! Quota rows as the writer thread knows them. The counts of a batch of sends to many users go through `quota_journal`
//! (see `journal.rs`), in the same commit as its messages.
//!
//! Only the writer thread reads and writes here, in the order of its transactions. When one of them is undone, the rows that it
//! changed are forgotten and read again.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, Row, params};
use weir_core::quota::{Quota, QuotaLimits};
use weir_core::{Timestamp, UserId};

use crate::error::fault;
use crate::journal::{IN_PLACE_MAX, Journal, JournaledTable, put_text, take_bytes, take_text};
use crate::writer::Turn;

const FIND: &str = "
    SELECT rate_limit, time_window, current_count, last_refresh_time
    FROM rate_limit_store WHERE user_id = ?1";
const SAVE: &str = "
    UPDATE rate_limit_store SET current_count = ?2, last_refresh_time = ?3 WHERE user_id = ?1";
/// Changes when another connection, such as a person's shell, has written.
const DATA_VERSION: &str = "PRAGMA data_version";

/// How many rows are remembered. When there are more, all are forgotten: the table has them.
pub(crate) const ROWS_MAX: usize = 32_768;

/// What the writer thread knows of quota rows.
#[derive(Debug, Default)]
pub(crate) struct QuotaJournal {
    rows: HashMap<UserId, Quota>,
    journal: Journal<QuotaCounts>,
    /// What the rows were read under; none before the first look.
    data_version: Option<i64>,
    /// Users whose rows the transaction under way has changed.
    changed: Vec<UserId>,
}

/// Where a transaction stood: changes of the journal, and rows that were changed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CountsMark(usize, usize);

/// The counts in `rate_limit_store`. What the journal says of a user that was deleted changes nothing.
#[derive(Debug)]
struct QuotaCounts;

/// What a send changes in a row: the count and the last refresh.
type Count = (u32, Timestamp);

impl JournaledTable for QuotaCounts {
    type Key = UserId;
    type Value = Count;

    const NAME: &'static str = "quota_journal";
    const APPEND: &'static str = "INSERT INTO quota_journal (entries) VALUES (?1)";
    const READ: &'static str = "SELECT id, entries FROM quota_journal ORDER BY id";
    const CLEAR: &'static str = "DELETE FROM quota_journal WHERE id <= ?1";
    const FOLD_AT: usize = 16_384;
    const FOLD_AFTER: Duration = Duration::from_secs(1);

    fn encode(user: &UserId, (count, last_refresh): &Count, entries: &mut Vec<u8>) {
        put_text(entries, user.as_str());
        entries.extend_from_slice(&count.to_le_bytes());
        entries.extend_from_slice(&last_refresh.as_micros().to_le_bytes());
    }

    fn decode(entries: &mut &[u8]) -> Option<(UserId, Count)> {
        let user = UserId::parse(take_text(entries)?).ok()?;
        let count = u32::from_le_bytes(take_bytes(entries)?);
        let last_refresh = Timestamp::from_micros(i64::from_le_bytes(take_bytes(entries)?));
        Some((user, (count, last_refresh)))
    }

    fn save(connection: &Connection, rows: &[(UserId, Count)]) -> rusqlite::Result<()> {
        let mut save = connection.prepare_cached(SAVE)?;
        rows.iter().try_for_each(|(user, (count, last_refresh))| {
            save.execute(params![user.as_str(), count, last_refresh.as_micros()]).map(drop)
        })
    }
}

impl QuotaJournal {
    /// Reads the journal, unless it is known, and forgets rows that somebody else may have changed.
    pub(crate) fn refresh(&mut self, connection: &Connection) -> rusqlite::Result<()> {
        let version = connection.prepare_cached(DATA_VERSION)?.query_row([], |row| row.get(0))?;
        if self.data_version.replace(version) != Some(version) {
            self.rows.clear();
        }
        self.journal.load(connection)
    }

    /// The transaction under way was committed.
    pub(crate) fn commit(&mut self) {
        self.journal.commit();
        self.changed.clear();
    }

    /// What the transaction under way has changed so far, for [`QuotaJournal::undo_to`].
    pub(crate) fn mark(&self) -> CountsMark {
        CountsMark(self.journal.mark(), self.changed.len())
    }

    /// Undoes the changes since a mark.
    pub(crate) fn undo_to(&mut self, CountsMark(journal, changed): CountsMark) {
        self.journal.undo_to(journal);
        for user in self.changed.drain(changed..) {
            self.rows.remove(&user);
        }
    }

    /// A user's row.
    pub(crate) fn find(&mut self, connection: &Connection, user: &UserId) -> rusqlite::Result<Option<Quota>> {
        if let Some(row) = self.rows.get(user) {
            return Ok(Some(*row));
        }
        let found = connection.prepare_cached(FIND)?.query_row([user.as_str()], read_row).optional()?;
        let found = found.map(|row| match self.journal.get(user) {
            Some(&(current_count, last_refresh)) => Quota { current_count, last_refresh, ..row },
            None => row,
        });
        if let Some(row) = found {
            self.remember(user, row);
        }
        Ok(found)
    }

    /// Takes note of a row that was just written with new limits.
    pub(crate) fn replace(
        &mut self,
        connection: &Connection,
        user: &UserId,
        row: Quota,
    ) -> rusqlite::Result<()> {
        self.changed.push(user.clone());
        self.remember(user, row);
        // Asked before: with the last count gone the journal still says what it did, and would be read again.
        let is_behind = self.journal.is_behind();
        // A count under the old limits must not be folded any more, since it may be above the new ones.
        self.journal.drop_folding(user);
        if is_behind {
            self.append(connection, &[(user, row)])?;
        }
        self.journal.fold_if_due(connection, 1)
    }

    /// Takes note of a row that was just deleted.
    pub(crate) fn remove(&mut self, user: &UserId) {
        self.rows.remove(user);
    }

    /// Saves changed rows in the transaction under way.
    pub(crate) fn save(
        &mut self,
        connection: &Connection,
        changed: &[(&UserId, Quota)],
    ) -> rusqlite::Result<()> {
        for (user, row) in changed {
            self.changed.push((*user).clone());
            match self.rows.get_mut(*user) {
                Some(known) => *known = *row,
                None => self.remember(user, *row),
            }
        }
        if changed.len() > IN_PLACE_MAX || self.journal.is_behind() {
            self.append(connection, changed)?;
        } else {
            let mut save = connection.prepare_cached(SAVE)?;
            for (user, row) in changed {
                save.execute(params![user.as_str(), row.current_count, row.last_refresh.as_micros()])?;
            }
        }
        self.journal.fold_if_due(connection, changed.len())
    }

    /// Brings the table up to date by so many rows, in the transaction under way.
    pub(crate) fn fold(&mut self, connection: &Connection, most: usize) -> rusqlite::Result<()> {
        self.journal.fold(connection, most)
    }

    /// Brings the table up to date for one turn, with what the journal had at the first (see [`Journal::fold_for_a_turn`]).
    pub(crate) fn fold_for_a_turn(
        &mut self,
        connection: &Connection,
        target: &mut Option<u64>,
        turn: &Turn,
    ) -> rusqlite::Result<ControlFlow<()>> {
        self.journal.fold_for_a_turn(connection, target, turn)
    }

    /// Whether the table is behind.
    pub(crate) fn is_behind(&self) -> bool {
        self.journal.is_behind()
    }

    fn remember(&mut self, user: &UserId, row: Quota) {
        if self.rows.len() >= ROWS_MAX && !self.rows.contains_key(user) {
            self.rows.clear();
        }
        self.rows.insert(user.clone(), row);
    }

    fn append(&mut self, connection: &Connection, changed: &[(&UserId, Quota)]) -> rusqlite::Result<()> {
        let mut entries = Vec::with_capacity(changed.len() * 32);
        for (user, row) in changed {
            self.journal.add((*user).clone(), (row.current_count, row.last_refresh), &mut entries);
        }
        self.journal.append(connection, &entries)
    }
}

fn read_row(row: &Row<'_>) -> rusqlite::Result<Quota> {
    let limits = QuotaLimits::new(row.get(0)?, row.get(1)?).map_err(fault)?;
    Ok(Quota { limits, current_count: row.get(2)?, last_refresh: Timestamp::from_micros(row.get(3)?) })
}

#[cfg(test)]
mod tests;
