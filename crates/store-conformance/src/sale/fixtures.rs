//! What cases of sale start from.

use std::time::{Duration, Instant};

use weir_core::sale::{PurchaseReceipt, PurchaseRefusal, SaleState, Sku, Terms};
use weir_core::{Clock, Timestamp, UserId};
use weir_store::sale::{Buy, BuyOutcome, CreateOutcome, Product, SaleStore};

use crate::HasSales;
use crate::START;

/// How long after the beginning of a case its sales begin.
pub const LEAD: Duration = Duration::from_secs(60);
/// How long they last.
pub const SALE_LENGTH: Duration = Duration::from_secs(600);

/// A product's name.
pub fn sku(text: &str) -> Sku {
    Sku::parse(text).expect("the suite's skus are valid")
}

/// Terms of a sale that begins [`LEAD`] after the clock's first time and lasts for [`SALE_LENGTH`].
pub fn terms(stock: u32) -> Terms {
    terms_at(stock, START.plus(LEAD), START.plus(LEAD + SALE_LENGTH))
}

/// Terms of a sale between two times.
pub fn terms_at(stock: u32, start: Timestamp, end: Timestamp) -> Terms {
    Terms::new("Limited Edition Widget", stock, start, end).expect("the suite's terms are valid")
}

/// A wish of a buyer for a unit.
pub fn buy_command(name: &str, buyer: &str) -> Buy {
    Buy { sku: sku(name), buyer: UserId::parse(buyer).expect("the suite's buyers are valid") }
}

/// Wishes of `count` buyers named after `prefix`.
pub fn buy_commands(name: &str, prefix: &str, count: usize) -> Vec<Buy> {
    (0..count).map(|n| buy_command(name, &format!("{prefix}-{n}"))).collect()
}

/// What became of a new product.
pub async fn create<H: HasSales>(h: &H, name: &str, terms: Terms) -> CreateOutcome {
    h.sales().create_product(&sku(name), terms).await.expect("create_product must succeed")
}

/// A product whose sale is still to come.
pub async fn create_upcoming<H: HasSales>(h: &H, name: &str, terms: Terms) -> Product {
    match create(h, name, terms).await {
        CreateOutcome::Created(product) => product,
        other => panic!("the product must be made, not {other:?}"),
    }
}

/// A product whose sale has just begun. The clock goes to its start.
pub async fn create_active<H: HasSales>(h: &H, name: &str, stock: u32) -> Product {
    let now = h.clock().now();
    let product =
        create_upcoming(h, name, terms_at(stock, now.plus(LEAD), now.plus(LEAD + SALE_LENGTH))).await;
    h.clock().advance(LEAD);
    product
}

/// A product as it stands.
pub async fn find_product<H: HasSales>(h: &H, name: &str) -> Option<Product> {
    h.sales().product(&sku(name)).await.expect("product must succeed")
}

/// The state of a product that is there, and its stock.
pub async fn state_and_stock<H: HasSales>(h: &H, name: &str) -> (SaleState, u32) {
    let product = find_product(h, name).await.expect("the product must be there");
    (product.sale.state, product.sale.stock())
}

/// What became of a batch; there must be one outcome for each wish.
pub async fn buy_batch<H: HasSales>(h: &H, batch: Vec<Buy>) -> Vec<BuyOutcome> {
    let count = batch.len();
    let outcomes = h.sales().buy_batch(batch.into()).await.expect("buy_batch must succeed");
    assert_eq!(outcomes.len(), count, "one outcome for each wish");
    outcomes
}

/// The receipts of those who got a unit.
pub fn receipts(outcomes: &[BuyOutcome]) -> Vec<PurchaseReceipt> {
    let receipt = |outcome: &BuyOutcome| match outcome {
        BuyOutcome::Bought { receipt, .. } => Some(*receipt),
        BuyOutcome::Refused(_) | BuyOutcome::UnknownSku => None,
    };
    outcomes.iter().filter_map(receipt).collect()
}

/// Each outcome in a letter: Bought, Already purchased, Sold out, Not active, Unknown.
pub fn outcome_letters(outcomes: &[BuyOutcome]) -> String {
    let letter = |outcome: &BuyOutcome| match outcome {
        BuyOutcome::Bought { .. } => 'B',
        BuyOutcome::Refused(PurchaseRefusal::AlreadyPurchased) => 'A',
        BuyOutcome::Refused(PurchaseRefusal::SoldOut) => 'S',
        BuyOutcome::Refused(PurchaseRefusal::NotActive) => 'N',
        BuyOutcome::UnknownSku => 'U',
    };
    outcomes.iter().map(letter).collect()
}

/// Buys one after the other, and what became of it in letters.
pub async fn buy_each<H: HasSales>(h: &H, name: &str, buyers: &[&str]) -> String {
    let mut outcomes = Vec::new();
    for buyer in buyers {
        outcomes.extend(buy_batch(h, vec![buy_command(name, buyer)]).await);
    }
    outcome_letters(&outcomes)
}

/// A buyer's purchase of a product.
pub async fn find_purchase<H: HasSales>(h: &H, name: &str, buyer: &str) -> Option<PurchaseReceipt> {
    let Buy { sku, buyer } = buy_command(name, buyer);
    h.sales().find_purchase(&buyer, Some(&sku)).await.expect("find_purchase must succeed")
}

/// Waits until everything that an engine has sold is written down.
pub async fn wait_until_persisted(sales: &dyn SaleStore, patience: Duration) {
    let give_up_at = Instant::now() + patience;
    loop {
        let books = sales.audit_sales().await.expect("audit_sales must succeed");
        if books.sold == books.persisted && books.different.is_empty() {
            return;
        }
        assert!(Instant::now() < give_up_at, "everything sold must be written down: {books:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The books balance, and so many units are sold.
pub async fn expect_books<H: HasSales>(h: &H, sold: u64) {
    h.wait_until_persisted().await;
    let books = h.sales().audit_sales().await.expect("audit_sales must succeed");
    assert_eq!((books.sold, books.persisted), (sold, sold), "everything sold is written down: {books:?}");
    assert!(books.different.is_empty(), "counts equal purchases: {books:?}");
    for item in &books.items {
        assert!(item.sold == item.persisted && item.sold <= item.initial_stock, "{item:?}");
    }
}
