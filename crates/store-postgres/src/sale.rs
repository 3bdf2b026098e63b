//! Sale in Postgres: products and reads. `sale/buy.rs` decides batches of purchases.
//!
//! A batch holds the rows of its products until the commit, so purchases of one product are serialized across servers. The rows of
//! a batch are locked in order of sku; a removal of a product locks its row first.

mod buy;
mod record;

use std::time::SystemTime;

use async_trait::async_trait;
use futures_util::future::{try_join, try_join3};
use tokio_postgres::Row;
use weir_core::sale::{EndReason, PurchaseReceipt, Sale, SaleState, Sku, Terms, TermsChange};
use weir_core::{Timestamp, UserId};
use weir_store::sale::{
    AUDIT_ITEMS_MAX, Buy, BuyOutcome, ChangeOutcome, CreateOutcome, DeadPurchase, DeleteOutcome, EndOutcome,
    FoundPurchase, Product, ProductAudit, ProductId, Purchase, PurchasePosition, SNAPSHOT_ENDED_MAX,
    SNAPSHOT_OPEN_MAX, SaleAudit, SaleLedger, SaleSnapshot, SaleStore,
};
use weir_store::{Batch, Result};

use crate::clock::CLOCK;
use crate::connection::Values;
use crate::pool::Session;
use crate::row::{self, column, int, timestamp, unreadable, unsigned};
use crate::{Postgres, time};

const CREATE: &str = "
    INSERT INTO products (sku, product_name, initial_stock, start_time, end_time, created_at, created_by)
    VALUES ($1, $2, $3, $4, $5, $6, 'admin') ON CONFLICT (sku) DO NOTHING
    RETURNING id, sku, product_name, initial_stock, start_time, end_time, state,
        CASE WHEN ended_by_operator THEN 'ENDED_BY_OPERATOR' ELSE end_reason END, sold, created_at";
const FIND: &str = "
    SELECT id, sku, product_name, initial_stock, start_time, end_time, state,
        CASE WHEN ended_by_operator THEN 'ENDED_BY_OPERATOR' ELSE end_reason END, sold, created_at
    FROM products WHERE sku = $1";
const LOCK: &str = "
    SELECT id, sku, product_name, initial_stock, start_time, end_time, state,
        CASE WHEN ended_by_operator THEN 'ENDED_BY_OPERATOR' ELSE end_reason END, sold, created_at
    FROM products WHERE sku = $1 FOR UPDATE";
const LIST: &str = "
    SELECT id, sku, product_name, initial_stock, start_time, end_time, state,
        CASE WHEN ended_by_operator THEN 'ENDED_BY_OPERATOR' ELSE end_reason END, sold, created_at
    FROM products WHERE sku > $1 ORDER BY sku LIMIT $2";
/// A branch for each state, so that each is a scan of its index.
const SNAPSHOT: &str = "
    (SELECT id, sku, product_name, initial_stock, start_time, end_time, state,
        CASE WHEN ended_by_operator THEN 'ENDED_BY_OPERATOR' ELSE end_reason END, sold, created_at
     FROM products WHERE state = 'ACTIVE' ORDER BY start_time LIMIT $1)
    UNION ALL
    (SELECT id, sku, product_name, initial_stock, start_time, end_time, state,
        CASE WHEN ended_by_operator THEN 'ENDED_BY_OPERATOR' ELSE end_reason END, sold, created_at
     FROM products WHERE state = 'UPCOMING' ORDER BY start_time LIMIT $1)
    UNION ALL
    (SELECT id, sku, product_name, initial_stock, start_time, end_time, state,
        CASE WHEN ended_by_operator THEN 'ENDED_BY_OPERATOR' ELSE end_reason END, sold, created_at
     FROM products WHERE state = 'ENDED' ORDER BY end_time DESC LIMIT $2)";
const CHANGE: &str = "
    UPDATE products SET product_name = $2, initial_stock = $3, start_time = $4, end_time = $5, updated_at = $6,
        updated_by = 'admin' WHERE id = $1";
const END: &str = "
    UPDATE products SET state = 'ENDED', end_reason = 'TIME_EXPIRED', ended_by_operator = true, updated_at = $2,
        updated_by = 'admin' WHERE id = $1";
const EXTEND: &str = "UPDATE products SET end_time = $2, updated_at = $3, updated_by = 'admin' WHERE id = $1";
/// An end by the operator is final. A sale that this clock has ended, but Redis has extended, is active.
const SAVE_DECISION: &str = "
    UPDATE products SET end_time = greatest(end_time, $2),
        state = CASE WHEN $3 THEN 'ENDED'
                     WHEN end_reason = 'TIME_EXPIRED' AND ended_by_operator IS NULL AND end_time < $2 THEN 'ACTIVE'
                     ELSE state END,
        end_reason = CASE WHEN $3 THEN coalesce(end_reason, 'TIME_EXPIRED')
                          WHEN end_reason = 'TIME_EXPIRED' AND ended_by_operator IS NULL AND end_time < $2 THEN NULL
                          ELSE end_reason END,
        ended_by_operator = CASE WHEN $3 AND coalesce(end_reason, 'TIME_EXPIRED') = 'TIME_EXPIRED' THEN true
                                 ELSE ended_by_operator END,
        updated_at = coalesce($4, clock_timestamp()), updated_by = 'admin'
    WHERE id = $1";
const FORGET_PURCHASES: &str = "DELETE FROM purchases WHERE product_id = $1";
const DELETE: &str = "DELETE FROM products WHERE id = $1";
const FIND_PURCHASE: &str = "
    SELECT number, purchased_at FROM purchases
    WHERE product_id = (SELECT id FROM products WHERE sku = $1) AND user_id = $2";
const LAST_PURCHASE: &str = "
    SELECT number, purchased_at, (SELECT sku FROM products p WHERE p.id = product_id)
    FROM purchases WHERE user_id = $1 ORDER BY purchased_at DESC, id DESC LIMIT 1";
/// Skips locked products: a batch that sells one saves its state, too.
const SAVE_DUE_STATES: &str = "
    WITH started AS (
        SELECT id FROM products WHERE state = 'UPCOMING' AND start_time <= coalesce($1, clock_timestamp())
        ORDER BY start_time LIMIT 1000 FOR NO KEY UPDATE SKIP LOCKED),
    ended AS (
        SELECT id FROM products WHERE state = 'ACTIVE' AND end_time <= coalesce($1, clock_timestamp())
        ORDER BY end_time LIMIT 1000 FOR NO KEY UPDATE SKIP LOCKED),
    due AS (SELECT id FROM started UNION ALL SELECT id FROM ended)
    UPDATE products p
    SET state = CASE WHEN p.end_time <= coalesce($1, clock_timestamp()) THEN 'ENDED' ELSE 'ACTIVE' END,
        end_reason = CASE WHEN p.end_time <= coalesce($1, clock_timestamp()) THEN 'TIME_EXPIRED' END
    FROM due WHERE p.id = ANY(ARRAY[due.id]) AND p.state <> 'ENDED'";
pub(crate) const AUDIT: &str = "
    SELECT (SELECT count(*) FROM products), (SELECT coalesce(sum(sold), 0)::bigint FROM products),
           (SELECT count(*) FROM purchases),
           ARRAY(SELECT sku::text FROM products p
                 WHERE sold <> (SELECT count(*) FROM purchases u WHERE u.product_id = p.id) OR sold > initial_stock
                 ORDER BY id DESC LIMIT 10)";
const ITEMS: &str = "
    SELECT sku, initial_stock, sold, (SELECT count(*) FROM purchases u WHERE u.product_id = p.id)
    FROM products p ORDER BY id DESC LIMIT $1";

#[async_trait]
impl SaleLedger for Postgres {
    async fn record_purchases(&self, product: ProductId, purchases: Vec<Purchase>) -> Result<Option<u64>> {
        record::record(self, product, &purchases).await
    }

    async fn save_decision(&self, product: &Product) -> Result<()> {
        let (end, state) = (time::to_system(product.sale.terms.end), product.sale.state);
        let is_ended = state == SaleState::Ended(EndReason::EndedByOperator);
        let values: Values<'_> = &[&product.id.0, &end, &is_ended, &self.clock_override()];
        self.inner.pool.execute(SAVE_DECISION, values).await.map(drop)
    }

    async fn save_dead_purchases(&self, dead: Vec<DeadPurchase>) -> Result<()> {
        record::bury(self, &dead).await
    }

    async fn purchases(
        &self,
        product: ProductId,
        after: Option<&UserId>,
        limit: usize,
    ) -> Result<Vec<Purchase>> {
        record::list(self, product, after, limit).await
    }
}

#[async_trait]
impl SaleStore for Postgres {
    async fn create_product(&self, sku: &Sku, terms: Terms) -> Result<CreateOutcome> {
        let session = self.inner.pool.session().await?;
        let now = self.now(&session.query_one(CLOCK, &[]).await?)?;
        if let Err(problem) = terms.check_starts_after(now) {
            session.keep();
            return Ok(CreateOutcome::Refused(problem));
        }
        let (start, end) = (time::to_system(terms.start), time::to_system(terms.end));
        let (stock, at) = (int(terms.initial_stock.get()), time::to_system(now));
        let values: Values<'_> = &[&sku.as_str(), &&*terms.product_name, &stock, &start, &end, &at];
        let row = session.query_opt(CREATE, values).await?;
        session.keep();
        Ok(match row {
            Some(row) => CreateOutcome::Created(read(&row)?),
            None => CreateOutcome::Exists,
        })
    }

    async fn product(&self, sku: &Sku) -> Result<Option<Product>> {
        let session = self.inner.pool.session().await?;
        let [clock, find] = session.prepare([CLOCK, FIND]).await?;
        let (clock, row) =
            session.bounded(try_join(clock.query_one(&[]), find.query_opt(&[&sku.as_str()]))).await?;
        session.keep();
        let now = self.now(&clock)?;
        row.map(|row| Ok(as_of(read(&row)?, now))).transpose()
    }

    async fn products(&self, after: Option<&Sku>, limit: usize) -> Result<Vec<Product>> {
        let after = after.map_or("", Sku::as_str);
        let board = self.list(LIST, &[&after, &row::bigint(limit)]).await?;
        Ok(board.products)
    }

    async fn change_product(&self, sku: &Sku, change: TermsChange) -> Result<ChangeOutcome> {
        let session = self.inner.pool.session().await?;
        let (clock, product) = lock(&session, sku).await?;
        let now = self.now(&clock)?;
        let mut outcome = ChangeOutcome::UnknownSku;
        if let Some(mut product) = product {
            outcome = match product.sale.change(&change, now) {
                Ok(()) => {
                    write_terms(&session, &product, time::to_system(now)).await?;
                    ChangeOutcome::Changed(product)
                }
                Err(problem) => ChangeOutcome::Refused(problem),
            };
        }
        session.run("COMMIT").await?;
        session.keep();
        Ok(outcome)
    }

    async fn end_sale(&self, sku: &Sku) -> Result<EndOutcome> {
        let session = self.inner.pool.session().await?;
        let (clock, product) = lock(&session, sku).await?;
        let now = self.now(&clock)?;
        let mut outcome = EndOutcome::UnknownSku;
        if let Some(mut product) = product {
            outcome = EndOutcome::NotActive;
            if product.sale.end(now) {
                session.execute(END, &[&product.id.0, &time::to_system(now)]).await?;
                outcome = EndOutcome::Ended(product);
            }
        }
        session.run("COMMIT").await?;
        session.keep();
        Ok(outcome)
    }

    async fn extend_sale(&self, sku: &Sku, end: Timestamp) -> Result<ChangeOutcome> {
        let session = self.inner.pool.session().await?;
        let (clock, product) = lock(&session, sku).await?;
        let now = self.now(&clock)?;
        let mut outcome = ChangeOutcome::UnknownSku;
        if let Some(mut product) = product {
            outcome = match product.sale.extend(end, now) {
                Ok(()) => {
                    let (end, now) = (time::to_system(end), time::to_system(now));
                    session.execute(EXTEND, &[&product.id.0, &end, &now]).await?;
                    ChangeOutcome::Changed(product)
                }
                Err(problem) => ChangeOutcome::Refused(problem),
            };
        }
        session.run("COMMIT").await?;
        session.keep();
        Ok(outcome)
    }

    async fn delete_product(&self, sku: &Sku, only_unused: bool) -> Result<DeleteOutcome> {
        let session = self.inner.pool.session().await?;
        let (clock, product) = lock(&session, sku).await?;
        let now = self.now(&clock)?;
        let outcome = match product {
            None => DeleteOutcome::UnknownSku,
            Some(product) if only_unused && !product.sale.is_unused(now) => DeleteOutcome::InUse,
            Some(Product { id, .. }) => {
                session.execute(FORGET_PURCHASES, &[&id.0]).await?;
                session.execute(DELETE, &[&id.0]).await?;
                DeleteOutcome::Deleted
            }
        };
        session.run("COMMIT").await?;
        session.keep();
        Ok(outcome)
    }

    async fn buy_batch(&self, batch: Batch<Buy>) -> Result<Vec<BuyOutcome>> {
        buy::buy(self, batch).await
    }

    async fn find_purchase(&self, buyer: &UserId, sku: Option<&Sku>) -> Result<Option<FoundPurchase>> {
        let row = match sku {
            Some(sku) => self.inner.pool.query_opt(FIND_PURCHASE, &[&sku.as_str(), &buyer.as_str()]).await?,
            None => self.inner.pool.query_opt(LAST_PURCHASE, &[&buyer.as_str()]).await?,
        };
        let found = |row: Row| {
            let receipt = PurchaseReceipt { number: unsigned(column(&row, 0)?), at: timestamp(&row, 1)? };
            let sku = match sku {
                Some(sku) => sku.clone(),
                None => Sku::parse(column::<&str>(&row, 2)?).map_err(unreadable)?,
            };
            Ok(FoundPurchase { sku, receipt })
        };
        row.map(found).transpose()
    }

    async fn list_purchases(
        &self,
        product: &Product,
        after: Option<PurchasePosition>,
        limit: usize,
    ) -> Result<Vec<Purchase>> {
        record::list_by_time(self, product.id, after, limit).await
    }

    async fn snapshot(&self) -> Result<SaleSnapshot> {
        let (open, ended) = (SNAPSHOT_OPEN_MAX as i64, SNAPSHOT_ENDED_MAX as i64);
        self.list(SNAPSHOT, &[&open, &ended]).await
    }

    async fn save_due_states(&self) -> Result<()> {
        self.inner.pool.execute(SAVE_DUE_STATES, &[&self.clock_override()]).await.map(drop)
    }

    async fn audit_sales(&self) -> Result<SaleAudit> {
        let session = self.inner.pool.session().await?;
        let [audit, items] = session.prepare([AUDIT, ITEMS]).await?;
        // One snapshot for both, so that a purchase in between does not look like a difference.
        let (_, row, items) = session
            .bounded(try_join3(
                session.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"),
                audit.query_one(&[]),
                items.query(&[&row::bigint(AUDIT_ITEMS_MAX)]),
            ))
            .await?;
        session.run("COMMIT").await?;
        session.keep();
        let count = |index| row::count(&row, index);
        Ok(SaleAudit {
            products: count(0)?,
            sold: count(1)?,
            persisted: count(2)?,
            different: column(&row, 3)?,
            items: items.iter().map(read_books).collect::<Result<_>>()?,
        })
    }
}

impl Postgres {
    /// Reads products with their present states, and the time.
    async fn list(&self, sql: &'static str, values: Values<'_>) -> Result<SaleSnapshot> {
        let session = self.inner.pool.session().await?;
        let [clock, list] = session.prepare([CLOCK, sql]).await?;
        let (clock, rows) = session.bounded(try_join(clock.query_one(&[]), list.query(values))).await?;
        session.keep();
        let now = self.now(&clock)?;
        let products = rows.iter().map(|row| Ok(as_of(read(row)?, now))).collect::<Result<_>>()?;
        Ok(SaleSnapshot { now, products, is_current: true })
    }
}

/// Begins a transaction and locks a product's row. The clock is read after the lock.
async fn lock(session: &Session, sku: &Sku) -> Result<(Row, Option<Product>)> {
    let [lock, clock] = session.prepare([LOCK, CLOCK]).await?;
    let (_, row, clock) = session
        .bounded(try_join3(
            session.batch_execute("BEGIN"),
            lock.query_opt(&[&sku.as_str()]),
            clock.query_one(&[]),
        ))
        .await?;
    Ok((clock, row.as_ref().map(read).transpose()?))
}

async fn write_terms(session: &Session, product: &Product, now: SystemTime) -> Result<()> {
    let terms = &product.sale.terms;
    let (start, end) = (time::to_system(terms.start), time::to_system(terms.end));
    let stock = int(terms.initial_stock.get());
    let values: Values<'_> = &[&product.id.0, &&*terms.product_name, &stock, &start, &end, &now];
    session.execute(CHANGE, values).await.map(drop)
}

fn as_of(mut product: Product, now: Timestamp) -> Product {
    product.sale.advance(now);
    product
}

fn read(row: &Row) -> Result<Product> {
    let time = |index| timestamp(row, index);
    let stock = unsigned(column(row, 3)?);
    let terms = Terms::new(column(row, 2)?, stock, time(4)?, time(5)?).map_err(unreadable)?;
    let state = SaleState::parse(column(row, 6)?, column(row, 7)?)
        .ok_or_else(|| unreadable("unknown state or end reason of a product in the database"))?;
    Ok(Product {
        id: ProductId(column(row, 0)?),
        sku: Sku::parse(column::<&str>(row, 1)?).map_err(unreadable)?,
        sale: Sale { terms, sold: unsigned(column(row, 8)?), state },
        created_at: time(9)?,
    })
}

fn read_books(row: &Row) -> Result<ProductAudit> {
    let units = |index| column(row, index).map(|units| u64::from(unsigned(units)));
    Ok(ProductAudit {
        sku: column(row, 0)?,
        initial_stock: units(1)?,
        sold: units(2)?,
        persisted: row::count(row, 3)?,
    })
}
