//! The books of the audit: how many rows the database has by its own count, beside what the ledgers say.
//!
//! Triggers count rows in the transactions that write them, whichever program does: a server of the version before, or an
//! operator's shell. So the books of millions of rows are read at once, and a row that is lost shows as a difference to the
//! ledgers. A recount reads the rows themselves, a table in one snapshot, and names what the counts have missed.

use std::collections::BTreeMap;

use async_trait::async_trait;
use weir_core::Timestamp;

use crate::Result;
use crate::request::RequestAudit;
use crate::sale::{AUDIT_ITEMS_MAX, ProductAudit, SaleAudit};
use crate::slot::SlotAudit;

/// The most differences that are named of one kind.
pub const DIFFERENCES_MAX: usize = 10;

/// A table whose rows are counted. The expressions name columns as `{row}column`.
#[derive(Clone, Copy, Debug)]
pub struct CountedTable {
    /// The name of its counts. Two counts may be of one table.
    pub name: &'static str,
    pub table: &'static str,
    /// What rows are counted by.
    pub kind: &'static str,
    /// What a row counts for.
    pub amount: &'static str,
    /// The columns of these that are updated. The others never change.
    pub changing: Option<&'static str>,
}

impl CountedTable {
    /// The kind of the row with this name, such as `NEW.`.
    #[must_use]
    pub fn kind_of(&self, row: &str) -> String {
        self.kind.replace("{row}", row)
    }

    /// The amount of the row with this name.
    #[must_use]
    pub fn amount_of(&self, row: &str) -> String {
        self.amount.replace("{row}", row)
    }
}

/// What one snapshot of the database says of all books.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Books {
    amounts: BTreeMap<(String, String), i64>,
    /// Products in order of creation, with their counts of purchases.
    pub products: Vec<ProductAudit>,
}

impl Books {
    /// Adds to a number of a book.
    pub fn add(&mut self, book: &str, kind: &str, amount: i64) {
        *self.amounts.entry((book.to_owned(), kind.to_owned())).or_default() += amount;
    }

    /// A number of a book. A count below zero, which only edited rows have, is 0, which is then a difference.
    #[must_use]
    pub fn amount(&self, book: &str, kind: &str) -> u64 {
        let amount = self.amounts.get(&(book.to_owned(), kind.to_owned()));
        amount.copied().and_then(|amount| u64::try_from(amount).ok()).unwrap_or(0)
    }

    /// The sum of a book over all kinds.
    #[must_use]
    pub fn total(&self, book: &str) -> u64 {
        let amounts = self.amounts.iter().filter(|((name, _), _)| name == book).map(|(_, amount)| *amount);
        u64::try_from(amounts.sum::<i64>()).unwrap_or(0)
    }

    /// How many rows a reading of all of them would take, without windows, which are fewer than slots.
    #[must_use]
    pub fn rows(&self) -> u64 {
        let tables =
            ["request_record", "queue_message", "queue_pack", "dead_letter", "rate_limit_event_slot"];
        let rows = tables.iter().map(|table| self.total(table)).sum::<u64>();
        rows + self.total("purchases") + self.total("rate_limit_store")
    }

    /// The books of request.
    #[must_use]
    pub fn requests(&self) -> RequestAudit {
        let count = |status| self.amount("request_record", status);
        RequestAudit {
            accepted: self.amount("request_ledger", "accepted"),
            completed: count("COMPLETED"),
            failed: count("FAILED_PERMANENT"),
            dead: count("FAILED_RETRY_EXHAUSTED"),
            cancelled: count("CANCELLED"),
            in_flight: count("ACCEPTED") + count("PENDING_ENQUEUE") + count("IN_PROGRESS"),
            purged: self.amount("request_ledger", "purged"),
            erased: self.amount("request_ledger", "erased"),
            jobs: self.total("request_job"),
        }
    }

    /// The books of slot. Windows are compared with their slots by recounts alone.
    #[must_use]
    pub fn slots(&self, recount: Option<&Recount>) -> SlotAudit {
        SlotAudit {
            slots: self.total("rate_limit_event_slot"),
            counted: self.total("rate_limit_window_counter"),
            different: recount.map(|recount| recount.named("slot")).unwrap_or_default(),
            above_maximum: recount.map_or(0, |recount| recount.above_maximum),
        }
    }

    /// The books of sale.
    #[must_use]
    pub fn sales(&self) -> SaleAudit {
        let newest_first = || self.products.iter().rev();
        let differs = |item: &&ProductAudit| item.sold != item.persisted || item.sold > item.initial_stock;
        let different = newest_first().filter(differs).take(DIFFERENCES_MAX);
        SaleAudit {
            products: self.products.len() as u64,
            sold: self.products.iter().map(|item| item.sold).sum(),
            persisted: self.total("purchases"),
            different: different.map(|item| item.sku.clone()).collect(),
            items: newest_first().take(AUDIT_ITEMS_MAX).cloned().collect(),
        }
    }
}

/// Something that a recount found to be wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecountDifference {
    /// `rows` for a count of rows, else the capability.
    pub book: String,
    /// The row count with both numbers, or the user, window or product.
    pub what: String,
}

impl RecountDifference {
    /// A count that is not the number of rows.
    #[must_use]
    pub fn of_rows(name: &str, kind: &str, found: i64, counted: i64) -> Self {
        let separator = if kind.is_empty() { "" } else { " " };
        let what = format!("{name}{separator}{kind}: {found} found, {counted} counted");
        Self { book: "rows".to_owned(), what }
    }
}

/// A reading of all rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recount {
    /// Every table was read as it was at this time or later.
    pub started_at: Timestamp,
    pub finished_at: Timestamp,
    pub differences: Vec<RecountDifference>,
    /// Windows with more slots than the present maximum, which is no difference.
    pub above_maximum: u64,
}

impl Recount {
    /// What was found wrong in a book.
    #[must_use]
    pub fn named(&self, book: &str) -> Vec<String> {
        let differences = self.differences.iter().filter(|difference| difference.book == book);
        differences.map(|difference| difference.what.clone()).collect()
    }
}

/// The counts that the database keeps of its rows.
#[async_trait]
pub trait BookStore: Send + Sync + 'static {
    /// Reads all books in one snapshot. Takes as long for ten million rows as for ten. `None` while rows from before the counts
    /// are still to be counted.
    async fn books(&self) -> Result<Option<Books>>;
    /// Counts what is still to be counted, and sums up what has piled up. For one call a second.
    async fn tend_counts(&self) -> Result<()>;
    /// Whether no recount was begun within `every`, on any server. If so, one counts as begun now.
    async fn claim_recount(&self, every: std::time::Duration) -> Result<bool>;
    /// Reads all rows, compares them with the counts and with each other, and stores the result for every server. Takes minutes
    /// for hundreds of millions of rows; other work goes on. `on_step` hears what is read next.
    async fn recount(&self, on_step: &(dyn Fn(&'static str) + Send + Sync)) -> Result<Recount>;
    /// The last finished recount of any server.
    async fn last_recount(&self) -> Result<Option<Recount>>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn books_add_up_and_a_negative_count_is_none() {
        let mut books = Books::default();
        books.add("t", "a", 5);
        books.add("t", "a", -2);
        books.add("t", "b", 4);
        books.add("t", "c", -6);
        assert_eq!([books.amount("t", "a"), books.amount("t", "c"), books.amount("u", "")], [3, 0, 0]);
        assert_eq!((books.total("t"), books.total("u")), (1, 0));
    }

    #[test]
    fn a_product_whose_purchases_differ_is_named() {
        let item = |sku: &str, sold, persisted| ProductAudit {
            sku: sku.to_owned(),
            initial_stock: 10,
            sold,
            persisted,
        };
        let mut books = Books { products: vec![item("a", 2, 2), item("b", 3, 2)], ..Books::default() };
        books.add("purchases", "1", 4);
        let audit = books.sales();
        assert_eq!((audit.sold, audit.persisted, audit.different), (5, 4, vec!["b".to_owned()]));
        assert_eq!(audit.items[0].sku, "b", "the newest first");
    }
}
