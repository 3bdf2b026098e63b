//! Quota rows as the writer thread knows them. The counts of a batch of sends to many users go through `quota_journal`
//! (see `journal.rs`), in the same commit as its messages.
//!
//! Only the writer thread reads and writes here, in the order of its transactions. When one of them is undone, what
//! is remembered is forgotten and read again.

use std::collections::HashMap;
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, Row, params};
use weir_core::quota::{Limits, Quota};
use weir_core::{Timestamp, UserId};

use crate::error::fault;
use crate::journal::{IN_PLACE_MAX, Journal, JournaledTable, put_text, take_bytes, take_text};

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
pub(crate) struct Counts {
    rows: HashMap<UserId, Quota>,
    journal: Journal<QuotaCounts>,
    /// What the rows were read under; none before the first look.
    data_version: Option<i64>,
}

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

impl Counts {
    /// Reads the journal, unless it is known, and forgets rows that somebody else may have changed.
    pub(crate) fn refresh(&mut self, connection: &Connection) -> rusqlite::Result<()> {
        let version = connection.prepare_cached(DATA_VERSION)?.query_row([], |row| row.get(0))?;
        if self.data_version.replace(version) != Some(version) {
            self.rows.clear();
        }
        self.journal.load(connection)
    }

    /// Forgets everything: a transaction that told of it was undone.
    pub(crate) fn forget(&mut self) {
        *self = Self::default();
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
    let limits = Limits::new(row.get(0)?, row.get(1)?).map_err(fault)?;
    Ok(Quota { limits, current_count: row.get(2)?, last_refresh: Timestamp::from_micros(row.get(3)?) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PENDING_MAX: usize = QuotaCounts::FOLD_AT;

    fn database() -> Connection {
        let mut connection = Connection::open_in_memory().unwrap();
        crate::migrate::run(&mut connection).unwrap();
        for n in 0..20 {
            let insert = "INSERT INTO rate_limit_store VALUES (?1, 100, 1, 0, 0)";
            connection.execute(insert, [format!("user-{n}")]).unwrap();
        }
        connection
    }

    fn loaded(connection: &Connection) -> Counts {
        let mut counts = Counts::default();
        counts.refresh(connection).unwrap();
        counts
    }

    fn users(count: usize) -> Vec<UserId> {
        (0..count).map(|n| UserId::parse(format!("user-{n}")).unwrap()).collect()
    }

    /// One more for each of the users.
    fn count(counts: &mut Counts, connection: &Connection, users: &[UserId]) {
        let mut changed = Vec::new();
        for user in users {
            let mut row = counts.find(connection, user).unwrap().unwrap();
            row.current_count += 1;
            changed.push((user, row));
        }
        counts.save(connection, &changed).unwrap();
    }

    fn in_table(connection: &Connection, user: &str) -> u32 {
        let select = "SELECT current_count FROM rate_limit_store WHERE user_id = ?1";
        connection.query_row(select, [user], |row| row.get(0)).unwrap()
    }

    #[test]
    fn a_small_batch_is_in_the_table_at_once() {
        let connection = database();
        let mut counts = loaded(&connection);
        count(&mut counts, &connection, &users(2));
        assert_eq!(in_table(&connection, "user-1"), 1);
        assert!(!counts.is_behind());
    }

    #[test]
    fn a_large_batch_is_counted_at_once_and_in_the_table_after_a_fold() {
        let connection = database();
        let mut counts = loaded(&connection);
        count(&mut counts, &connection, &users(20));
        // A small batch behind it waits for the same fold: what the journal says last is what counts.
        count(&mut counts, &connection, &users(1));
        assert_eq!(in_table(&connection, "user-0"), 0);
        assert_eq!(counts.find(&connection, &users(1)[0]).unwrap().unwrap().current_count, 2);
        counts.fold(&connection, usize::MAX).unwrap();
        assert_eq!((in_table(&connection, "user-0"), in_table(&connection, "user-19")), (2, 1));
        assert!(!counts.is_behind());
    }

    #[test]
    fn what_is_forgotten_is_read_back_from_table_and_journal() {
        let connection = database();
        let mut counts = loaded(&connection);
        count(&mut counts, &connection, &users(20));
        counts.forget();
        counts.refresh(&connection).unwrap();
        assert_eq!(counts.find(&connection, &users(3)[2]).unwrap().unwrap().current_count, 1);
        counts.fold(&connection, usize::MAX).unwrap();
        assert_eq!(in_table(&connection, "user-19"), 1);
    }

    #[test]
    fn new_limits_are_not_overwritten_by_an_older_count() {
        let connection = database();
        let mut counts = loaded(&connection);
        count(&mut counts, &connection, &users(20));
        let fresh = Quota::configured(Limits::new(5, 1).unwrap(), Timestamp::from_seconds(9));
        connection
            .execute(
                "UPDATE rate_limit_store SET rate_limit = 5, current_count = 0 WHERE user_id = 'user-0'",
                [],
            )
            .unwrap();
        counts.replace(&connection, &users(1)[0], fresh).unwrap();
        let mut restarted = loaded(&connection);
        restarted.fold(&connection, usize::MAX).unwrap();
        assert_eq!(in_table(&connection, "user-0"), 0);
    }

    #[test]
    fn a_fold_in_parts_loses_nothing_that_comes_between_them() {
        let connection = database();
        let mut counts = loaded(&connection);
        count(&mut counts, &connection, &users(20));
        counts.fold(&connection, 5).unwrap();
        // One that is in the table already, and one that is not.
        let first = UserId::parse("user-0").unwrap();
        let last = UserId::parse("user-9").unwrap();
        assert_eq!((in_table(&connection, "user-0"), in_table(&connection, "user-9")), (1, 0));
        count(&mut counts, &connection, &[first.clone(), last.clone()]);
        for mut counts in [counts, loaded(&connection)] {
            assert_eq!(counts.find(&connection, &first).unwrap().unwrap().current_count, 2);
            assert_eq!(counts.find(&connection, &last).unwrap().unwrap().current_count, 2);
            assert_eq!(counts.find(&connection, &users(19)[18]).unwrap().unwrap().current_count, 1);
        }
    }

    #[test]
    fn new_limits_in_the_middle_of_a_fold_are_not_undone_by_it() {
        let fresh = Quota::configured(Limits::new(5, 1).unwrap(), Timestamp::from_seconds(9));
        // Those that are in the table already, and those that are not.
        for user in ["user-0", "user-9"] {
            let connection = database();
            let mut counts = loaded(&connection);
            (0..9).for_each(|_| count(&mut counts, &connection, &users(20)));
            counts.fold(&connection, 5).unwrap();
            let configure =
                "UPDATE rate_limit_store SET rate_limit = 5, current_count = 0 WHERE user_id = ?1";
            connection.execute(configure, [user]).unwrap();
            counts.replace(&connection, &UserId::parse(user).unwrap(), fresh).unwrap();
            let mut restarted = loaded(&connection);
            while restarted.is_behind() {
                restarted.fold(&connection, 3).unwrap();
            }
            assert_eq!(in_table(&connection, user), 0);
            while counts.is_behind() {
                counts.fold(&connection, 3).unwrap();
            }
            assert_eq!((in_table(&connection, user), in_table(&connection, "user-19")), (0, 9));
        }
    }

    #[test]
    fn new_limits_of_the_last_user_of_a_fold_do_not_bring_old_counts_back() {
        let connection = database();
        let mut counts = loaded(&connection);
        (0..9).for_each(|_| count(&mut counts, &connection, &users(20)));
        counts.fold(&connection, 19).unwrap();
        let last = counts.journal.folding_keys();
        let [last] = last.as_slice() else { panic!("one is left: {last:?}") };
        let fresh = Quota::configured(Limits::new(5, 1).unwrap(), Timestamp::from_seconds(9));
        counts.replace(&connection, last, fresh).unwrap();
        // Saved after it, by another.
        let other = users(20).into_iter().find(|user| user != last).unwrap();
        count(&mut counts, &connection, std::slice::from_ref(&other));
        let mut restarted = loaded(&connection);
        while restarted.is_behind() {
            restarted.fold(&connection, 3).unwrap();
        }
        assert_eq!(in_table(&connection, other.as_str()), 10, "what was counted last is not forgotten");
    }

    #[test]
    fn no_more_rows_are_remembered_than_the_bound() {
        let connection = database();
        let mut counts = loaded(&connection);
        let row = Quota::configured(Limits::new(5, 1).unwrap(), Timestamp::from_seconds(9));
        // As new limits do, which no fold follows.
        for user in users(ROWS_MAX + 10) {
            counts.replace(&connection, &user, row).unwrap();
            assert!(counts.rows.len() <= ROWS_MAX);
        }
    }

    #[test]
    fn no_more_counts_wait_for_the_table_than_the_bound() {
        let connection = database();
        let mut counts = loaded(&connection);
        let row = Quota::configured(Limits::new(5, 1).unwrap(), Timestamp::from_seconds(9));
        let users = users(PENDING_MAX * 4);
        for batch in users.chunks(512) {
            let changed: Vec<_> = batch.iter().map(|user| (user, row)).collect();
            counts.save(&connection, &changed).unwrap();
            let (pending, folding) = counts.journal.sizes();
            assert!(pending <= PENDING_MAX + 512 && folding <= PENDING_MAX + 512);
        }
    }

    #[test]
    fn no_more_counts_wait_for_the_table_than_the_bound_when_limits_are_new() {
        let connection = database();
        let mut counts = loaded(&connection);
        count(&mut counts, &connection, &users(20));
        let row = Quota::configured(Limits::new(5, 1).unwrap(), Timestamp::from_seconds(9));
        for user in users(PENDING_MAX * 2) {
            counts.replace(&connection, &user, row).unwrap();
            assert!(counts.journal.sizes().0 <= PENDING_MAX + 1);
        }
    }

    #[test]
    fn a_cut_off_journal_is_a_fault_and_not_a_wrong_count() {
        let connection = database();
        connection.execute("INSERT INTO quota_journal (entries) VALUES (x'0500616c')", []).unwrap();
        assert!(Counts::default().refresh(&connection).is_err());
    }
}
