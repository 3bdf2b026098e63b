//! Purchases: a batch is one transaction of two round trips. The first locks the products in order of sku, then reads the clock
//! and the earlier purchases of the buyers; the second writes what was decided and commits.

use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::time::SystemTime;

use futures_util::future::{try_join, try_join4};
use weir_core::sale::EndReason;
use weir_store::sale::{Buy, BuyOutcome, BuyPlan, Product, ProductId, plan_purchases};
use weir_store::{Batch, Result};

use super::read;
use crate::clock::CLOCK;
use crate::connection::Values;
use crate::pool::Session;
use crate::row::{column, int};
use crate::{Postgres, time};

/// `NO KEY`, so that inserts of purchases, which only reference the product, need not wait.
const LOCK: &str = "
    SELECT id, sku, product_name, initial_stock, start_time, end_time, state,
        CASE WHEN ended_by_operator THEN 'ENDED_BY_OPERATOR' ELSE end_reason END, sold, created_at
    FROM products WHERE sku = ANY($1) ORDER BY sku FOR NO KEY UPDATE";
/// A statement of its own, so that it sees everything that was committed before the locks were granted.
const BOUGHT: &str = "
    SELECT purchase.product_id, purchase.user_id
    FROM unnest($1::text[], $2::text[]) AS buyer (sku, user_id)
    CROSS JOIN LATERAL (SELECT id FROM products WHERE sku = buyer.sku OFFSET 0) AS product
    CROSS JOIN LATERAL (
        SELECT product_id, user_id FROM purchases WHERE product_id = product.id AND user_id = buyer.user_id OFFSET 0) AS purchase";
const SAVE: &str = "
    WITH bought AS (
        INSERT INTO purchases (product_id, user_id, number, purchased_at, created_at, created_by)
        SELECT new.product_id, new.user_id, new.number, new.at, new.at, 'weir'
        FROM unnest($1::bigint[], $2::text[], $3::integer[], $4::timestamptz[])
            AS new (product_id, user_id, number, at))
    UPDATE products p SET sold = new.sold, state = new.state, end_reason = new.end_reason
    FROM unnest($5::bigint[], $6::integer[], $7::text[], $8::text[]) AS new (id, sold, state, end_reason)
    WHERE p.id = ANY(ARRAY[new.id])";

pub(super) async fn buy(engine: &Postgres, batch: Batch<Buy>) -> Result<Vec<BuyOutcome>> {
    let session = engine.inner.pool.session().await?;
    let batch = batch.take();
    if batch.is_empty() {
        session.keep();
        return Ok(Vec::new());
    }
    let skus: Vec<&str> = batch.iter().map(|buy| buy.sku.as_str()).collect();
    let buyers: Vec<&str> = batch.iter().map(|buy| buy.buyer.as_str()).collect();
    let distinct: Vec<&str> = skus.iter().copied().collect::<HashSet<_>>().into_iter().collect();
    let [lock, clock, bought] = session.prepare([LOCK, CLOCK, BOUGHT]).await?;
    let (_, products, clock, bought) = session
        .bounded(try_join4(
            session.batch_execute("BEGIN"),
            lock.query(&[&distinct]),
            clock.query_one(&[]),
            bought.query(&[&skus, &buyers]),
        ))
        .await?;
    let mut products: HashMap<String, Product> = products
        .iter()
        .map(|row| read(row).map(|product| (product.sku.as_str().to_owned(), product)))
        .collect::<Result<_>>()?;
    let bought: HashSet<(ProductId, &str)> =
        bought.iter().map(|row| Ok((ProductId(column(row, 0)?), column(row, 1)?))).collect::<Result<_>>()?;
    let has_bought = |product: &Product, buyer: &weir_core::UserId| -> Result<bool, Infallible> {
        Ok(bought.contains(&(product.id, buyer.as_str())))
    };
    let Ok(plan) = plan_purchases(&batch, &mut products, engine.now(&clock)?, has_bought);
    save(&session, &plan).await?;
    session.keep();
    Ok(plan.outcomes)
}

async fn save(session: &Session, plan: &BuyPlan) -> Result<()> {
    if plan.changed.is_empty() {
        return session.run("COMMIT").await;
    }
    let products: Vec<i64> = plan.purchases.iter().map(|purchase| purchase.product.0).collect();
    let buyers: Vec<&str> = plan.purchases.iter().map(|purchase| purchase.buyer.as_str()).collect();
    let numbers: Vec<i32> = plan.purchases.iter().map(|purchase| int(purchase.receipt.number)).collect();
    let times: Vec<SystemTime> =
        plan.purchases.iter().map(|purchase| time::to_system(purchase.receipt.at)).collect();
    let ids: Vec<i64> = plan.changed.iter().map(|(id, ..)| id.0).collect();
    let sold: Vec<i32> = plan.changed.iter().map(|(_, sold, _)| int(*sold)).collect();
    let states: Vec<&str> = plan.changed.iter().map(|(.., state)| state.as_str()).collect();
    let reasons: Vec<Option<&str>> =
        plan.changed.iter().map(|(.., state)| state.end_reason().map(EndReason::as_early_str)).collect();
    let values: Values<'_> = &[&products, &buyers, &numbers, &times, &ids, &sold, &states, &reasons];
    let [save] = session.prepare([SAVE]).await?;
    session.bounded(try_join(save.execute(values), session.batch_execute("COMMIT"))).await.map(drop)
}
