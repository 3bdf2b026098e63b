//! Quota rows as the writer thread knows them, and the journal that makes saving many of them cheap.
//!
//! A batch of sends to many users would change a page of `rate_limit_store` for almost every send, and a commit
//! writes whole pages. So the counts of such a batch are appended together, as one row of `quota_journal`, in the same
//! commit as its messages, and folded into the table later: a second later under load, at once when the writer is
//! idle. Small batches are saved in place. A crash loses nothing: opening the engine folds what the journal holds.
//!
//! Only the writer thread reads and writes here, in the order of its transactions. When one of them is undone, what
//! is remembered is forgotten and read again.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use rusqlite::{Connection, OptionalExtension, Row, params};
use weir_core::quota::{Limits, Quota};
use weir_core::{Timestamp, UserId};

use crate::error::fault;

const FIND: &str = "
    SELECT rate_limit, time_window, current_count, last_refresh_time
    FROM rate_limit_store WHERE user_id = ?1";
const SAVE: &str = "
    UPDATE rate_limit_store SET current_count = ?2, last_refresh_time = ?3 WHERE user_id = ?1";
const APPEND: &str = "INSERT INTO quota_journal (entries) VALUES (?1)";
const JOURNAL: &str = "SELECT id, entries FROM quota_journal ORDER BY id";
const CLEAR: &str = "DELETE FROM quota_journal WHERE id <= ?1";
/// Changes when another connection, such as a person's shell, has written.
const DATA_VERSION: &str = "PRAGMA data_version";

/// So few changed rows are saved in place.
const IN_PLACE_MAX: usize = 8;
/// How long counts stay in the journal under load.
const FOLD_AFTER: Duration = Duration::from_secs(1);
/// How many users' counts may stay there before they are folded.
pub(crate) const PENDING_MAX: usize = 16_384;
/// How many are folded for every one that is saved: more than one, so that it comes to an end.
const FOLDED_PER_ROW: usize = 2;
/// How many are folded at least, so that small batches bring it to an end too.
const FOLDED_MIN: usize = 64;
/// How many rows are remembered. When there are more, all are forgotten: the table has them.
pub(crate) const ROWS_MAX: usize = 32_768;

/// What the writer thread knows of quota rows.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    rows: HashMap<UserId, Quota>,
    /// The counts of the last batches, which only the journal has.
    pending: HashMap<UserId, Count>,
    pending_since: Option<Instant>,
    /// Those that are on their way into the table, in its order; older than all that are pending.
    folding: BTreeMap<UserId, Count>,
    /// The last rows of the journal with counts that are pending, and with counts that are on their way.
    pending_until: i64,
    folding_until: i64,
    /// What the rows were read under; none before the first look.
    data_version: Option<i64>,
    /// Whether `pending` is what the journal says.
    is_loaded: bool,
}

/// What changes in a row.
type Count = (u32, Timestamp);

impl Counts {
    /// Reads what the journal says, unless it is known, and forgets rows that somebody else may have changed.
    pub(crate) fn refresh(&mut self, connection: &Connection) -> rusqlite::Result<()> {
        let version = connection.prepare_cached(DATA_VERSION)?.query_row([], |row| row.get(0))?;
        if self.data_version.replace(version) != Some(version) {
            self.rows.clear();
        }
        if self.is_loaded {
            return Ok(());
        }
        let mut journal = connection.prepare_cached(JOURNAL)?;
        let mut batches = journal.query([])?;
        while let Some(batch) = batches.next()? {
            self.pending_until = batch.get(0)?;
            let entries = batch.get_ref(1)?.as_blob()?;
            self.pending
                .extend(decode(entries).ok_or_else(|| fault("quota_journal holds a row that is cut off"))?);
        }
        if !self.pending.is_empty() {
            self.pending_since = Some(Instant::now());
        }
        self.is_loaded = true;
        Ok(())
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
        let found = found.map(|row| match self.pending.get(user).or_else(|| self.folding.get(user)) {
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
        // A count under the old limits must not be folded any more, since it may be above the new ones. One that was folded
        // is in the journal until all beside it are.
        let is_behind = self.is_behind();
        self.folding.remove(user);
        // Asked before: with the last count gone the journal still says what it did, and would be read again.
        if is_behind {
            self.append(connection, &[(user, row)])?;
        }
        self.fold_if_due(connection, 1)
    }

    /// Takes note of a row that was just deleted. What the journal still says of it changes nothing.
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
        if changed.len() > IN_PLACE_MAX || self.is_behind() {
            self.append(connection, changed)?;
        } else {
            let mut save = connection.prepare_cached(SAVE)?;
            for (user, row) in changed {
                save.execute(params![user.as_str(), row.current_count, row.last_refresh.as_micros()])?;
            }
        }
        self.fold_if_due(connection, changed.len())
    }

    /// Folds a part when a fold is under way, or counts have waited for long, or there are many. More are folded than were
    /// changed, so that every fold ends, and what waits stays within its bound.
    fn fold_if_due(&mut self, connection: &Connection, changed: usize) -> rusqlite::Result<()> {
        let is_old = self.pending_since.is_some_and(|since| since.elapsed() >= FOLD_AFTER);
        if !self.folding.is_empty() || is_old || self.pending.len() > PENDING_MAX {
            self.fold(connection, (changed * FOLDED_PER_ROW).max(FOLDED_MIN))?;
        }
        Ok(())
    }

    /// Brings the table up to date by so many rows, in the transaction under way.
    pub(crate) fn fold(&mut self, connection: &Connection, most: usize) -> rusqlite::Result<()> {
        if self.folding.is_empty() {
            self.folding = std::mem::take(&mut self.pending).into_iter().collect();
            self.folding_until = self.pending_until;
            self.pending_since = None;
        }
        let mut save = connection.prepare_cached(SAVE)?;
        for _ in 0..most {
            let Some((user, (count, last_refresh))) = self.folding.pop_first() else { break };
            save.execute(params![user.as_str(), count, last_refresh.as_micros()])?;
        }
        if self.folding.is_empty() {
            connection.prepare_cached(CLEAR)?.execute([self.folding_until])?;
        }
        Ok(())
    }

    /// Whether the table is behind.
    pub(crate) fn is_behind(&self) -> bool {
        !self.is_loaded || !self.pending.is_empty() || !self.folding.is_empty()
    }

    fn remember(&mut self, user: &UserId, row: Quota) {
        if self.rows.len() >= ROWS_MAX && !self.rows.contains_key(user) {
            self.rows.clear();
        }
        self.rows.insert(user.clone(), row);
    }

    fn append(&mut self, connection: &Connection, changed: &[(&UserId, Quota)]) -> rusqlite::Result<()> {
        connection.prepare_cached(APPEND)?.execute([encode(changed)])?;
        self.pending_until = connection.last_insert_rowid();
        let counts =
            changed.iter().map(|(user, row)| ((*user).clone(), (row.current_count, row.last_refresh)));
        self.pending.extend(counts);
        self.pending_since.get_or_insert_with(Instant::now);
        Ok(())
    }
}

/// For each row: the length of the user's id (2 bytes), the id, the count (4) and the last refresh (8), little-endian.
fn encode(changed: &[(&UserId, Quota)]) -> Vec<u8> {
    let mut entries = Vec::with_capacity(changed.len() * 32);
    for (user, row) in changed {
        let user = user.as_str().as_bytes();
        // 255 characters are at most 1,020 bytes.
        let length = u16::try_from(user.len()).expect("the id of a user is short");
        entries.extend_from_slice(&length.to_le_bytes());
        entries.extend_from_slice(user);
        entries.extend_from_slice(&row.current_count.to_le_bytes());
        entries.extend_from_slice(&row.last_refresh.as_micros().to_le_bytes());
    }
    entries
}

/// None when the bytes are not what [`encode`] writes.
fn decode(mut entries: &[u8]) -> Option<Vec<(UserId, Count)>> {
    let mut counts = Vec::new();
    while !entries.is_empty() {
        let (length, rest) = entries.split_first_chunk()?;
        let (user, rest) = rest.split_at_checked(usize::from(u16::from_le_bytes(*length)))?;
        let (count, rest) = rest.split_first_chunk()?;
        let (last_refresh, rest) = rest.split_first_chunk()?;
        let user = UserId::parse(str::from_utf8(user).ok()?).ok()?;
        let last_refresh = Timestamp::from_micros(i64::from_le_bytes(*last_refresh));
        counts.push((user, (u32::from_le_bytes(*count), last_refresh)));
        entries = rest;
    }
    Some(counts)
}

fn read_row(row: &Row<'_>) -> rusqlite::Result<Quota> {
    let limits = Limits::new(row.get(0)?, row.get(1)?).map_err(fault)?;
    Ok(Quota { limits, current_count: row.get(2)?, last_refresh: Timestamp::from_micros(row.get(3)?) })
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let last: Vec<UserId> = counts.folding.keys().cloned().collect();
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
            assert!(counts.pending.len() <= PENDING_MAX + 512 && counts.folding.len() <= PENDING_MAX + 512);
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
            assert!(counts.pending.len() <= PENDING_MAX + 1);
        }
    }

    #[test]
    fn a_cut_off_journal_is_a_fault_and_not_a_wrong_count() {
        let connection = database();
        connection.execute("INSERT INTO quota_journal (entries) VALUES (x'0500616c')", []).unwrap();
        assert!(Counts::default().refresh(&connection).is_err());
    }
}
