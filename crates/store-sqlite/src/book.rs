//! The books in SQLite. Triggers count each row in the transaction that writes it, also when it is edited in a shell. Slots are
//! counted by the writer, a batch at a time: a trigger would cost a bulk load a fifth of its speed.
//!
//! The triggers are checked whenever the engine opens, because a migration that rebuilds a table drops those it has. What they
//! have missed is counted before anything is written.

use std::ffi::c_int;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use rusqlite::{Connection, OptionalExtension, Row, params};
use weir_core::Timestamp;
use weir_store::book::{BookStore, Books, CountedTable, DIFFERENCES_MAX, Recount, RecountDifference};
use weir_store::sale::ProductAudit;
use weir_store::{Error, Result};

use crate::error::classify;
use crate::{ENGINE, Sqlite, quota, sale, slot};

const TABLES: &[CountedTable] = &[
    CountedTable { changing: Some("status, is_cancelled"), ..by("request_record", REQUEST_STATUS) },
    CountedTable {
        name: "request_job",
        amount: "({row}claimable_at IS NOT NULL)",
        changing: Some("claimable_at"),
        ..by("request_record", "''")
    },
    by("queue_message", "{row}topic"),
    CountedTable { amount: "{row}count", ..by("queue_pack", "{row}topic") },
    by("dead_letter", "{row}topic"),
    by(SLOTS, "''"),
    CountedTable {
        amount: "{row}slot_count",
        changing: Some("slot_count"),
        ..by(COUNTERS, "{row}generation || ' ' || {row}config_name")
    },
    by("purchases", "CAST({row}product_id AS TEXT)"),
    by("rate_limit_store", "''"),
];

/// A cancelled request is stored as a failed one.
const REQUEST_STATUS: &str = "CASE WHEN {row}is_cancelled THEN 'CANCELLED' ELSE {row}status END";

const fn by(table: &'static str, kind: &'static str) -> CountedTable {
    CountedTable { name: table, table, kind, amount: "1", changing: None }
}

/// The table that the writer counts itself.
const SLOTS: &str = "rate_limit_event_slot";
/// Counted with each generation: only the one in use is in the books.
const COUNTERS: &str = "rate_limit_window_counter";

const COUNT_SLOTS: &str =
    "UPDATE row_count SET amount = amount + ?1 WHERE table_name = 'rate_limit_event_slot' AND kind = ''";
const COUNTS: &str =
    "SELECT table_name, kind, amount FROM row_count WHERE table_name <> 'rate_limit_window_counter'";
const COUNTED_SLOTS: &str = "
    SELECT coalesce(sum(amount), 0) FROM rate_limit_config k JOIN row_count
        ON table_name = 'rate_limit_window_counter' AND kind = k.generation || ' ' || k.config_name
    WHERE version = (SELECT max(version) FROM rate_limit_config n WHERE n.config_name = k.config_name)";
const LEDGERS: &str = "
    SELECT 'accepted', topic, accepted FROM queue_ledger
    UNION ALL SELECT 'done', topic, done FROM queue_ledger
    UNION ALL SELECT 'discarded', topic, discarded FROM queue_ledger
    UNION ALL SELECT 'request_ledger', 'accepted', accepted FROM request_ledger
    UNION ALL SELECT 'request_ledger', 'purged', purged - erased FROM request_ledger
    UNION ALL SELECT 'request_ledger', 'erased', erased FROM request_ledger";
const PRODUCTS: &str = "SELECT id, sku, initial_stock, sold FROM products ORDER BY id";
const DELETE_EMPTY: &str = "DELETE FROM row_count WHERE amount = 0 AND kind <> ''";
const HAS_EMPTY: &str = "SELECT count(*) FROM row_count WHERE amount = 0 AND kind <> ''";
/// Empty counts that are left alone.
const EMPTY_MAX: i64 = 500;
const CLAIM: &str = "
    INSERT INTO recount (id, claimed_at) VALUES (1, ?1)
    ON CONFLICT (id) DO UPDATE SET claimed_at = ?1 WHERE claimed_at <= ?1 - ?2 OR claimed_at > ?1";
const SAVE: &str = "
    INSERT INTO recount (id, claimed_at, started_at, finished_at, above_maximum) VALUES (1, ?1, ?1, ?2, ?3)
    ON CONFLICT (id) DO UPDATE SET started_at = ?1, finished_at = ?2, above_maximum = ?3";
const LAST: &str = "
    SELECT started_at, finished_at, above_maximum FROM recount WHERE id = 1 AND finished_at IS NOT NULL";
const DIFFERENCES: &str = "SELECT book, what FROM recount_difference ORDER BY number";
const DELETE_DIFFERENCES: &str = "DELETE FROM recount_difference WHERE number > 0";
const INSERT_DIFFERENCE: &str = "INSERT INTO recount_difference (number, book, what) VALUES (?1, ?2, ?3)";

/// Counts tables whose triggers are not as they should be, and creates these. For a large file of an older version that takes a
/// while, once.
pub(crate) fn ensure_counts(connection: &mut Connection) -> rusqlite::Result<()> {
    for table in TABLES {
        let triggers = triggers(table);
        if is_counted(connection, table, &triggers)? {
            continue;
        }
        let transaction = connection.transaction()?;
        transaction.execute("DELETE FROM row_count WHERE table_name = ?1", [table.name])?;
        transaction.execute(
            &format!(
                "INSERT INTO row_count (table_name, kind, amount)
                 SELECT '{}', {}, sum({}) FROM {} GROUP BY 2",
                table.name,
                table.kind_of(""),
                table.amount_of(""),
                table.table
            ),
            [],
        )?;
        let empty =
            "INSERT INTO row_count (table_name, kind, amount) VALUES (?1, '', 0) ON CONFLICT DO NOTHING";
        if table.kind == "''" {
            transaction.execute(empty, [table.name])?;
        }
        for (name, create) in &triggers {
            transaction.execute_batch(&format!("DROP TRIGGER IF EXISTS {name}; {create}"))?;
        }
        transaction.commit()?;
    }
    Ok(())
}

fn is_counted(
    connection: &Connection,
    table: &CountedTable,
    triggers: &[(String, String)],
) -> rusqlite::Result<bool> {
    if table.kind == "''" {
        let counted = "SELECT count(*) FROM row_count WHERE table_name = ?1 AND kind = ''";
        if connection.query_row(counted, [table.name], |row| row.get::<_, i64>(0))? == 0 {
            return Ok(false);
        }
    }
    for (name, create) in triggers {
        let stored = "SELECT sql FROM sqlite_schema WHERE type = 'trigger' AND name = ?1 AND tbl_name = ?2";
        let stored: Option<String> =
            connection.query_row(stored, [name.as_str(), table.table], |row| row.get(0)).optional()?;
        if stored.as_deref() != Some(create.as_str()) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The names of a table's triggers, and how each is created.
fn triggers(table: &CountedTable) -> Vec<(String, String)> {
    let CountedTable { name, table: on, .. } = table;
    if *on == SLOTS {
        return Vec::new();
    }
    let (old, new) =
        ((table.kind_of("OLD."), table.amount_of("OLD.")), (table.kind_of("NEW."), table.amount_of("NEW.")));
    let add = |values: String| {
        format!(
            "INSERT INTO row_count (table_name, kind, amount) VALUES {values} \
             ON CONFLICT (table_name, kind) DO UPDATE SET amount = amount + excluded.amount;"
        )
    };
    let inserted = add(format!("('{name}', {}, {})", new.0, new.1));
    let deleted = add(format!("('{name}', {}, -{})", old.0, old.1));
    let updated = add(format!("('{name}', {}, -{}), ('{name}', {}, {})", old.0, old.1, new.0, new.1));
    let create = |suffix: &str, event: String, when: String, body: String| {
        let trigger = format!("{name}_{suffix}");
        let create = format!("CREATE TRIGGER {trigger} AFTER {event} ON {on} WHEN {when} BEGIN {body} END");
        (trigger, create)
    };
    let mut triggers = vec![
        create("counted", "INSERT".to_owned(), format!("{} <> 0", new.1), inserted),
        create("uncounted", "DELETE".to_owned(), format!("{} <> 0", old.1), deleted),
    ];
    if let Some(column) = table.changing {
        let changed = format!("{} IS NOT {} OR {} <> {}", old.0, new.0, old.1, new.1);
        triggers.push(create("recounted", format!("UPDATE OF {column}"), changed, updated));
    }
    triggers
}

/// Counts slots that the writer has inserted or, if `change` is negative, deleted.
pub(crate) fn count_slots(connection: &Connection, change: i64) -> rusqlite::Result<()> {
    if change != 0 {
        connection.prepare_cached(COUNT_SLOTS)?.execute([change])?;
    }
    Ok(())
}

#[async_trait]
impl BookStore for Sqlite {
    async fn books(&self) -> Result<Option<Books>> {
        self.read(|connection| read_books(connection).map(Some)).await
    }

    /// Removes counts of what is gone, such as products, when there are many.
    async fn tend_counts(&self) -> Result<()> {
        let count = |connection: &Connection| connection.query_row(HAS_EMPTY, [], |row| row.get::<_, i64>(0));
        if self.read(count).await? > EMPTY_MAX {
            self.inner.writer.run(|connection| connection.prepare_cached(DELETE_EMPTY)?.execute([])).await?;
        }
        Ok(())
    }

    async fn claim_recount(&self, every: Duration) -> Result<bool> {
        let now = self.inner.clock.now().as_micros();
        let every = i64::try_from(every.as_micros()).unwrap_or(i64::MAX);
        let claim = move |connection: &Connection| connection.prepare_cached(CLAIM)?.execute([now, every]);
        Ok(self.inner.writer.run(claim).await? > 0)
    }

    async fn recount(&self, on_step: &(dyn Fn(&'static str) + Send + Sync)) -> Result<Recount> {
        let started_at = self.inner.clock.now();
        let mut reader = LongReader::open(self).await?;
        let mut differences = Vec::new();
        for table in TABLES {
            on_step(table.name);
            differences.extend(reader.read(|connection| compare(connection, table)).await?);
        }
        on_step("windows of slot");
        let (slots, above_maximum) = reader.read(slot::differing_windows).await?;
        on_step("purchases of products");
        let sales = reader.read(sale::differing_products).await?;
        on_step("users over their limit");
        let quotas = reader.read(quota::users_over_limit).await?;
        for (book, found) in [("slot", slots), ("sale", sales), ("quota", quotas)] {
            differences
                .extend(found.into_iter().map(|what| RecountDifference { book: book.to_owned(), what }));
        }
        let finished_at = self.inner.clock.now();
        let recount = Recount { started_at, finished_at, differences, above_maximum };
        let saved = recount.clone();
        self.inner.writer.run(move |connection| save(connection, &saved)).await?;
        Ok(recount)
    }

    async fn last_recount(&self) -> Result<Option<Recount>> {
        self.read(read_last).await
    }
}

/// A connection of its own for reads that take long, so that the pool has all of its connections for the others. A read whose
/// caller is dropped is interrupted: it must not keep the process from ending.
struct LongReader {
    connection: Option<Connection>,
    is_dropped: Arc<AtomicBool>,
}

/// Instructions of SQLite's virtual machine between two looks at whether the caller is gone.
const INSTRUCTIONS: c_int = 10_000;

impl LongReader {
    async fn open(engine: &Sqlite) -> Result<Self> {
        let connect =
            |connection: &Connection| crate::connect(Path::new(connection.path().unwrap_or_default()));
        let mut connection = engine.read(connect).await?;
        let is_dropped = Arc::new(AtomicBool::new(false));
        let is_interrupted = Arc::clone(&is_dropped);
        let handler = move || is_interrupted.load(Ordering::Relaxed);
        connection.progress_handler(INSTRUCTIONS, Some(handler)).map_err(classify)?;
        connection.pragma_update(None, "query_only", true).map_err(classify)?;
        Ok(Self { connection: Some(connection), is_dropped })
    }

    async fn read<T: Send + 'static>(
        &mut self,
        read: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T> {
        let Some(connection) = self.connection.take() else {
            return Err(Error::failed(ENGINE, "a read of this connection has failed before"));
        };
        let run = move || {
            let outcome = read(&connection);
            (connection, outcome)
        };
        let (connection, outcome) =
            tokio::task::spawn_blocking(run).await.map_err(|panic| Error::failed(ENGINE, panic))?;
        self.connection = Some(connection);
        outcome.map_err(classify)
    }
}

impl Drop for LongReader {
    fn drop(&mut self) {
        self.is_dropped.store(true, Ordering::Relaxed);
    }
}

fn read_books(connection: &Connection) -> rusqlite::Result<Books> {
    let transaction = connection.unchecked_transaction()?;
    let mut books = Books::default();
    for sql in [COUNTS, LEDGERS] {
        let mut statement = transaction.prepare_cached(sql)?;
        let mut rows = statement.query([])?;
        while let Some(row) = rows.next()? {
            books.add(row.get_ref(0)?.as_str()?, row.get_ref(1)?.as_str()?, row.get(2)?);
        }
    }
    books.add(COUNTERS, "", transaction.query_row(COUNTED_SLOTS, [], |row| row.get(0))?);
    let mut products = transaction.prepare_cached(PRODUCTS)?;
    let mut rows = products.query([])?;
    while let Some(row) = rows.next()? {
        let persisted = books.amount("purchases", &row.get::<_, i64>(0)?.to_string());
        let (sku, initial_stock, sold) = (row.get(1)?, row.get(2)?, row.get(3)?);
        books.products.push(ProductAudit { sku, initial_stock, sold, persisted });
    }
    Ok(books)
}

/// Finds the kinds of which there are more or fewer rows than are counted. One statement reads both, as of one moment.
fn compare(connection: &Connection, table: &CountedTable) -> rusqlite::Result<Vec<RecountDifference>> {
    let sql = format!(
        "SELECT kind, sum(found), sum(counted) FROM (
             SELECT {} AS kind, sum({}) AS found, 0 AS counted FROM {} GROUP BY 1
             UNION ALL
             SELECT kind, 0, amount FROM row_count WHERE table_name = '{}')
         GROUP BY kind HAVING sum(found) <> sum(counted) ORDER BY kind LIMIT {DIFFERENCES_MAX}",
        table.kind_of(""),
        table.amount_of(""),
        table.table,
        table.name
    );
    let mut statement = connection.prepare(&sql)?;
    let difference = |row: &Row<'_>| {
        let kind: String = row.get(0)?;
        Ok(RecountDifference::of_rows(table.name, &kind, row.get(1)?, row.get(2)?))
    };
    statement.query_map([], difference)?.collect()
}

fn save(connection: &Connection, recount: &Recount) -> rusqlite::Result<()> {
    let Recount { started_at, finished_at, above_maximum, differences } = recount;
    let values = params![started_at.as_micros(), finished_at.as_micros(), above_maximum];
    connection.prepare_cached(SAVE)?.execute(values)?;
    connection.prepare_cached(DELETE_DIFFERENCES)?.execute([])?;
    let mut insert = connection.prepare_cached(INSERT_DIFFERENCE)?;
    for (number, RecountDifference { book, what }) in (1..).zip(differences) {
        insert.execute(params![number, book, what])?;
    }
    Ok(())
}

fn read_last(connection: &Connection) -> rusqlite::Result<Option<Recount>> {
    let transaction = connection.unchecked_transaction()?;
    let last =
        transaction.query_row(LAST, [], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?))).optional()?;
    let Some((started_at, finished_at, above_maximum)) = last else { return Ok(None) };
    let mut statement = transaction.prepare_cached(DIFFERENCES)?;
    let difference = |row: &Row<'_>| Ok(RecountDifference { book: row.get(0)?, what: row.get(1)? });
    let differences = statement.query_map([], difference)?.collect::<rusqlite::Result<_>>()?;
    Ok(Some(Recount {
        started_at: Timestamp::from_micros(started_at),
        finished_at: Timestamp::from_micros(finished_at),
        above_maximum,
        differences,
    }))
}

#[cfg(test)]
mod tests;
