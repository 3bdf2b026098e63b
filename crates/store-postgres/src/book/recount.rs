//! Reads all rows: once to count those from before the triggers, and from time to time to compare them with the books. Both on a
//! connection of their own, whose statements may take long. A statement reads one table, or two that are compared, as of one
//! moment, so what others change meanwhile is no difference.

use tokio_postgres::{Client, Row};
use weir_core::Timestamp;
use weir_store::Result;
use weir_store::book::{CountedTable, DIFFERENCES_MAX, Recount, RecountDifference};

use super::{TABLES, create_triggers, is_complete, trigger_count};
use crate::connection::{Driver, connect};
use crate::error::classify;
use crate::row::{column, unreadable};
use crate::{Postgres, quota, sale, slot, time};

/// One statement may take this long, but none waits for a lock that a transaction of Weir would wait behind.
const SETTINGS: &str = "
    SET TimeZone = 'UTC';
    SET statement_timeout = '30min';
    SET lock_timeout = '2s';
    SET max_parallel_workers_per_gather = 0;
    SET jit = off;
    SET application_name = 'weir recount'";
/// Held while a table is counted for the first time: two servers must not both add its rows.
const LOCK_COMPLETION: &str = "SELECT pg_advisory_xact_lock(2003134836)";
const SAVE: &str = "
    INSERT INTO recount (id, claimed_at, started_at, finished_at, above_maximum) VALUES (1, $1, $1, $2, $3)
    ON CONFLICT (id) DO UPDATE
    SET started_at = excluded.started_at, finished_at = excluded.finished_at, above_maximum = excluded.above_maximum";

/// Creates missing triggers and counts the rows from before them, a table at a time. A server that dies in between leaves some
/// tables for the next one.
pub(super) async fn complete(engine: &Postgres) -> Result<()> {
    let (mut client, _driver) = open(engine).await?;
    for table in TABLES {
        let counted = complete_table(&mut client, table).await.map_err(classify)?;
        if counted {
            tracing::info!(table = table.name, "rows are counted from now on");
        }
    }
    Ok(())
}

/// The triggers first, in a transaction of their own, since they keep others from writing to the table: from then on each change
/// is counted. Whatever rows there are beyond that, by one snapshot, are those from before.
async fn complete_table(
    client: &mut Client,
    table: &CountedTable,
) -> std::result::Result<bool, tokio_postgres::Error> {
    let CountedTable { name, .. } = table;
    let transaction = client.transaction().await?;
    transaction.batch_execute(LOCK_COMPLETION).await?;
    let complete = transaction.query(super::COMPLETE, &[]).await?;
    let is_this = |row: &&Row| row.try_get::<_, &str>(0).is_ok_and(|found| found == *name);
    let triggers: i64 = complete.iter().find(is_this).map_or(Ok(0), |row| row.try_get(1))?;
    if triggers >= trigger_count(table) {
        return Ok(false);
    }
    transaction.execute("DELETE FROM row_count_complete WHERE table_name = $1", &[name]).await?;
    transaction.batch_execute(&create_triggers(table)).await?;
    transaction.commit().await?;
    let transaction = client.transaction().await?;
    transaction.batch_execute(LOCK_COMPLETION).await?;
    let begun = "INSERT INTO row_count_complete (table_name) VALUES ($1) ON CONFLICT DO NOTHING";
    if transaction.execute(begun, &[name]).await? == 0 {
        return Ok(false);
    }
    let add = format!(
        "INSERT INTO row_count (table_name, kind, amount) SELECT '{name}', kind, found - counted FROM ({}) AS different",
        compare(table)
    );
    transaction.execute(&add, &[]).await?;
    transaction.commit().await?;
    Ok(true)
}

/// The query for the kinds of which there are more or fewer rows than are counted.
fn compare(table: &CountedTable) -> String {
    let CountedTable { name, table: from, .. } = table;
    let (kind, amount) = (table.kind_of(""), table.amount_of(""));
    format!(
        "SELECT kind, sum(found)::bigint AS found, sum(counted)::bigint AS counted FROM (
             SELECT ({kind})::text AS kind, sum({amount}) AS found, 0 AS counted FROM {from} GROUP BY 1
             UNION ALL
             SELECT kind, 0, sum(amount) FROM row_count WHERE table_name = '{name}' GROUP BY 1) AS numbers
         GROUP BY kind HAVING sum(found) <> sum(counted) ORDER BY kind"
    )
}

pub(super) async fn run(
    engine: &Postgres,
    on_step: &(dyn Fn(&'static str) + Send + Sync),
) -> Result<Recount> {
    let (mut client, _driver) = open(engine).await?;
    let started_at = now(engine, &client).await?;
    let mut differences = Vec::new();
    let complete = is_complete(&client.query(super::COMPLETE, &[]).await.map_err(classify)?)?;
    for table in TABLES.iter().filter(|_| complete) {
        on_step(table.name);
        for row in client.query(&compare(table), &[]).await.map_err(classify)?.iter().take(DIFFERENCES_MAX) {
            let (found, counted) = (column(row, 1)?, column(row, 2)?);
            differences.push(RecountDifference::of_rows(table.name, column(row, 0)?, found, counted));
        }
    }
    on_step("windows of slot");
    let slots = client.query_one(slot::AUDIT, &[]).await.map_err(classify)?;
    on_step("purchases of products");
    let sales = client.query_one(sale::AUDIT, &[]).await.map_err(classify)?;
    on_step("users over their limit");
    let quotas = client.query_one(quota::AUDIT, &[]).await.map_err(classify)?;
    for (book, row, index) in [("slot", &slots, 3), ("sale", &sales, 3), ("quota", &quotas, 1)] {
        for what in column::<Vec<String>>(row, index)? {
            differences.push(RecountDifference { book: book.to_owned(), what });
        }
    }
    let above_maximum = column::<i64>(&slots, 2)?.unsigned_abs();
    let finished_at = now(engine, &client).await?;
    let recount = Recount { started_at, finished_at, differences, above_maximum };
    save(&mut client, &recount).await.map_err(classify)?;
    Ok(recount)
}

async fn save(client: &mut Client, recount: &Recount) -> std::result::Result<(), tokio_postgres::Error> {
    let transaction = client.transaction().await?;
    // Two recounts may end at once; the second replaces what the first has found.
    let above_maximum = i64::try_from(recount.above_maximum).unwrap_or(i64::MAX);
    let (started_at, finished_at) =
        (time::to_system(recount.started_at), time::to_system(recount.finished_at));
    transaction.execute(SAVE, &[&started_at, &finished_at, &above_maximum]).await?;
    transaction.execute("DELETE FROM recount_difference", &[]).await?;
    let (books, texts): (Vec<&str>, Vec<&str>) =
        recount.differences.iter().map(|found| (found.book.as_str(), found.what.as_str())).unzip();
    let insert = "INSERT INTO recount_difference (number, book, what)
                  SELECT number, book, what FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS found (book, what, number)";
    transaction.execute(insert, &[&books, &texts]).await?;
    transaction.commit().await
}

async fn open(engine: &Postgres) -> Result<(Client, Driver)> {
    let (client, driver) = connect(engine.inner.pool.target()).await?;
    client.batch_execute(SETTINGS).await.map_err(classify)?;
    Ok((client, driver))
}

async fn now(engine: &Postgres, client: &Client) -> Result<Timestamp> {
    if let Some(clock) = &engine.inner.clock {
        return Ok(clock.now());
    }
    let row = client.query_one(crate::clock::CLOCK, &[]).await.map_err(classify)?;
    row.try_get(0).map(time::from_system).map_err(unreadable)
}
