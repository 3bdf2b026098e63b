//! Records purchases that Redis has sold, and reads them back.

use std::time::SystemTime;

use futures_util::future::try_join;
use tokio_postgres::Row;
use weir_core::sale::PurchaseReceipt;
use weir_core::{Timestamp, UserId};
use weir_store::sale::{DeadPurchase, PURCHASES_TOPIC, ProductId, Purchase, PurchasePosition};
use weir_store::{Result, shard};

use crate::connection::Values;
use crate::queue::SHARDS;
use crate::row::{self, column, int, timestamp, unreadable, unsigned};
use crate::{Postgres, time};

const LOCK: &str = "SELECT id FROM products WHERE id = $1 FOR NO KEY UPDATE";
/// `sold` never exceeds the initial stock, so that overselling is recorded and shows in the audit.
const RECORD: &str = "
    WITH new AS (
        INSERT INTO purchases (product_id, user_id, number, purchased_at, created_by)
        SELECT $1, sold.user_id, sold.number, sold.at, 'weir'
        FROM unnest($2::text[], $3::integer[], $4::timestamptz[]) AS sold (user_id, number, at)
        ON CONFLICT (product_id, user_id) DO NOTHING
        RETURNING 1),
    counted AS (SELECT count(*)::integer AS added FROM new),
    updated AS (
        UPDATE products p
        SET sold = least(p.sold + counted.added, p.initial_stock),
            end_reason = CASE WHEN p.sold + counted.added >= p.initial_stock AND p.state <> 'ENDED' THEN 'SOLD_OUT'
                              ELSE p.end_reason END,
            state = CASE WHEN p.sold + counted.added >= p.initial_stock THEN 'ENDED' ELSE p.state END
        FROM counted WHERE p.id = $1 AND counted.added > 0)
    SELECT added::bigint FROM counted";
/// Locks the ledger row last: see `quota::save`.
const BURY: &str = "
    WITH dead AS (
        INSERT INTO dead_letter (id, topic, shard, message_id, key, payload, reason, attempts, died_at)
        SELECT letter.id, $1, letter.shard, nextval('queue_message_id_seq'), letter.key, letter.payload, letter.reason,
               letter.attempts, coalesce($8, clock_timestamp())
        FROM unnest($2::text[], $3::smallint[], $4::text[], $5::bytea[], $6::text[], $7::integer[])
            AS letter (id, shard, key, payload, reason, attempts)
        ON CONFLICT (id) DO NOTHING
        RETURNING 1)
    INSERT INTO queue_ledger (topic, slot, accepted) SELECT $1, $9, count(*) FROM dead
    ON CONFLICT (topic, slot) DO UPDATE SET accepted = queue_ledger.accepted + excluded.accepted";
const LIST: &str = "
    SELECT user_id, number, purchased_at FROM purchases
    WHERE product_id = $1 AND user_id > $2 ORDER BY user_id LIMIT $3";
/// In order of time and number: an index has the time, and few purchases have the same.
const LIST_BY_TIME: &str = "
    SELECT user_id, number, purchased_at FROM purchases
    WHERE product_id = $1 AND (purchased_at, number) > ($2, $3) ORDER BY purchased_at, number LIMIT $4";

pub(super) async fn record(
    engine: &Postgres,
    product: ProductId,
    purchases: &[Purchase],
) -> Result<Option<u64>> {
    let session = engine.inner.pool.session().await?;
    let [lock] = session.prepare([LOCK]).await?;
    let (_, found) =
        session.bounded(try_join(session.batch_execute("BEGIN"), lock.query_opt(&[&product.0]))).await?;
    let mut new = None;
    if found.is_some() {
        let buyers: Vec<&str> = purchases.iter().map(|purchase| purchase.buyer.as_str()).collect();
        let numbers: Vec<i32> = purchases.iter().map(|purchase| int(purchase.receipt.number)).collect();
        let times: Vec<SystemTime> =
            purchases.iter().map(|purchase| time::to_system(purchase.receipt.at)).collect();
        let row = session.query_one(RECORD, &[&product.0, &buyers, &numbers, &times]).await?;
        new = Some(row::count(&row, 0)?);
    }
    session.run("COMMIT").await?;
    session.keep();
    Ok(new)
}

pub(super) async fn bury(engine: &Postgres, dead: &[DeadPurchase]) -> Result<()> {
    let session = engine.inner.pool.session().await?;
    // Replaces NULs, which Postgres cannot store in a text.
    let text = |text: &str| text.replace('\0', "\u{fffd}");
    let ids: Vec<&str> = dead.iter().map(|dead| dead.id.as_str()).collect();
    let keys: Vec<&str> = dead.iter().map(|dead| dead.sku.as_str()).collect();
    let shards: Vec<i16> = keys.iter().map(|key| shard::of(key, SHARDS).cast_signed()).collect();
    let payloads: Vec<&[u8]> = dead.iter().map(|dead| dead.payload.as_bytes()).collect();
    let reasons: Vec<String> = dead.iter().map(|dead| text(&dead.reason)).collect();
    let attempts: Vec<i32> = dead.iter().map(|dead| int(dead.attempts)).collect();
    let now = engine.clock_override();
    let values: Values<'_> =
        &[&PURCHASES_TOPIC, &ids, &shards, &keys, &payloads, &reasons, &attempts, &now, &session.ledger_row];
    session.execute(BURY, values).await?;
    session.keep();
    Ok(())
}

pub(super) async fn list(
    engine: &Postgres,
    product: ProductId,
    after: Option<&UserId>,
    limit: usize,
) -> Result<Vec<Purchase>> {
    let values: Values<'_> = &[&product.0, &after.map_or("", UserId::as_str), &row::bigint(limit)];
    let rows = engine.inner.pool.query(LIST, values).await?;
    rows.iter().map(|row| read(product, row)).collect()
}

pub(super) async fn list_by_time(
    engine: &Postgres,
    product: ProductId,
    after: Option<PurchasePosition>,
    limit: usize,
) -> Result<Vec<Purchase>> {
    let after = after.unwrap_or(PurchasePosition { at: Timestamp::EPOCH, number: 0 });
    let (at, number) = (time::to_system(after.at), int(after.number));
    let values: Values<'_> = &[&product.0, &at, &number, &row::bigint(limit)];
    let rows = engine.inner.pool.query(LIST_BY_TIME, values).await?;
    rows.iter().map(|row| read(product, row)).collect()
}

fn read(product: ProductId, row: &Row) -> Result<Purchase> {
    let buyer = UserId::parse(column::<&str>(row, 0)?).map_err(unreadable)?;
    let receipt = PurchaseReceipt { number: unsigned(column(row, 1)?), at: timestamp(row, 2)? };
    Ok(Purchase { product, buyer, receipt })
}
