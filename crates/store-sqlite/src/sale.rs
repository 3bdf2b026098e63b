//! Sale in SQLite. Only the writer thread decides, so no rows are locked: a batch loads its products, decides and saves.

use std::collections::{HashMap, HashSet};
use std::ops::ControlFlow;

use async_trait::async_trait;
use rusqlite::{Connection, OptionalExtension, Row, params};
use weir_core::sale::{EndReason, PurchaseReceipt, Sale, SaleState, Sku, Terms, TermsChange};
use weir_core::{Timestamp, UserId};
use weir_queue::DeadLetter;
use weir_store::sale::{
    AUDIT_ITEMS_MAX, Buy, BuyOutcome, BuyPlan, ChangeOutcome, CreateOutcome, DeadPurchase, DeleteOutcome,
    EndOutcome, FoundPurchase, PURCHASES_TOPIC as TOPIC, Product, ProductAudit, ProductId, Purchase,
    PurchasePosition, SNAPSHOT_ENDED_MAX, SNAPSHOT_OPEN_MAX, SaleAudit, SaleLedger, SaleSnapshot, SaleStore,
    plan_purchases,
};
use weir_store::{Batch, Result};

use crate::error::fault;
use crate::writer::{BatchInTurns, Scheduling, WriterTurn};
use crate::{Sqlite, queue};

/// Purchases decided between two checks of the turn.
const BUY_CHUNK: usize = 128;
/// Purchases deleted between two checks of the turn.
const DELETE_CHUNK: usize = 128;

const CREATE: &str = "
    INSERT INTO products
        (sku, product_name, initial_stock, start_time, end_time, state, created_at, created_by)
    VALUES (?1, ?2, ?3, ?4, ?5, 'UPCOMING', ?6, 'admin') ON CONFLICT (sku) DO NOTHING";
const FIND: &str = "
    SELECT id, sku, product_name, initial_stock, start_time, end_time, state,
        CASE WHEN ended_by_operator THEN 'ENDED_BY_OPERATOR' ELSE end_reason END, sold, created_at
    FROM products WHERE sku = ?1";
const LIST: &str = "
    SELECT id, sku, product_name, initial_stock, start_time, end_time, state,
        CASE WHEN ended_by_operator THEN 'ENDED_BY_OPERATOR' ELSE end_reason END, sold, created_at
    FROM products WHERE sku > ?1 ORDER BY sku LIMIT ?2";
const OPEN: &str = "
    SELECT id, sku, product_name, initial_stock, start_time, end_time, state,
        CASE WHEN ended_by_operator THEN 'ENDED_BY_OPERATOR' ELSE end_reason END, sold, created_at
    FROM products WHERE state IN ('ACTIVE', 'UPCOMING') ORDER BY state, start_time LIMIT ?1";
const ENDED: &str = "
    SELECT id, sku, product_name, initial_stock, start_time, end_time, state,
        CASE WHEN ended_by_operator THEN 'ENDED_BY_OPERATOR' ELSE end_reason END, sold, created_at
    FROM products WHERE state = 'ENDED' ORDER BY end_time DESC LIMIT ?1";
const CHANGE: &str = "
    UPDATE products SET product_name = ?2, initial_stock = ?3, start_time = ?4, end_time = ?5, updated_at = ?6,
        updated_by = 'admin' WHERE id = ?1";
const END: &str = "
    UPDATE products SET state = 'ENDED', end_reason = 'TIME_EXPIRED', ended_by_operator = 1, updated_at = ?2,
        updated_by = 'admin' WHERE id = ?1";
const EXTEND: &str = "UPDATE products SET end_time = ?2, updated_at = ?3, updated_by = 'admin' WHERE id = ?1";
/// An end by the operator is final. A sale that this clock has ended, but Redis has extended, is active.
const SAVE_DECISION: &str = "
    UPDATE products SET end_time = max(end_time, ?2),
        state = CASE WHEN ?3 THEN 'ENDED'
                     WHEN end_reason = 'TIME_EXPIRED' AND ended_by_operator IS NULL AND end_time < ?2 THEN 'ACTIVE'
                     ELSE state END,
        end_reason = CASE WHEN ?3 THEN coalesce(end_reason, 'TIME_EXPIRED')
                          WHEN end_reason = 'TIME_EXPIRED' AND ended_by_operator IS NULL AND end_time < ?2 THEN NULL
                          ELSE end_reason END,
        ended_by_operator = CASE WHEN ?3 AND coalesce(end_reason, 'TIME_EXPIRED') = 'TIME_EXPIRED' THEN 1
                                 ELSE ended_by_operator END,
        updated_at = ?4, updated_by = 'admin'
    WHERE id = ?1";
/// Ends the sale of a product that is being deleted. The table has no better reason than that its time expired.
const END_DELETED: &str =
    "UPDATE products SET state = 'ENDED', end_reason = coalesce(end_reason, 'TIME_EXPIRED') WHERE id = ?1";
const DELETE_PURCHASES: &str = "
    DELETE FROM purchases WHERE id IN (SELECT id FROM purchases WHERE product_id = ?1 LIMIT ?2)";
const SUBTRACT_SOLD: &str = "UPDATE products SET sold = max(sold - ?2, 0) WHERE id = ?1";
const DELETE: &str = "DELETE FROM products WHERE id = ?1";
const HAS_PURCHASE: &str = "SELECT 1 FROM purchases WHERE product_id = ?1 AND user_id = ?2";
const INSERT: &str = "
    INSERT INTO purchases (product_id, user_id, number, purchased_at, created_at, created_by)
    VALUES (?1, ?2, ?3, ?4, ?5, 'weir')";
const SAVE: &str = "UPDATE products SET sold = ?2, state = ?3, end_reason = ?4 WHERE id = ?1";
const FIND_PURCHASE: &str = "
    SELECT number, purchased_at FROM purchases
    WHERE product_id = (SELECT id FROM products WHERE sku = ?1) AND user_id = ?2";
const LAST_PURCHASE: &str = "
    SELECT number, purchased_at, (SELECT sku FROM products p WHERE p.id = product_id)
    FROM purchases WHERE user_id = ?1 ORDER BY purchased_at DESC, id DESC LIMIT 1";
const DUE: &str = "
    SELECT id, sku, product_name, initial_stock, start_time, end_time, state,
        CASE WHEN ended_by_operator THEN 'ENDED_BY_OPERATOR' ELSE end_reason END, sold, created_at
    FROM products
    WHERE (state = 'UPCOMING' AND start_time <= ?1) OR (state = 'ACTIVE' AND end_time <= ?1)";
const TOTALS: &str = "
    SELECT (SELECT count(*) FROM products), (SELECT coalesce(sum(sold), 0) FROM products),
           (SELECT count(*) FROM purchases)";
const DIFFERENT: &str = "
    SELECT sku FROM products p
    WHERE sold <> (SELECT count(*) FROM purchases u WHERE u.product_id = p.id) OR sold > initial_stock
    ORDER BY id DESC LIMIT 10";
const ITEMS: &str = "
    SELECT sku, initial_stock, sold, (SELECT count(*) FROM purchases u WHERE u.product_id = p.id)
    FROM products p ORDER BY id DESC LIMIT ?1";

const RECORD: &str = "
    INSERT INTO purchases (product_id, user_id, number, purchased_at, created_at, created_by)
    VALUES (?1, ?2, ?3, ?4, ?5, 'weir') ON CONFLICT (product_id, user_id) DO NOTHING";
/// Never counts more than the initial stock: if too many purchases are recorded, the audit shows the difference.
const COUNT_RECORDED: &str = "
    UPDATE products SET sold = min(sold + ?2, initial_stock),
        end_reason = iif(sold + ?2 >= initial_stock AND state <> 'ENDED', 'SOLD_OUT', end_reason),
        state = iif(sold + ?2 >= initial_stock, 'ENDED', state)
    WHERE id = ?1";
const EXISTS: &str = "SELECT 1 FROM products WHERE id = ?1";
const PURCHASES: &str = "
    SELECT number, purchased_at, user_id FROM purchases WHERE product_id = ?1 AND user_id > ?2 ORDER BY user_id LIMIT ?3";
/// In order of time and number: an index has the time, and few purchases have the same.
const PURCHASES_BY_TIME: &str = "
    SELECT number, purchased_at, user_id FROM purchases
    WHERE product_id = ?1 AND (purchased_at, number) > (?2, ?3) ORDER BY purchased_at, number LIMIT ?4";

#[async_trait]
impl SaleLedger for Sqlite {
    async fn record_purchases(&self, product: ProductId, purchases: Vec<Purchase>) -> Result<Option<u64>> {
        let now = self.inner.clock.now().as_micros();
        let (mut batch, mut recorded) = (BatchInTurns::<_, ()>::new(purchases), 0);
        let record = self.inner.writer.run_in_turns(Scheduling::Interleaved, move |connection, _, turn| {
            if !connection.prepare_cached(EXISTS)?.exists([product.0])? {
                return Ok(ControlFlow::Break(None));
            }
            let (mut insert, mut new) = (connection.prepare_cached(RECORD)?, 0);
            while let Some(Purchase { buyer, receipt, .. }) = batch.next(turn) {
                let at = receipt.at.as_micros();
                new += insert.execute(params![product.0, buyer.as_str(), receipt.number, at, now])? as u64;
            }
            connection.prepare_cached(COUNT_RECORDED)?.execute(params![product.0, new])?;
            recorded += new;
            Ok(batch.finish().map_break(|_| Some(recorded)))
        });
        record.await
    }

    async fn save_decision(&self, product: &Product) -> Result<()> {
        let is_ended = product.sale.state == SaleState::Ended(EndReason::EndedByOperator);
        let (id, end, now) = (product.id.0, product.sale.terms.end, self.inner.clock.now());
        let save = move |connection: &Connection| {
            let values = params![id, end.as_micros(), is_ended, now.as_micros()];
            connection.prepare_cached(SAVE_DECISION)?.execute(values).map(drop)
        };
        self.inner.writer.run(save).await
    }

    async fn save_dead_purchases(&self, dead: Vec<DeadPurchase>) -> Result<()> {
        let now = self.inner.clock.now();
        let letters = dead.into_iter().map(|dead| DeadLetter {
            id: dead.id,
            topic: TOPIC.to_owned(),
            key: dead.sku.to_string(),
            payload: dead.payload.into_bytes(),
            reason: dead.reason,
            attempts: dead.attempts,
            died_at: now,
        });
        let letters: Vec<DeadLetter> = letters.collect();
        let mut batch = BatchInTurns::<_, ()>::new(letters);
        let insert = self.inner.writer.run_in_turns(Scheduling::Interleaved, move |connection, _, turn| {
            while let Some(letter) = batch.next(turn) {
                queue::insert_dead_letter(connection, &letter)?;
            }
            Ok(batch.finish())
        });
        insert.await.map(drop)
    }

    async fn purchases(
        &self,
        product: ProductId,
        after: Option<&UserId>,
        limit: usize,
    ) -> Result<Vec<Purchase>> {
        let after = after.map(|user| user.as_str().to_owned()).unwrap_or_default();
        let list = move |connection: &Connection| {
            let limit = i64::try_from(limit).unwrap_or(i64::MAX);
            let mut statement = connection.prepare_cached(PURCHASES)?;
            let purchases =
                statement.query_map(params![product.0, after, limit], |row| read_purchase(product, row))?;
            purchases.collect()
        };
        self.read(list).await
    }
}

#[async_trait]
impl SaleStore for Sqlite {
    async fn create_product(&self, sku: &Sku, terms: Terms) -> Result<CreateOutcome> {
        let (sku, now) = (sku.clone(), self.inner.clock.now());
        if let Err(problem) = terms.check_starts_after(now) {
            return Ok(CreateOutcome::Refused(problem));
        }
        self.inner.writer.run(move |connection| create(connection, sku, terms, now)).await
    }

    async fn product(&self, sku: &Sku) -> Result<Option<Product>> {
        let (sku, now) = (sku.clone(), self.inner.clock.now());
        self.read(move |connection| Ok(find(connection, &sku)?.map(|product| as_of(product, now)))).await
    }

    async fn products(&self, after: Option<&Sku>, limit: usize) -> Result<Vec<Product>> {
        let after = after.map(|sku| sku.as_str().to_owned()).unwrap_or_default();
        let now = self.inner.clock.now();
        let list = move |connection: &Connection| {
            let limit = i64::try_from(limit).unwrap_or(i64::MAX);
            let mut statement = connection.prepare_cached(LIST)?;
            let products = statement.query_map(params![after, limit], read)?;
            products.map(|product| Ok(as_of(product?, now))).collect()
        };
        self.read(list).await
    }

    async fn change_product(&self, sku: &Sku, change: TermsChange) -> Result<ChangeOutcome> {
        let (sku, now) = (sku.clone(), self.inner.clock.now());
        self.inner.writer.run(move |connection| change_terms(connection, &sku, &change, now)).await
    }

    async fn end_sale(&self, sku: &Sku) -> Result<EndOutcome> {
        let (sku, now) = (sku.clone(), self.inner.clock.now());
        self.inner.writer.run(move |connection| end(connection, &sku, now)).await
    }

    async fn extend_sale(&self, sku: &Sku, end: Timestamp) -> Result<ChangeOutcome> {
        let (sku, now) = (sku.clone(), self.inner.clock.now());
        self.inner.writer.run(move |connection| extend(connection, &sku, end, now)).await
    }

    async fn delete_product(&self, sku: &Sku, only_unused: bool) -> Result<DeleteOutcome> {
        let (sku, clock) = (sku.clone(), self.clock());
        let delete =
            self.inner.writer.run_in_turns(Scheduling::Interleaved, move |connection, state, turn| {
                let unused_at = only_unused.then(|| clock.now());
                delete(connection, &mut state.deleted_products, &sku, unused_at, turn)
            });
        delete.await
    }

    async fn buy_batch(&self, batch: Batch<Buy>) -> Result<Vec<BuyOutcome>> {
        // The clock is read when the job runs: a sale that ends while the job waits for the writer has ended.
        let clock = self.clock();
        let mut batch = BatchInTurns::new(batch);
        let buy = self.inner.writer.run_in_turns(Scheduling::Fifo, move |connection, state, turn| {
            loop {
                let commands = batch.next_chunk(BUY_CHUNK, turn);
                if commands.is_empty() {
                    return Ok(batch.finish());
                }
                batch.outcomes.extend(buy(connection, &state.deleted_products, &commands, clock.now())?);
            }
        });
        buy.await
    }

    async fn find_purchase(&self, buyer: &UserId, sku: Option<&Sku>) -> Result<Option<FoundPurchase>> {
        let (buyer, sku) = (buyer.clone(), sku.cloned());
        let find = move |connection: &Connection| {
            let found = match sku {
                Some(sku) => connection
                    .prepare_cached(FIND_PURCHASE)?
                    .query_row([sku.as_str(), buyer.as_str()], read_receipt)
                    .map(|receipt| FoundPurchase { sku, receipt }),
                None => connection.prepare_cached(LAST_PURCHASE)?.query_row([buyer.as_str()], |row| {
                    let sku = Sku::parse(row.get_ref(2)?.as_str()?).map_err(fault)?;
                    Ok(FoundPurchase { sku, receipt: read_receipt(row)? })
                }),
            };
            found.optional()
        };
        self.read(find).await
    }

    async fn list_purchases(
        &self,
        product: &Product,
        after: Option<PurchasePosition>,
        limit: usize,
    ) -> Result<Vec<Purchase>> {
        let product = product.id;
        let after = after.unwrap_or(PurchasePosition { at: Timestamp::EPOCH, number: 0 });
        let list = move |connection: &Connection| {
            let limit = i64::try_from(limit).unwrap_or(i64::MAX);
            let mut statement = connection.prepare_cached(PURCHASES_BY_TIME)?;
            let values = params![product.0, after.at.as_micros(), after.number, limit];
            let purchases = statement.query_map(values, |row| read_purchase(product, row))?;
            purchases.collect()
        };
        self.read(list).await
    }

    async fn snapshot(&self) -> Result<SaleSnapshot> {
        let now = self.inner.clock.now();
        let read_products = move |connection: &Connection| {
            let transaction = connection.unchecked_transaction()?;
            let mut products = Vec::new();
            for (sql, limit) in [(OPEN, SNAPSHOT_OPEN_MAX), (ENDED, SNAPSHOT_ENDED_MAX)] {
                let limit = i64::try_from(limit).unwrap_or(i64::MAX);
                let mut statement = transaction.prepare_cached(sql)?;
                for product in statement.query_map([limit], read)? {
                    products.push(as_of(product?, now));
                }
            }
            Ok(SaleSnapshot { now, products, is_current: true })
        };
        self.read(read_products).await
    }

    async fn save_due_states(&self) -> Result<()> {
        let now = self.inner.clock.now();
        let save_states = move |connection: &Connection| {
            let due: Vec<Product> = {
                let mut statement = connection.prepare_cached(DUE)?;
                statement.query_map([now.as_micros()], read)?.collect::<rusqlite::Result<_>>()?
            };
            for Product { id, sale, .. } in due.into_iter().map(|product| as_of(product, now)) {
                save(connection, id, sale.sold, sale.state)?;
            }
            Ok(())
        };
        self.inner.writer.run(save_states).await
    }

    async fn audit_sales(&self) -> Result<SaleAudit> {
        let audit = |connection: &Connection| {
            let transaction = connection.unchecked_transaction()?;
            let (products, sold, persisted) =
                transaction.query_row(TOTALS, [], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?;
            let different = differing_products(&transaction)?;
            let mut items = transaction.prepare(ITEMS)?;
            let limit = i64::try_from(AUDIT_ITEMS_MAX).unwrap_or(i64::MAX);
            let items = items.query_map([limit], read_audit)?.collect::<Result<_, _>>()?;
            Ok(SaleAudit { products, sold, persisted, different, items })
        };
        self.read(audit).await
    }
}

/// Some of the products whose purchases differ from what is sold, or exceed the stock.
pub(crate) fn differing_products(connection: &Connection) -> rusqlite::Result<Vec<String>> {
    connection.prepare(DIFFERENT)?.query_map([], |row| row.get(0))?.collect()
}

fn create(
    connection: &Connection,
    sku: Sku,
    terms: Terms,
    now: Timestamp,
) -> rusqlite::Result<CreateOutcome> {
    let values = params![
        sku.as_str(),
        &*terms.product_name,
        terms.initial_stock.get(),
        terms.start.as_micros(),
        terms.end.as_micros(),
        now.as_micros(),
    ];
    if connection.prepare_cached(CREATE)?.execute(values)? == 0 {
        return Ok(CreateOutcome::Exists);
    }
    let id = ProductId(connection.last_insert_rowid());
    Ok(CreateOutcome::Created(Product { id, sku, sale: Sale::new(terms), created_at: now }))
}

fn change_terms(
    connection: &Connection,
    sku: &Sku,
    change: &TermsChange,
    now: Timestamp,
) -> rusqlite::Result<ChangeOutcome> {
    let Some(mut product) = find(connection, sku)? else { return Ok(ChangeOutcome::UnknownSku) };
    if let Err(problem) = product.sale.change(change, now) {
        return Ok(ChangeOutcome::Refused(problem));
    }
    let Terms { product_name, initial_stock, start, end } = &product.sale.terms;
    connection.prepare_cached(CHANGE)?.execute(params![
        product.id.0,
        &**product_name,
        initial_stock.get(),
        start.as_micros(),
        end.as_micros(),
        now.as_micros(),
    ])?;
    Ok(ChangeOutcome::Changed(product))
}

fn end(connection: &Connection, sku: &Sku, now: Timestamp) -> rusqlite::Result<EndOutcome> {
    let Some(mut product) = find(connection, sku)? else { return Ok(EndOutcome::UnknownSku) };
    if !product.sale.end(now) {
        return Ok(EndOutcome::NotActive);
    }
    connection.prepare_cached(END)?.execute(params![product.id.0, now.as_micros()])?;
    Ok(EndOutcome::Ended(product))
}

fn extend(
    connection: &Connection,
    sku: &Sku,
    end: Timestamp,
    now: Timestamp,
) -> rusqlite::Result<ChangeOutcome> {
    let Some(mut product) = find(connection, sku)? else { return Ok(ChangeOutcome::UnknownSku) };
    if let Err(problem) = product.sale.extend(end, now) {
        return Ok(ChangeOutcome::Refused(problem));
    }
    let values = params![product.id.0, end.as_micros(), now.as_micros()];
    connection.prepare_cached(EXTEND)?.execute(values)?;
    Ok(ChangeOutcome::Changed(product))
}

/// Deletes a product for one turn, with `unused_at` only if it is unused then. From the first turn on buyers are answered that there is no such product. In the table
/// its sale ends first, and every turn subtracts the deleted purchases from its count, so that the audit balances even if
/// the process ends between two turns.
fn delete(
    connection: &Connection,
    deleted_products: &mut HashSet<ProductId>,
    sku: &Sku,
    unused_at: Option<Timestamp>,
    turn: &WriterTurn,
) -> rusqlite::Result<ControlFlow<DeleteOutcome>> {
    let Some(Product { id, sale, .. }) = find(connection, sku)? else {
        return Ok(ControlFlow::Break(DeleteOutcome::UnknownSku));
    };
    // The first turn decides: later ones find what is left of the product.
    if !deleted_products.contains(&id) && unused_at.is_some_and(|now| !sale.is_unused(now)) {
        return Ok(ControlFlow::Break(DeleteOutcome::InUse));
    }
    deleted_products.insert(id);
    connection.prepare_cached(END_DELETED)?.execute([id.0])?;
    let mut delete_purchases = connection.prepare_cached(DELETE_PURCHASES)?;
    while turn.has_time() {
        let deleted = delete_purchases.execute(params![id.0, DELETE_CHUNK])?;
        if deleted < DELETE_CHUNK {
            deleted_products.remove(&id);
            connection.prepare_cached(DELETE)?.execute([id.0])?;
            return Ok(ControlFlow::Break(DeleteOutcome::Deleted));
        }
        connection.prepare_cached(SUBTRACT_SOLD)?.execute(params![id.0, deleted])?;
    }
    Ok(ControlFlow::Continue(()))
}

fn buy(
    connection: &Connection,
    deleted_products: &HashSet<ProductId>,
    batch: &[Buy],
    now: Timestamp,
) -> rusqlite::Result<Vec<BuyOutcome>> {
    let mut products: HashMap<String, Product> = HashMap::new();
    for Buy { sku, .. } in batch {
        if !products.contains_key(sku.as_str())
            && let Some(product) = find(connection, sku)?
            && !deleted_products.contains(&product.id)
        {
            products.insert(sku.as_str().to_owned(), product);
        }
    }
    let mut has_purchase = connection.prepare_cached(HAS_PURCHASE)?;
    let BuyPlan { outcomes, purchases, changed } =
        plan_purchases(batch, &mut products, now, |product, buyer| {
            has_purchase.exists(params![product.id.0, buyer.as_str()])
        })?;
    let mut insert = connection.prepare_cached(INSERT)?;
    for purchase in purchases {
        let PurchaseReceipt { number, at } = purchase.receipt;
        let values =
            params![purchase.product.0, purchase.buyer.as_str(), number, at.as_micros(), now.as_micros()];
        insert.execute(values)?;
    }
    for (id, sold, state) in changed {
        save(connection, id, sold, state)?;
    }
    Ok(outcomes)
}

fn save(connection: &Connection, id: ProductId, sold: u32, state: SaleState) -> rusqlite::Result<()> {
    let reason = state.end_reason().map(EndReason::as_early_str);
    connection.prepare_cached(SAVE)?.execute(params![id.0, sold, state.as_str(), reason]).map(drop)
}

fn find(connection: &Connection, sku: &Sku) -> rusqlite::Result<Option<Product>> {
    connection.prepare_cached(FIND)?.query_row([sku.as_str()], read).optional()
}

fn as_of(mut product: Product, now: Timestamp) -> Product {
    product.sale.advance(now);
    product
}

fn read(row: &Row<'_>) -> rusqlite::Result<Product> {
    let time = |index| row.get(index).map(Timestamp::from_micros);
    let terms = Terms::new(row.get_ref(2)?.as_str()?, row.get(3)?, time(4)?, time(5)?).map_err(fault)?;
    let reason: Option<String> = row.get(7)?;
    let state = row.get_ref(6)?.as_str()?;
    let state = SaleState::parse(state, reason.as_deref())
        .ok_or_else(|| fault(format!("unknown product state {state:?} with end reason {reason:?}")))?;
    Ok(Product {
        id: ProductId(row.get(0)?),
        sku: Sku::parse(row.get_ref(1)?.as_str()?).map_err(fault)?,
        sale: Sale { terms, sold: row.get(8)?, state },
        created_at: time(9)?,
    })
}

fn read_receipt(row: &Row<'_>) -> rusqlite::Result<PurchaseReceipt> {
    Ok(PurchaseReceipt { number: row.get(0)?, at: Timestamp::from_micros(row.get(1)?) })
}

fn read_purchase(product: ProductId, row: &Row<'_>) -> rusqlite::Result<Purchase> {
    let buyer = UserId::parse(row.get_ref(2)?.as_str()?).map_err(fault)?;
    Ok(Purchase { product, buyer, receipt: read_receipt(row)? })
}

fn read_audit(row: &Row<'_>) -> rusqlite::Result<ProductAudit> {
    Ok(ProductAudit {
        sku: row.get(0)?,
        initial_stock: row.get(1)?,
        sold: row.get(2)?,
        persisted: row.get(3)?,
    })
}
