//! What keys stand for, as the writer thread knows them, and the journal that makes remembering many of them cheap.
//!
//! Callers draw keys at random, so the index of `idempotency_record` would change a page for almost every submission, and
//! a commit writes whole pages. So the keys of a large batch are appended together, as one row of `idempotency_journal`, in
//! the same commit as its requests, and folded into the table later: in the order of keys, so that one page takes several,
//! and a few with each batch, so that nobody waits for many. Small batches are saved in place. A crash loses nothing: what
//! the journal holds is read before the next submission.
//!
//! Only the writer thread reads and writes here, in the order of its transactions. When one of them is undone, what is
//! remembered is forgotten and read again.

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use rusqlite::{CachedStatement, Connection, ErrorCode, OptionalExtension, ToSql, params};
use weir_core::request::canonical::Fingerprint;
use weir_core::request::idempotency::{Record, TenantKey};
use weir_core::{IdempotencyKey, RequestId, TenantId, Timestamp};

use super::read_id;
use crate::error::fault;
use crate::rows::Insert;

const FIND: &str = "
    SELECT request_id, payload_hash, expires_at FROM idempotency_record WHERE tenant_id = ?1 AND idempotency_key = ?2";
pub(crate) static INSERT: LazyLock<Insert> = LazyLock::new(|| {
    let into = "INSERT OR FAIL INTO idempotency_record (tenant_id, idempotency_key, payload_hash, request_id, expires_at)";
    Insert::new(into, 5)
});
/// A key that is free again gets a row behind all others, so that rows stay more or less in the order in which they expire.
const REPLACE: &str = "
    INSERT OR REPLACE INTO idempotency_record (tenant_id, idempotency_key, payload_hash, request_id, expires_at)
    VALUES (?1, ?2, ?3, ?4, ?5)";
const APPEND: &str = "INSERT INTO idempotency_journal (entries) VALUES (?1)";
const JOURNAL: &str = "SELECT id, entries FROM idempotency_journal ORDER BY id";
const CLEAR: &str = "DELETE FROM idempotency_journal WHERE id <= ?1";

/// The keys of so few submissions are saved in place.
const IN_PLACE_MAX: usize = 8;
/// How many keys the journal has before they are folded: the more, the more of them share a page.
pub(crate) const FOLD_AT: usize = 65_536;
/// How long they stay there under little load.
const FOLD_AFTER: Duration = Duration::from_secs(5);
/// How many are folded for every new one: more than one, so that it comes to an end.
const FOLDED_PER_KEY: usize = 2;

/// What the writer thread knows of keys that are not in the table.
#[derive(Debug, Default)]
pub(crate) struct Keys {
    /// Those of the last batches.
    pending: InOrder,
    pending_since: Option<Instant>,
    /// Those that are on their way into the table; older than all that are pending.
    folding: InOrder,
    /// The last rows of the journal with keys that are pending, and with keys that are on their way.
    pending_until: i64,
    folding_until: i64,
    /// Whether this is what the journal says.
    is_loaded: bool,
}

/// Keys in the order of the table's index.
#[derive(Debug, Default)]
struct InOrder {
    /// By tenant first, so that two keys are told apart by one comparison.
    tenants: BTreeMap<TenantId, BTreeMap<IdempotencyKey, Record>>,
    count: usize,
}

impl InOrder {
    fn get(&self, tenant: &TenantId, key: &IdempotencyKey) -> Option<&Record> {
        self.tenants.get(tenant)?.get(key)
    }

    fn insert(&mut self, tenant: &TenantId, key: IdempotencyKey, record: Record) {
        if !self.tenants.contains_key(tenant) {
            self.tenants.insert(tenant.clone(), BTreeMap::new());
        }
        let replaced = self.tenants.get_mut(tenant).and_then(|keys| keys.insert(key, record));
        self.count += usize::from(replaced.is_none());
    }

    /// Takes the first ones away.
    fn take(&mut self, most: usize) -> Vec<(TenantKey, Record)> {
        let mut taken = Vec::with_capacity(most.min(self.count));
        while taken.len() < most
            && let Some(mut tenant) = self.tenants.first_entry()
        {
            match tenant.get_mut().pop_first() {
                Some((key, record)) => {
                    taken.push((TenantKey { tenant: tenant.key().clone(), key }, record));
                    self.count -= 1;
                }
                None => drop(tenant.remove()),
            }
        }
        taken
    }
}

/// The keys of one batch.
pub(crate) struct Desk<'a> {
    keys: &'a mut Keys,
    find: CachedStatement<'a>,
    replace: CachedStatement<'a>,
    /// What the journal is told, unless they are saved in place.
    entries: Option<Vec<u8>>,
    count: usize,
}

impl Keys {
    /// Reads what the journal says, unless it is known, and begins a batch of so many submissions.
    pub(super) fn batch<'a>(
        &'a mut self,
        connection: &'a Connection,
        submissions: usize,
    ) -> rusqlite::Result<Desk<'a>> {
        self.load(connection)?;
        let is_small = submissions <= IN_PLACE_MAX && !self.is_behind();
        Ok(Desk {
            find: connection.prepare_cached(FIND)?,
            replace: connection.prepare_cached(REPLACE)?,
            entries: (!is_small).then(Vec::new),
            count: 0,
            keys: self,
        })
    }

    /// Forgets everything: a transaction that told of it was undone.
    pub(crate) fn forget(&mut self) {
        *self = Self::default();
    }

    /// Whether the table is behind.
    pub(crate) fn is_behind(&self) -> bool {
        !self.is_loaded || self.pending.count + self.folding.count > 0
    }

    /// Brings the table up to date by so many keys, in the transaction under way.
    pub(crate) fn fold(&mut self, connection: &Connection, most: usize) -> rusqlite::Result<()> {
        self.load(connection)?;
        if self.folding.count == 0 {
            self.folding = std::mem::take(&mut self.pending);
            self.folding_until = self.pending_until;
            self.pending_since = None;
        }
        save(connection, &self.folding.take(most))?;
        if self.folding.count == 0 {
            connection.prepare_cached(CLEAR)?.execute([self.folding_until])?;
        }
        Ok(())
    }

    fn load(&mut self, connection: &Connection) -> rusqlite::Result<()> {
        if self.is_loaded {
            return Ok(());
        }
        let mut journal = connection.prepare_cached(JOURNAL)?;
        let mut batches = journal.query([])?;
        while let Some(batch) = batches.next()? {
            self.pending_until = batch.get(0)?;
            let entries = decode(batch.get_ref(1)?.as_blob()?);
            let entries = entries.ok_or_else(|| fault("idempotency_journal holds a row that is cut off"))?;
            for (TenantKey { tenant, key }, record) in entries {
                self.pending.insert(&tenant, key, record);
            }
        }
        self.pending_since = (self.pending.count > 0).then(Instant::now);
        self.is_loaded = true;
        Ok(())
    }
}

impl Desk<'_> {
    /// What a key stands for.
    pub(super) fn find(
        &mut self,
        tenant: &TenantId,
        key: &IdempotencyKey,
    ) -> rusqlite::Result<Option<Record>> {
        let Keys { pending, folding, .. } = &*self.keys;
        if let Some(record) = pending.get(tenant, key).or_else(|| folding.get(tenant, key)) {
            return Ok(Some(*record));
        }
        let read = |row: &rusqlite::Row<'_>| {
            Ok(Record {
                request_id: read_id(row, 0)?,
                fingerprint: Fingerprint::from_bytes(row.get(1)?),
                expires: Timestamp::from_micros(row.get(2)?),
            })
        };
        self.find.query_row([tenant.as_str(), key.as_str()], read).optional()
    }

    /// Takes note of what a key stands for from now on.
    pub(super) fn remember(
        &mut self,
        tenant: &TenantId,
        key: &IdempotencyKey,
        record: Record,
    ) -> rusqlite::Result<()> {
        self.count += 1;
        match &mut self.entries {
            None => replace(&mut self.replace, tenant, key, &record),
            Some(entries) => {
                encode(entries, tenant, key, &record);
                self.keys.pending.insert(tenant, key.clone(), record);
                Ok(())
            }
        }
    }

    /// Ends the batch, in the transaction under way.
    pub(super) fn finish(self, connection: &Connection) -> rusqlite::Result<()> {
        let Self { keys, entries, count, .. } = self;
        if let Some(entries) = entries.filter(|entries| !entries.is_empty()) {
            connection.prepare_cached(APPEND)?.execute([entries])?;
            keys.pending_until = connection.last_insert_rowid();
            keys.pending_since.get_or_insert_with(Instant::now);
        }
        let is_old = keys.pending_since.is_some_and(|since| since.elapsed() >= FOLD_AFTER);
        if keys.folding.count > 0 || is_old || keys.pending.count >= FOLD_AT {
            keys.fold(connection, count.max(1) * FOLDED_PER_KEY)?;
        }
        Ok(())
    }
}

/// Saves keys in the table.
fn save(connection: &Connection, keys: &[(TenantKey, Record)]) -> rusqlite::Result<()> {
    let inserted = INSERT.prepare(connection)?.insert(keys, |(TenantKey { tenant, key }, record), row| {
        with_values(tenant, key, record, |values| row.bind(values))
    });
    match inserted {
        // A key that was free again, or a journal that was read again: both are rare.
        Err(error) if error.sqlite_error_code() == Some(ErrorCode::ConstraintViolation) => {
            let mut statement = connection.prepare_cached(REPLACE)?;
            keys.iter().try_for_each(|(TenantKey { tenant, key }, record)| {
                replace(&mut statement, tenant, key, record)
            })
        }
        inserted => inserted,
    }
}

fn replace(
    statement: &mut CachedStatement<'_>,
    tenant: &TenantId,
    key: &IdempotencyKey,
    record: &Record,
) -> rusqlite::Result<()> {
    with_values(tenant, key, record, |values| statement.execute(values).map(drop))
}

/// Calls `take` with the values of a row.
fn with_values(
    tenant: &TenantId,
    key: &IdempotencyKey,
    record: &Record,
    take: impl FnOnce(&[&dyn ToSql]) -> rusqlite::Result<()>,
) -> rusqlite::Result<()> {
    let Record { fingerprint, request_id, expires } = record;
    take(params![
        tenant.as_str(),
        key.as_str(),
        fingerprint.as_bytes(),
        request_id.to_string(),
        expires.as_micros(),
    ])
}

/// The tenant and its key, each after its length (2 bytes), what was asked for (32), the request's id (16) and when the key
/// is free again (8); numbers are little-endian.
fn encode(entries: &mut Vec<u8>, tenant: &TenantId, key: &IdempotencyKey, record: &Record) {
    for name in [tenant.as_str(), key.as_str()] {
        // 255 characters are at most 1,020 bytes.
        let length = u16::try_from(name.len()).expect("names are short");
        entries.extend_from_slice(&length.to_le_bytes());
        entries.extend_from_slice(name.as_bytes());
    }
    entries.extend_from_slice(record.fingerprint.as_bytes());
    entries.extend_from_slice(record.request_id.as_uuid().as_bytes());
    entries.extend_from_slice(&record.expires.as_micros().to_le_bytes());
}

/// None when the bytes are not what [`encode`] writes.
fn decode(mut entries: &[u8]) -> Option<Vec<(TenantKey, Record)>> {
    fn name<'e>(entries: &mut &'e [u8]) -> Option<&'e str> {
        let (length, rest) = entries.split_first_chunk()?;
        let (name, rest) = rest.split_at_checked(usize::from(u16::from_le_bytes(*length)))?;
        *entries = rest;
        str::from_utf8(name).ok()
    }
    let mut keys = Vec::new();
    while !entries.is_empty() {
        let tenant = TenantId::parse(name(&mut entries)?).ok()?;
        let key = IdempotencyKey::parse(name(&mut entries)?).ok()?;
        let (fingerprint, rest) = entries.split_first_chunk()?;
        let (request_id, rest) = rest.split_first_chunk()?;
        let (expires, rest) = rest.split_first_chunk()?;
        let record = Record {
            fingerprint: Fingerprint::from_bytes(*fingerprint),
            request_id: RequestId::from_uuid(uuid::Uuid::from_bytes(*request_id)),
            expires: Timestamp::from_micros(i64::from_le_bytes(*expires)),
        };
        keys.push((TenantKey { tenant, key }, record));
        entries = rest;
    }
    Some(keys)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn database() -> Connection {
        let mut connection = Connection::open_in_memory().unwrap();
        crate::migrate::run(&mut connection).unwrap();
        connection
    }

    fn tenant() -> TenantId {
        TenantId::parse("t").unwrap()
    }

    /// Not in the order in which they come.
    fn key(n: usize) -> IdempotencyKey {
        IdempotencyKey::parse(format!("k{:06}", n * 7_919 % 1_000_003)).unwrap()
    }

    fn find(desk: &mut Desk<'_>, n: usize) -> Option<Record> {
        desk.find(&tenant(), &key(n)).unwrap()
    }

    fn record(n: usize) -> Record {
        let id = RequestId::new(Timestamp::from_seconds(9), [u8::try_from(n % 251).unwrap(); 10]);
        Record::new(Fingerprint::from_bytes([7; 32]), id, Timestamp::from_seconds(9))
    }

    /// One batch of new keys.
    fn remember(keys: &mut Keys, connection: &Connection, numbers: std::ops::Range<usize>) {
        let mut desk = keys.batch(connection, numbers.len()).unwrap();
        for n in numbers {
            assert_eq!(find(&mut desk, n), None, "{n}");
            desk.remember(&tenant(), &key(n), record(n)).unwrap();
            assert_eq!(find(&mut desk, n), Some(record(n)), "{n}");
        }
        desk.finish(connection).unwrap();
    }

    fn all_are_known(keys: &mut Keys, connection: &Connection, count: usize) {
        let mut desk = keys.batch(connection, 1).unwrap();
        for n in 0..count {
            assert_eq!(find(&mut desk, n), Some(record(n)), "{n}");
        }
    }

    fn rows(connection: &Connection, table: &str) -> usize {
        connection.query_row(&format!("SELECT count(*) FROM {table}"), [], |row| row.get(0)).unwrap()
    }

    #[test]
    fn a_small_batch_is_in_the_table_at_once() {
        let (connection, mut keys) = (database(), Keys::default());
        remember(&mut keys, &connection, 0..IN_PLACE_MAX);
        assert_eq!((rows(&connection, "idempotency_record"), keys.is_behind()), (IN_PLACE_MAX, false));
        all_are_known(&mut keys, &connection, IN_PLACE_MAX);
    }

    #[test]
    fn a_large_batch_is_known_at_once_and_in_the_table_after_a_fold() {
        let (connection, mut keys) = (database(), Keys::default());
        remember(&mut keys, &connection, 0..20);
        // A small batch behind it goes the same way.
        remember(&mut keys, &connection, 20..22);
        assert_eq!(
            (rows(&connection, "idempotency_record"), rows(&connection, "idempotency_journal")),
            (0, 2)
        );
        all_are_known(&mut keys, &connection, 22);
        keys.fold(&connection, 21).unwrap();
        assert_eq!(
            (rows(&connection, "idempotency_record"), rows(&connection, "idempotency_journal")),
            (21, 2)
        );
        all_are_known(&mut keys, &connection, 22);
        keys.fold(&connection, 1).unwrap();
        assert_eq!(
            (rows(&connection, "idempotency_record"), rows(&connection, "idempotency_journal")),
            (22, 0)
        );
        assert!(!keys.is_behind());
        all_are_known(&mut keys, &connection, 22);
    }

    #[test]
    fn what_comes_while_others_are_folded_stays_in_the_journal() {
        let (connection, mut keys) = (database(), Keys::default());
        remember(&mut keys, &connection, 0..20);
        keys.fold(&connection, 5).unwrap();
        remember(&mut keys, &connection, 20..30);
        // Two for each of the ten.
        assert_eq!(
            (rows(&connection, "idempotency_record"), rows(&connection, "idempotency_journal")),
            (20, 1)
        );
        all_are_known(&mut keys, &connection, 30);
        let mut restarted = Keys::default();
        all_are_known(&mut restarted, &connection, 30);
    }

    #[test]
    fn many_are_folded_as_they_come() {
        let (connection, mut keys) = (database(), Keys::default());
        connection.execute_batch("BEGIN").unwrap();
        let count = FOLD_AT * 2;
        for batch in (0..count).step_by(1_024) {
            let mut desk = keys.batch(&connection, 1_024).unwrap();
            for n in batch..batch + 1_024 {
                desk.remember(&tenant(), &key(n), record(n)).unwrap();
            }
            desk.finish(&connection).unwrap();
        }
        assert!(keys.pending.count < FOLD_AT && rows(&connection, "idempotency_record") >= FOLD_AT);
        assert!(keys.pending.count + keys.folding.count <= FOLD_AT, "no more than can be held");
    }

    #[test]
    fn what_is_forgotten_is_read_back_from_table_and_journal() {
        let (connection, mut keys) = (database(), Keys::default());
        remember(&mut keys, &connection, 0..20);
        keys.fold(&connection, 5).unwrap();
        keys.forget();
        all_are_known(&mut keys, &connection, 20);
        keys.fold(&connection, 20).unwrap();
        assert_eq!(
            (rows(&connection, "idempotency_record"), rows(&connection, "idempotency_journal")),
            (20, 0)
        );
    }

    #[test]
    fn a_key_that_is_free_again_stands_for_the_later_request() {
        let (connection, mut keys) = (database(), Keys::default());
        remember(&mut keys, &connection, 0..20);
        keys.fold(&connection, 0).unwrap();
        let mut desk = keys.batch(&connection, 1).unwrap();
        desk.remember(&tenant(), &key(3), record(100)).unwrap();
        assert_eq!(find(&mut desk, 3), Some(record(100)));
        desk.finish(&connection).unwrap();
        for mut keys in [keys, Keys::default()] {
            while keys.is_behind() {
                keys.fold(&connection, 6).unwrap();
                let mut desk = keys.batch(&connection, 1).unwrap();
                assert_eq!(find(&mut desk, 3), Some(record(100)));
            }
            assert_eq!(rows(&connection, "idempotency_record"), 20);
        }
    }

    #[test]
    fn tenants_do_not_meet_each_others_keys() {
        let (connection, mut keys) = (database(), Keys::default());
        let tenants = ["a", "b"].map(|name| TenantId::parse(name).unwrap());
        let mut desk = keys.batch(&connection, 20).unwrap();
        for n in 0..10 {
            desk.remember(&tenants[n % 2], &key(n / 2), record(n)).unwrap();
        }
        desk.finish(&connection).unwrap();
        for most in [0, 3, 5, 2] {
            keys.fold(&connection, most).unwrap();
            let mut desk = keys.batch(&connection, 1).unwrap();
            for n in 0..10 {
                assert_eq!(desk.find(&tenants[n % 2], &key(n / 2)).unwrap(), Some(record(n)));
            }
            assert_eq!(desk.find(&tenant(), &key(0)).unwrap(), None);
        }
        assert!(!keys.is_behind());
    }

    #[test]
    fn a_cut_off_journal_is_a_fault_and_not_a_free_key() {
        let connection = database();
        connection.execute("INSERT INTO idempotency_journal (entries) VALUES (x'0100740100')", []).unwrap();
        assert!(Keys::default().batch(&connection, 1).is_err());
    }
}
