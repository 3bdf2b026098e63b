//! Sale in Postgres: products, and what is read. How a batch buys stands in `sale/buy.rs`.
//!
//! Whoever sells holds the product's row until the commit, so purchases of one product follow each other, whichever server
//! they came to. The rows of a batch are locked in order of sku; whoever removes a product locks its row first.

mod buy;
mod record;

use std::time::SystemTime;

use async_trait::async_trait;
use futures_util::future::{try_join, try_join3};
use tokio_postgres::types::ToSql;
use tokio_postgres::{Row, Statement};
use weir_core::sale::{Change, Receipt, Sale, Sku, State, Terms};
use weir_core::{Timestamp, UserId};
use weir_store::sale::{
    BOARD_ENDED_MAX, BOARD_OPEN_MAX, BOOKS_ITEMS_MAX, Board, Books, Buy, BuyOutcome, ChangeOutcome,
    CreateOutcome, DeadPurchase, Product, ProductBooks, ProductId, Purchase, SaleLedger, SaleStore,
};
use weir_store::{Batch, Error, Result};

use crate::pool::Session;
use crate::quota::{column, int, unsigned};
use crate::{ENGINE, Postgres, time};

macro_rules! columns {
    () => {
        "id, sku, product_name, initial_stock, start_time, end_time, state, end_reason, sold, created_at"
    };
}

const CREATE: &str = concat!(
    "INSERT INTO products (sku, product_name, initial_stock, start_time, end_time, created_at, created_by)
     VALUES ($1, $2, $3, $4, $5, $6, 'admin') ON CONFLICT (sku) DO NOTHING
     RETURNING ",
    columns!()
);
const FIND: &str = concat!("SELECT ", columns!(), " FROM products WHERE sku = $1");
const LOCK: &str = concat!("SELECT ", columns!(), " FROM products WHERE sku = $1 FOR UPDATE");
const LIST: &str = concat!("SELECT ", columns!(), " FROM products WHERE sku > $1 ORDER BY sku LIMIT $2");
/// Two branches, so that each is a walk along its index.
const BOARD: &str = concat!(
    "(SELECT ",
    columns!(),
    " FROM products WHERE state = 'ACTIVE' ORDER BY start_time LIMIT $1)
    UNION ALL (SELECT ",
    columns!(),
    " FROM products WHERE state = 'UPCOMING' ORDER BY start_time LIMIT $1)
    UNION ALL (SELECT ",
    columns!(),
    " FROM products WHERE state = 'ENDED' ORDER BY end_time DESC LIMIT $2)"
);
const CHANGE: &str = "
    UPDATE products SET product_name = $2, initial_stock = $3, start_time = $4, end_time = $5, updated_at = $6,
        updated_by = 'admin' WHERE id = $1";
const FORGET_PURCHASES: &str = "DELETE FROM purchases WHERE product_id = $1";
const DELETE: &str = "DELETE FROM products WHERE id = $1";
const FIND_PURCHASE: &str = "
    SELECT number, purchased_at FROM purchases
    WHERE product_id = (SELECT id FROM products WHERE sku = $1) AND user_id = $2";
const LAST_PURCHASE: &str = "
    SELECT number, purchased_at FROM purchases WHERE user_id = $1 ORDER BY purchased_at DESC, id DESC LIMIT 1";
/// What somebody else holds is being sold from, and turned by whoever does.
const TURN: &str = "
    WITH begun AS (
        SELECT id FROM products WHERE state = 'UPCOMING' AND start_time <= coalesce($1, clock_timestamp())
        ORDER BY start_time LIMIT 1000 FOR NO KEY UPDATE SKIP LOCKED),
    over AS (
        SELECT id FROM products WHERE state = 'ACTIVE' AND end_time <= coalesce($1, clock_timestamp())
        ORDER BY end_time LIMIT 1000 FOR NO KEY UPDATE SKIP LOCKED),
    due AS (SELECT id FROM begun UNION ALL SELECT id FROM over)
    UPDATE products p
    SET state = CASE WHEN p.end_time <= coalesce($1, clock_timestamp()) THEN 'ENDED' ELSE 'ACTIVE' END,
        end_reason = CASE WHEN p.end_time <= coalesce($1, clock_timestamp()) THEN 'TIME_EXPIRED' END
    FROM due WHERE p.id = ANY(ARRAY[due.id]) AND p.state <> 'ENDED'";
const AUDIT: &str = "
    SELECT (SELECT count(*) FROM products), (SELECT coalesce(sum(sold), 0)::bigint FROM products),
           (SELECT count(*) FROM purchases),
           ARRAY(SELECT sku::text FROM products p
                 WHERE sold <> (SELECT count(*) FROM purchases u WHERE u.product_id = p.id) OR sold > initial_stock
                 ORDER BY id DESC LIMIT 10)";
const ITEMS: &str = "
    SELECT sku, initial_stock, sold, (SELECT count(*) FROM purchases u WHERE u.product_id = p.id)
    FROM products p ORDER BY id DESC LIMIT $1";

/// In the order of [`Statements::from_prepared`].
pub(crate) fn sql() -> impl Iterator<Item = &'static str> {
    [
        CREATE,
        FIND,
        LOCK,
        LIST,
        BOARD,
        CHANGE,
        FORGET_PURCHASES,
        DELETE,
        FIND_PURCHASE,
        LAST_PURCHASE,
        TURN,
        AUDIT,
        ITEMS,
    ]
    .into_iter()
    .chain(buy::SQL)
    .chain(record::SQL)
}

#[derive(Debug)]
pub(crate) struct Statements {
    create: Statement,
    find: Statement,
    lock: Statement,
    list: Statement,
    board: Statement,
    change: Statement,
    forget_purchases: Statement,
    delete: Statement,
    find_purchase: Statement,
    last_purchase: Statement,
    turn: Statement,
    audit: Statement,
    items: Statement,
    buy: buy::Statements,
    record: record::Statements,
}

impl Statements {
    pub(crate) fn from_prepared(next: &mut impl FnMut() -> Statement) -> Self {
        Self {
            create: next(),
            find: next(),
            lock: next(),
            list: next(),
            board: next(),
            change: next(),
            forget_purchases: next(),
            delete: next(),
            find_purchase: next(),
            last_purchase: next(),
            turn: next(),
            audit: next(),
            items: next(),
            buy: buy::Statements::from_prepared(next),
            record: record::Statements::from_prepared(next),
        }
    }
}

#[async_trait]
impl SaleLedger for Postgres {
    async fn record_purchases(&self, product: ProductId, purchases: Vec<Purchase>) -> Result<Option<u64>> {
        record::record(self, product, &purchases).await
    }

    async fn bury_purchases(&self, dead: Vec<DeadPurchase>) -> Result<()> {
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
        let session = self.inner.pool.sale_session().await?;
        let (client, statements) = (&session.client, &session.statements);
        let now = self.now(&session.bounded(client.query_one(&statements.clock, &[])).await?)?;
        if let Err(problem) = terms.must_begin_after(now) {
            session.keep();
            return Ok(CreateOutcome::Refused(problem));
        }
        let (start, end) = (time::to_system(terms.start), time::to_system(terms.end));
        let (stock, at) = (int(terms.initial_stock.get()), time::to_system(now));
        let values: [&(dyn ToSql + Sync); 6] =
            [&sku.as_str(), &&*terms.product_name, &stock, &start, &end, &at];
        let row = session.bounded(client.query_opt(&statements.sale.create, &values)).await?;
        session.keep();
        Ok(match row {
            Some(row) => CreateOutcome::Created(read(&row)?),
            None => CreateOutcome::Exists,
        })
    }

    async fn product(&self, sku: &Sku) -> Result<Option<Product>> {
        let session = self.inner.pool.sale_session().await?;
        let (client, statements) = (&session.client, &session.statements);
        let (clock, row) = session
            .bounded(try_join(
                client.query_one(&statements.clock, &[]),
                client.query_opt(&statements.sale.find, &[&sku.as_str()]),
            ))
            .await?;
        session.keep();
        let now = self.now(&clock)?;
        row.map(|row| Ok(as_of(read(&row)?, now))).transpose()
    }

    async fn products(&self, after: Option<&Sku>, limit: usize) -> Result<Vec<Product>> {
        let (after, limit) = (after.map_or("", Sku::as_str), i64::try_from(limit).unwrap_or(i64::MAX));
        let board = self.list(|statements| &statements.list, &[&after, &limit]).await?;
        Ok(board.products)
    }

    async fn change_product(&self, sku: &Sku, change: Change) -> Result<ChangeOutcome> {
        let session = self.inner.pool.sale_session().await?;
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
        session.bounded(session.client.batch_execute("COMMIT")).await?;
        session.keep();
        Ok(outcome)
    }

    async fn delete_product(&self, sku: &Sku) -> Result<bool> {
        let session = self.inner.pool.sale_session().await?;
        let (_, product) = lock(&session, sku).await?;
        let (client, statements) = (&session.client, &session.statements.sale);
        if let Some(Product { id, .. }) = &product {
            session.bounded(client.execute(&statements.forget_purchases, &[&id.0])).await?;
            session.bounded(client.execute(&statements.delete, &[&id.0])).await?;
        }
        session.bounded(client.batch_execute("COMMIT")).await?;
        session.keep();
        Ok(product.is_some())
    }

    async fn buy_batch(&self, batch: Batch<Buy>) -> Result<Vec<BuyOutcome>> {
        buy::buy(self, batch).await
    }

    async fn find_purchase(&self, buyer: &UserId, sku: Option<&Sku>) -> Result<Option<Receipt>> {
        let session = self.inner.pool.sale_session().await?;
        let (client, statements) = (&session.client, &session.statements.sale);
        let row = match sku {
            Some(sku) => {
                let values: [&(dyn ToSql + Sync); 2] = [&sku.as_str(), &buyer.as_str()];
                session.bounded(client.query_opt(&statements.find_purchase, &values)).await?
            }
            None => session.bounded(client.query_opt(&statements.last_purchase, &[&buyer.as_str()])).await?,
        };
        session.keep();
        row.map(|row| {
            Ok(Receipt { number: unsigned(column(&row, 0)?), at: time::from_system(column(&row, 1)?) })
        })
        .transpose()
    }

    async fn board(&self) -> Result<Board> {
        let (open, ended) = (BOARD_OPEN_MAX as i64, BOARD_ENDED_MAX as i64);
        self.list(|statements| &statements.board, &[&open, &ended]).await
    }

    async fn turn_sales(&self) -> Result<()> {
        let session = self.inner.pool.sale_session().await?;
        let now = self.clock_override();
        let statement = &session.statements.sale.turn;
        session.bounded(session.client.execute(statement, &[&now])).await?;
        session.keep();
        Ok(())
    }

    async fn audit_sales(&self) -> Result<Books> {
        let session = self.inner.pool.sale_session().await?;
        let (client, statements) = (&session.client, &session.statements.sale);
        let limit = BOOKS_ITEMS_MAX as i64;
        // One moment for both: what is sold in between must not look like a difference.
        let (_, row, items) = session
            .bounded(try_join3(
                client.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"),
                client.query_one(&statements.audit, &[]),
                client.query(&statements.items, &[&limit]),
            ))
            .await?;
        session.bounded(client.batch_execute("COMMIT")).await?;
        session.keep();
        let count = |index| column::<i64>(&row, index).map(i64::unsigned_abs);
        Ok(Books {
            products: count(0)?,
            sold: count(1)?,
            persisted: count(2)?,
            different: column(&row, 3)?,
            items: items.iter().map(read_books).collect::<Result<_>>()?,
        })
    }
}

impl Postgres {
    /// Products as they stand, and the time.
    async fn list(
        &self,
        statement: fn(&Statements) -> &Statement,
        values: &[&(dyn ToSql + Sync)],
    ) -> Result<Board> {
        let session = self.inner.pool.sale_session().await?;
        let (client, statements) = (&session.client, &session.statements);
        let (clock, rows) = session
            .bounded(try_join(
                client.query_one(&statements.clock, &[]),
                client.query(statement(&statements.sale), values),
            ))
            .await?;
        session.keep();
        let now = self.now(&clock)?;
        let products = rows.iter().map(|row| Ok(as_of(read(row)?, now))).collect::<Result<_>>()?;
        Ok(Board { now, products, is_current: true })
    }
}

/// Begins a transaction in which a product's row is ours. The clock is read behind the lock.
async fn lock(session: &Session, sku: &Sku) -> Result<(Row, Option<Product>)> {
    let (client, statements) = (&session.client, &session.statements);
    let values: [&(dyn ToSql + Sync); 1] = [&sku.as_str()];
    let (_, row, clock) = session
        .bounded(try_join3(
            client.batch_execute("BEGIN"),
            client.query_opt(&statements.sale.lock, &values),
            client.query_one(&statements.clock, &[]),
        ))
        .await?;
    Ok((clock, row.as_ref().map(read).transpose()?))
}

async fn write_terms(session: &Session, product: &Product, now: SystemTime) -> Result<()> {
    let terms = &product.sale.terms;
    let (start, end) = (time::to_system(terms.start), time::to_system(terms.end));
    let stock = int(terms.initial_stock.get());
    let values: [&(dyn ToSql + Sync); 6] = [&product.id.0, &&*terms.product_name, &stock, &start, &end, &now];
    let statement = &session.statements.sale.change;
    session.bounded(session.client.execute(statement, &values)).await.map(drop)
}

fn as_of(mut product: Product, now: Timestamp) -> Product {
    product.sale.turn(now);
    product
}

fn read(row: &Row) -> Result<Product> {
    let time = |index| column(row, index).map(time::from_system);
    let stock = unsigned(column(row, 3)?);
    let terms = Terms::new(column(row, 2)?, stock, time(4)?, time(5)?).map_err(unreadable)?;
    let state = State::parse(column(row, 6)?, column(row, 7)?)
        .ok_or_else(|| unreadable("a product has a state that there is not"))?;
    Ok(Product {
        id: ProductId(column(row, 0)?),
        sku: Sku::parse(column::<&str>(row, 1)?).map_err(unreadable)?,
        sale: Sale { terms, sold: unsigned(column(row, 8)?), state },
        created_at: time(9)?,
    })
}

fn read_books(row: &Row) -> Result<ProductBooks> {
    let units = |index| column(row, index).map(|units| u64::from(unsigned(units)));
    Ok(ProductBooks {
        sku: column(row, 0)?,
        initial_stock: units(1)?,
        sold: units(2)?,
        persisted: column::<i64>(row, 3)?.unsigned_abs(),
    })
}

/// A row that only somebody's edit can hold.
fn unreadable(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::failed(ENGINE, cause)
}
