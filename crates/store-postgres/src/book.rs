//! The books in Postgres. Triggers add a row to `row_count` for each kind that a statement has changed. Rows are added and never
//! updated, so transactions do not wait for each other; [`fold`] replaces many by their sum.
//!
//! Functions and triggers are not part of the migrations: those of a new database are created with it, those of an older one
//! afterwards, a table at a time, so that no transaction of a running server waits for more than one of them. What is in
//! `row_count` for a table means something once the table is in `row_count_complete` and its triggers are there.

mod recount;
mod triggers;

use std::time::Duration;

use async_trait::async_trait;
use tokio_postgres::Row;
use weir_store::Result;
use weir_store::book::{BookStore, Books, CountedTable, Recount, RecountDifference};
use weir_store::sale::ProductAudit;

pub(crate) use self::triggers::create_triggers;
use crate::pool::Session;
use crate::row::{self, column, timestamp};
use crate::{Postgres, time};

/// What is counted. A row counts for what it is when it is inserted and deleted and, if that changes, updated.
pub(crate) const TABLES: &[CountedTable] = &[
    CountedTable { changing: Some("status, is_cancelled"), ..by("request_record", REQUEST_STATUS) },
    by("request_job", "''"),
    by("queue_message", "{row}topic"),
    CountedTable { amount: "{row}count", ..by("queue_pack", "{row}topic") },
    by("dead_letter", "{row}topic"),
    by("rate_limit_event_slot", "''"),
    CountedTable {
        amount: "{row}slot_count",
        changing: Some("slot_count"),
        ..by("rate_limit_window_counter", "''")
    },
    by("purchases", "{row}product_id"),
    by("rate_limit_store", "''"),
];

/// A cancelled request is stored as a failed one.
const REQUEST_STATUS: &str = "CASE WHEN {row}is_cancelled THEN 'CANCELLED' ELSE {row}status END";

const fn by(table: &'static str, kind: &'static str) -> CountedTable {
    CountedTable { name: table, table, kind, amount: "1", changing: None }
}

/// Rows of `row_count` that are left alone.
const FOLDED_FROM: i64 = 500;
/// Rows that one statement folds, and the statements of one call.
const FOLDED_MAX: i64 = 10_000;
const FOLDS_MAX: usize = 10;

const COUNTS: &str = "SELECT table_name, kind, sum(amount)::bigint FROM row_count GROUP BY table_name, kind";
const LEDGERS: &str = "
    SELECT 'accepted', topic, sum(accepted)::bigint FROM queue_ledger GROUP BY topic
    UNION ALL SELECT 'done', topic, sum(done)::bigint FROM queue_ledger GROUP BY topic
    UNION ALL SELECT 'discarded', topic, sum(discarded)::bigint FROM queue_ledger GROUP BY topic
    UNION ALL SELECT 'request_ledger', 'accepted', coalesce(sum(accepted), 0)::bigint FROM request_ledger
    UNION ALL SELECT 'request_ledger', 'purged', coalesce(sum(purged - erased), 0)::bigint FROM request_ledger
    UNION ALL SELECT 'request_ledger', 'erased', coalesce(sum(erased), 0)::bigint FROM request_ledger";
const PRODUCTS: &str = "SELECT id, sku::text, initial_stock, sold FROM products ORDER BY id";
/// The tables whose counts may be used, and the number of their triggers.
const COMPLETE: &str = "
    SELECT table_name, (
        SELECT count(*) FROM pg_trigger
        WHERE tgrelid = to_regclass(table_name) AND tgname LIKE 'weir\\_count\\_%' AND tgenabled <> 'D')
    FROM row_count_complete";
const HAS_MANY: &str = "SELECT count(*) FROM (SELECT FROM row_count ORDER BY id LIMIT $1) AS counted";
const FOLD: &str = "
    WITH folded AS (
        DELETE FROM row_count WHERE ctid = ANY(ARRAY(
            SELECT ctid FROM row_count ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED))
        RETURNING table_name, kind, amount)
    INSERT INTO row_count (table_name, kind, amount)
    SELECT table_name, kind, sum(amount)::bigint FROM folded GROUP BY table_name, kind HAVING sum(amount) <> 0";
const CLAIM: &str = "
    INSERT INTO recount AS last (id, claimed_at) VALUES (1, coalesce($2, clock_timestamp()))
    ON CONFLICT (id) DO UPDATE SET claimed_at = excluded.claimed_at
    WHERE last.claimed_at <= excluded.claimed_at - $1::bigint * interval '1 microsecond'
       OR last.claimed_at > excluded.claimed_at + interval '1 second' -- the clock was set back since
    RETURNING id";
const LAST: &str = "
    SELECT started_at, finished_at, above_maximum FROM recount WHERE id = 1 AND finished_at IS NOT NULL";
const DIFFERENCES: &str = "SELECT book, what FROM recount_difference ORDER BY number";

#[async_trait]
impl BookStore for Postgres {
    async fn books(&self) -> Result<Option<Books>> {
        let session = self.inner.pool.session().await?;
        session.run("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?;
        let complete = session.query(COMPLETE, &[]).await?;
        if !is_complete(&complete)? {
            session.run("ROLLBACK").await?;
            session.keep();
            return Ok(None);
        }
        let mut books = Books::default();
        for statement in [COUNTS, LEDGERS] {
            for row in &session.query(statement, &[]).await? {
                books.add(column(row, 0)?, column(row, 1)?, column(row, 2)?);
            }
        }
        for row in &session.query(PRODUCTS, &[]).await? {
            let persisted = books.amount("purchases", &column::<i64>(row, 0)?.to_string());
            books.products.push(read_product(row, persisted)?);
        }
        session.run("COMMIT").await?;
        session.keep();
        Ok(Some(books))
    }

    async fn tend_counts(&self) -> Result<()> {
        let session = self.inner.pool.session().await?;
        let complete = is_complete(&session.query(COMPLETE, &[]).await?)?;
        fold(&session).await?;
        session.keep();
        if complete { Ok(()) } else { recount::complete(self).await }
    }

    async fn claim_recount(&self, every: Duration) -> Result<bool> {
        let now = self.clock_override();
        Ok(self.inner.pool.query_opt(CLAIM, &[&time::micros(every), &now]).await?.is_some())
    }

    async fn recount(&self, on_step: &(dyn Fn(&'static str) + Send + Sync)) -> Result<Recount> {
        recount::run(self, on_step).await
    }

    async fn last_recount(&self) -> Result<Option<Recount>> {
        let session = self.inner.pool.session().await?;
        session.run("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?;
        let last = session.query_opt(LAST, &[]).await?;
        let differences = session.query(DIFFERENCES, &[]).await?;
        session.run("COMMIT").await?;
        session.keep();
        let Some(last) = last else { return Ok(None) };
        let read = |row: &Row| Ok(RecountDifference { book: column(row, 0)?, what: column(row, 1)? });
        Ok(Some(Recount {
            started_at: timestamp(&last, 0)?,
            finished_at: timestamp(&last, 1)?,
            above_maximum: row::count(&last, 2)?,
            differences: differences.iter().map(read).collect::<Result<_>>()?,
        }))
    }
}

/// Whether all tables are counted whole and by all of their triggers.
fn is_complete(rows: &[Row]) -> Result<bool> {
    let mut counted = 0;
    for row in rows {
        let (name, triggers): (&str, i64) = (column(row, 0)?, column(row, 1)?);
        let table = TABLES.iter().find(|table| table.name == name);
        counted += usize::from(table.is_some_and(|table| triggers >= trigger_count(table)));
    }
    Ok(counted == TABLES.len())
}

/// Insertions and deletions have a trigger, and updates if they change what a row counts for.
fn trigger_count(table: &CountedTable) -> i64 {
    2 + i64::from(table.changing.is_some())
}

/// Replaces rows of `row_count` by their sums. Servers that fold at the same time take different rows.
async fn fold(session: &Session) -> Result<()> {
    let many = FOLDED_FROM.unsigned_abs();
    for _ in 0..FOLDS_MAX {
        if row::count(&session.query_one(HAS_MANY, &[&FOLDED_FROM]).await?, 0)? < many {
            return Ok(());
        }
        // What it has inserted is left for the next time.
        if session.execute(FOLD, &[&FOLDED_MAX]).await? >= many {
            return Ok(());
        }
    }
    Ok(())
}

fn read_product(row: &Row, persisted: u64) -> Result<ProductAudit> {
    let (stock, sold): (i32, i32) = (column(row, 2)?, column(row, 3)?);
    Ok(ProductAudit {
        sku: column(row, 1)?,
        initial_stock: row::unsigned(stock).into(),
        sold: row::unsigned(sold).into(),
        persisted,
    })
}

#[cfg(test)]
mod tests;
