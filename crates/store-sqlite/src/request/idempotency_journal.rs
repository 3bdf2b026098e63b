//! Idempotency keys and the requests they belong to. Callers choose keys at random, so the keys of a large batch go
//! through `idempotency_journal` (see `journal.rs`), in the same commit as the requests.

use std::sync::LazyLock;
use std::time::Duration;

use rusqlite::{CachedStatement, Connection, ErrorCode, OptionalExtension, ToSql, params};
use weir_core::request::canonical::Fingerprint;
use weir_core::request::idempotency::{IdempotencyRecord, TenantKey};
use weir_core::{IdempotencyKey, RequestId, TenantId, Timestamp};

use super::read_id;
use crate::journal::{IN_PLACE_MAX, Journal, JournaledTable, put_text, take_bytes, take_text};
use crate::multi_insert::MultiInsert;

const FIND: &str = "
    SELECT request_id, payload_hash, expires_at FROM idempotency_record WHERE tenant_id = ?1 AND idempotency_key = ?2";
pub(crate) static INSERT: LazyLock<MultiInsert> = LazyLock::new(|| {
    let into = "INSERT OR FAIL INTO idempotency_record (tenant_id, idempotency_key, payload_hash, request_id, expires_at)";
    MultiInsert::new(into, 5)
});
/// Replaces an expired key by a row with a new, higher id, so that rows stay roughly in the order in which they expire.
const REPLACE: &str = "
    INSERT OR REPLACE INTO idempotency_record (tenant_id, idempotency_key, payload_hash, request_id, expires_at)
    VALUES (?1, ?2, ?3, ?4, ?5)";

/// The journal of `idempotency_record`.
#[derive(Debug, Default)]
pub(crate) struct IdempotencyJournal(Journal<IdempotencyRecords>);

/// The table `idempotency_record`.
#[derive(Debug)]
struct IdempotencyRecords;

impl JournaledTable for IdempotencyRecords {
    type Key = TenantKey;
    type Value = IdempotencyRecord;

    const NAME: &'static str = "idempotency_journal";
    const APPEND: &'static str = "INSERT INTO idempotency_journal (entries) VALUES (?1)";
    const READ: &'static str = "SELECT id, entries FROM idempotency_journal ORDER BY id";
    const CLEAR: &'static str = "DELETE FROM idempotency_journal WHERE id <= ?1";
    const FOLD_AT: usize = 65_536;
    const FOLD_AFTER: Duration = Duration::from_secs(5);

    fn encode(TenantKey { tenant, key }: &TenantKey, record: &IdempotencyRecord, entries: &mut Vec<u8>) {
        put_text(entries, tenant.as_str());
        put_text(entries, key.as_str());
        entries.extend_from_slice(record.fingerprint.as_bytes());
        entries.extend_from_slice(record.request_id.as_uuid().as_bytes());
        entries.extend_from_slice(&record.expires.as_micros().to_le_bytes());
    }

    fn decode(entries: &mut &[u8]) -> Option<(TenantKey, IdempotencyRecord)> {
        let tenant = TenantId::parse(take_text(entries)?).ok()?;
        let key = IdempotencyKey::from_stored(take_text(entries)?).ok()?;
        let record = IdempotencyRecord {
            fingerprint: Fingerprint::from_bytes(take_bytes(entries)?),
            request_id: RequestId::from_uuid(uuid::Uuid::from_bytes(take_bytes(entries)?)),
            expires: Timestamp::from_micros(i64::from_le_bytes(take_bytes(entries)?)),
        };
        Some((TenantKey { tenant, key }, record))
    }

    fn save(connection: &Connection, rows: &[(TenantKey, IdempotencyRecord)]) -> rusqlite::Result<()> {
        save(connection, rows)
    }
}

/// The keys of one batch.
pub(crate) struct KeyBatch<'a> {
    journal: &'a mut Journal<IdempotencyRecords>,
    find: CachedStatement<'a>,
    replace: CachedStatement<'a>,
    /// Entries for the journal, or `None` if the keys are saved in place.
    entries: Option<Vec<u8>>,
    count: usize,
}

impl IdempotencyJournal {
    /// Loads the journal, unless it is loaded, and begins a batch.
    pub(super) fn batch<'a>(
        &'a mut self,
        connection: &'a Connection,
        submissions: usize,
    ) -> rusqlite::Result<KeyBatch<'a>> {
        self.0.load(connection)?;
        let is_small = submissions <= IN_PLACE_MAX && !self.has_unfolded_rows();
        Ok(KeyBatch {
            find: connection.prepare_cached(FIND)?,
            replace: connection.prepare_cached(REPLACE)?,
            entries: (!is_small).then(Vec::new),
            count: 0,
            journal: &mut self.0,
        })
    }

    /// Forgets how to roll back: the transaction was committed.
    pub(crate) fn commit(&mut self) {
        self.0.commit();
    }

    pub(crate) fn savepoint(&self) -> usize {
        self.0.savepoint()
    }

    pub(crate) fn roll_back_to(&mut self, savepoint: usize) {
        self.0.roll_back_to(savepoint);
    }

    pub(crate) fn has_unfolded_rows(&self) -> bool {
        self.0.has_unfolded_rows()
    }

    pub(crate) fn fold(&mut self, connection: &Connection, max: usize) -> rusqlite::Result<()> {
        self.0.fold(connection, max)
    }
}

impl KeyBatch<'_> {
    pub(super) fn find(
        &mut self,
        tenant: &TenantId,
        key: &IdempotencyKey,
    ) -> rusqlite::Result<Option<IdempotencyRecord>> {
        if self.entries.is_some() {
            let tenant_key = TenantKey { tenant: tenant.clone(), key: key.clone() };
            if let Some(record) = self.journal.get(&tenant_key) {
                return Ok(Some(*record));
            }
        }
        let read = |row: &rusqlite::Row<'_>| {
            Ok(IdempotencyRecord {
                request_id: read_id(row, 0)?,
                fingerprint: Fingerprint::from_bytes(row.get(1)?),
                expires: Timestamp::from_micros(row.get(2)?),
            })
        };
        self.find.query_row([tenant.as_str(), key.as_str()], read).optional()
    }

    pub(super) fn put(
        &mut self,
        tenant: &TenantId,
        key: &IdempotencyKey,
        record: IdempotencyRecord,
    ) -> rusqlite::Result<()> {
        self.count += 1;
        match &mut self.entries {
            None => replace(&mut self.replace, tenant, key, &record),
            Some(entries) => {
                let tenant_key = TenantKey { tenant: tenant.clone(), key: key.clone() };
                self.journal.add_row(tenant_key, record, entries);
                Ok(())
            }
        }
    }

    /// Writes the batch to the journal, unless its keys were saved in place.
    pub(super) fn finish(self, connection: &Connection) -> rusqlite::Result<()> {
        let Self { journal, entries, count, .. } = self;
        journal.append(connection, &entries.unwrap_or_default())?;
        journal.fold_if_due(connection, count)
    }
}

/// Saves keys in the table itself.
fn save(connection: &Connection, keys: &[(TenantKey, IdempotencyRecord)]) -> rusqlite::Result<()> {
    let inserted = INSERT.prepare(connection)?.insert(keys, |(TenantKey { tenant, key }, record), row| {
        with_values(tenant, key, record, |values| row.bind(values))
    });
    match inserted {
        // An expired key that is used again, or a journal batch that was folded before a restart: both are rare.
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
    record: &IdempotencyRecord,
) -> rusqlite::Result<()> {
    with_values(tenant, key, record, |values| statement.execute(values).map(drop))
}

/// Calls `use_values` with the values of a row.
fn with_values(
    tenant: &TenantId,
    key: &IdempotencyKey,
    record: &IdempotencyRecord,
    use_values: impl FnOnce(&[&dyn ToSql]) -> rusqlite::Result<()>,
) -> rusqlite::Result<()> {
    let IdempotencyRecord { fingerprint, request_id, expires } = record;
    use_values(params![
        tenant.as_str(),
        key.as_str(),
        fingerprint.as_bytes(),
        request_id.to_string(),
        expires.as_micros(),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOLD_AT: usize = IdempotencyRecords::FOLD_AT;

    fn database() -> Connection {
        let mut connection = Connection::open_in_memory().unwrap();
        crate::migrate::run(&mut connection).unwrap();
        connection
    }

    fn tenant() -> TenantId {
        TenantId::parse("t").unwrap()
    }

    /// Keys that do not sort in the order of `n`.
    fn key(n: usize) -> IdempotencyKey {
        IdempotencyKey::parse(format!("k{:06}", n * 7_919 % 1_000_003)).unwrap()
    }

    fn find(batch: &mut KeyBatch<'_>, n: usize) -> Option<IdempotencyRecord> {
        batch.find(&tenant(), &key(n)).unwrap()
    }

    fn record(n: usize) -> IdempotencyRecord {
        let id = RequestId::new(Timestamp::from_seconds(9), [u8::try_from(n % 251).unwrap(); 10]);
        IdempotencyRecord::new(Fingerprint::from_bytes([7; 32]), id, Timestamp::from_seconds(9))
    }

    /// Puts a batch of new keys.
    fn put_new(keys: &mut IdempotencyJournal, connection: &Connection, numbers: std::ops::Range<usize>) {
        let mut batch = keys.batch(connection, numbers.len()).unwrap();
        for n in numbers {
            assert_eq!(find(&mut batch, n), None, "{n}");
            batch.put(&tenant(), &key(n), record(n)).unwrap();
            assert_eq!(find(&mut batch, n), Some(record(n)), "{n}");
        }
        batch.finish(connection).unwrap();
    }

    fn expect_all(keys: &mut IdempotencyJournal, connection: &Connection, count: usize) {
        let mut batch = keys.batch(connection, 1).unwrap();
        for n in 0..count {
            assert_eq!(find(&mut batch, n), Some(record(n)), "{n}");
        }
    }

    fn rows(connection: &Connection, table: &str) -> usize {
        connection.query_row(&format!("SELECT count(*) FROM {table}"), [], |row| row.get(0)).unwrap()
    }

    #[test]
    fn a_small_batch_is_in_the_table_at_once() {
        let (connection, mut keys) = (database(), IdempotencyJournal::default());
        put_new(&mut keys, &connection, 0..IN_PLACE_MAX);
        assert_eq!(
            (rows(&connection, "idempotency_record"), keys.has_unfolded_rows()),
            (IN_PLACE_MAX, false)
        );
        expect_all(&mut keys, &connection, IN_PLACE_MAX);
    }

    #[test]
    fn a_large_batch_is_found_at_once_and_in_the_table_after_a_fold() {
        let (connection, mut keys) = (database(), IdempotencyJournal::default());
        put_new(&mut keys, &connection, 0..20);
        // A small batch behind it goes into the journal, too.
        put_new(&mut keys, &connection, 20..22);
        assert_eq!(
            (rows(&connection, "idempotency_record"), rows(&connection, "idempotency_journal")),
            (0, 2)
        );
        expect_all(&mut keys, &connection, 22);
        keys.fold(&connection, 21).unwrap();
        assert_eq!(
            (rows(&connection, "idempotency_record"), rows(&connection, "idempotency_journal")),
            (21, 2)
        );
        expect_all(&mut keys, &connection, 22);
        keys.fold(&connection, 1).unwrap();
        assert_eq!(
            (rows(&connection, "idempotency_record"), rows(&connection, "idempotency_journal")),
            (22, 0)
        );
        assert!(!keys.has_unfolded_rows());
        expect_all(&mut keys, &connection, 22);
    }

    #[test]
    fn keys_that_arrive_during_a_fold_stay_in_the_journal() {
        let (connection, mut keys) = (database(), IdempotencyJournal::default());
        put_new(&mut keys, &connection, 0..20);
        keys.fold(&connection, 5).unwrap();
        put_new(&mut keys, &connection, 20..30);
        // Two rows are folded for each of the ten new keys.
        assert_eq!(
            (rows(&connection, "idempotency_record"), rows(&connection, "idempotency_journal")),
            (20, 1)
        );
        expect_all(&mut keys, &connection, 30);
        let mut restarted = IdempotencyJournal::default();
        expect_all(&mut restarted, &connection, 30);
    }

    #[test]
    fn many_are_folded_as_they_come() {
        let (connection, mut keys) = (database(), IdempotencyJournal::default());
        connection.execute_batch("BEGIN").unwrap();
        let count = FOLD_AT * 2;
        for first in (0..count).step_by(1_024) {
            let mut batch = keys.batch(&connection, 1_024).unwrap();
            for n in first..first + 1_024 {
                batch.put(&tenant(), &key(n), record(n)).unwrap();
            }
            batch.finish(&connection).unwrap();
        }
        let (pending, folding) = keys.0.sizes();
        assert!(pending < FOLD_AT && rows(&connection, "idempotency_record") >= FOLD_AT);
        assert!(pending + folding <= FOLD_AT, "unfolded keys stay within the bound");
    }

    #[test]
    fn keys_of_a_rolled_back_batch_are_free_and_the_others_are_found() {
        let (connection, mut keys) = (database(), IdempotencyJournal::default());
        put_new(&mut keys, &connection, 0..20);
        keys.fold(&connection, 5).unwrap();
        keys.commit();
        connection.execute_batch("BEGIN").unwrap();
        // This batch also folds the remaining keys.
        put_new(&mut keys, &connection, 20..40);
        connection.execute_batch("ROLLBACK").unwrap();
        keys.roll_back_to(0);
        assert_eq!(keys.0.sizes(), (0, 15));
        expect_all(&mut keys, &connection, 20);
        assert_eq!(find(&mut keys.batch(&connection, 1).unwrap(), 20), None);
        keys.fold(&connection, 20).unwrap();
        assert_eq!(
            (rows(&connection, "idempotency_record"), rows(&connection, "idempotency_journal")),
            (20, 0)
        );
    }

    #[test]
    fn a_key_that_is_used_again_belongs_to_the_later_request() {
        let (connection, mut keys) = (database(), IdempotencyJournal::default());
        put_new(&mut keys, &connection, 0..20);
        keys.fold(&connection, 0).unwrap();
        let mut batch = keys.batch(&connection, 1).unwrap();
        batch.put(&tenant(), &key(3), record(100)).unwrap();
        assert_eq!(find(&mut batch, 3), Some(record(100)));
        batch.finish(&connection).unwrap();
        for mut keys in [keys, IdempotencyJournal::default()] {
            while keys.has_unfolded_rows() {
                keys.fold(&connection, 6).unwrap();
                let mut batch = keys.batch(&connection, 1).unwrap();
                assert_eq!(find(&mut batch, 3), Some(record(100)));
            }
            assert_eq!(rows(&connection, "idempotency_record"), 20);
        }
    }

    #[test]
    fn tenants_do_not_share_keys() {
        let (connection, mut keys) = (database(), IdempotencyJournal::default());
        let tenants = ["a", "b"].map(|name| TenantId::parse(name).unwrap());
        let mut batch = keys.batch(&connection, 20).unwrap();
        for n in 0..10 {
            batch.put(&tenants[n % 2], &key(n / 2), record(n)).unwrap();
        }
        batch.finish(&connection).unwrap();
        for max in [0, 3, 5, 2] {
            keys.fold(&connection, max).unwrap();
            let mut batch = keys.batch(&connection, 1).unwrap();
            for n in 0..10 {
                assert_eq!(batch.find(&tenants[n % 2], &key(n / 2)).unwrap(), Some(record(n)));
            }
            assert_eq!(batch.find(&tenant(), &key(0)).unwrap(), None);
        }
        assert!(!keys.has_unfolded_rows());
    }

    #[test]
    fn a_truncated_journal_is_an_error_and_not_a_free_key() {
        let connection = database();
        connection.execute("INSERT INTO idempotency_journal (entries) VALUES (x'0100740100')", []).unwrap();
        assert!(IdempotencyJournal::default().batch(&connection, 1).is_err());
    }
}
