//! Helpers for the cases of sale.

use std::time::{Duration, Instant};

use weir_core::sale::{PurchaseReceipt, PurchaseRefusal, SaleState, Sku, Terms};
use weir_core::{Clock, Timestamp, UserId};
use weir_store::sale::{AttemptLimits, Buy, BuyOutcome, CreateOutcome, Product, SaleStore};

use crate::HasSales;
use crate::START;

/// Time from the creation of a product to the start of its sale.
pub const LEAD: Duration = Duration::from_secs(60);
/// Time from the start to the end of a sale.
pub const SALE_LENGTH: Duration = Duration::from_secs(600);

pub fn sku(text: &str) -> Sku {
    Sku::parse(text).expect("the suite's skus are valid")
}

/// Terms of a sale that starts [`LEAD`] after [`START`] and lasts for [`SALE_LENGTH`].
pub fn terms(stock: u32) -> Terms {
    terms_at(stock, START.plus(LEAD), START.plus(LEAD + SALE_LENGTH))
}

pub fn terms_at(stock: u32, start: Timestamp, end: Timestamp) -> Terms {
    Terms::new("Limited Edition Widget", stock, start, end).expect("the suite's terms are valid")
}

pub fn buy_command(name: &str, buyer: &str) -> Buy {
    let buyer = UserId::parse(buyer).expect("the suite's buyers are valid");
    Buy { sku: sku(name), buyer, limits: AttemptLimits::default() }
}

/// Commands of `count` buyers whose ids begin with `prefix`.
pub fn buy_commands(name: &str, prefix: &str, count: usize) -> Vec<Buy> {
    (0..count).map(|n| buy_command(name, &format!("{prefix}-{n}"))).collect()
}

pub async fn create<H: HasSales>(h: &H, name: &str, terms: Terms) -> CreateOutcome {
    h.sales().create_product(&sku(name), terms).await.expect("create_product must succeed")
}

/// Creates a product, which must succeed.
pub async fn create_upcoming<H: HasSales>(h: &H, name: &str, terms: Terms) -> Product {
    match create(h, name, terms).await {
        CreateOutcome::Created(product) => product,
        other => panic!("the product must be created, not {other:?}"),
    }
}

/// Creates a product and advances the clock to the start of its sale.
pub async fn create_active<H: HasSales>(h: &H, name: &str, stock: u32) -> Product {
    let now = h.clock().now();
    let product =
        create_upcoming(h, name, terms_at(stock, now.plus(LEAD), now.plus(LEAD + SALE_LENGTH))).await;
    h.clock().advance(LEAD);
    product
}

pub async fn find_product<H: HasSales>(h: &H, name: &str) -> Option<Product> {
    h.sales().product(&sku(name)).await.expect("product must succeed")
}

/// State and stock of a product, which must exist.
pub async fn state_and_stock<H: HasSales>(h: &H, name: &str) -> (SaleState, u32) {
    let product = find_product(h, name).await.expect("the product must be there");
    (product.sale.state, product.sale.stock())
}

/// Buys a batch and checks that there is one outcome for each command.
pub async fn buy_batch<H: HasSales>(h: &H, batch: Vec<Buy>) -> Vec<BuyOutcome> {
    let count = batch.len();
    let outcomes = h.sales().buy_batch(batch.into()).await.expect("buy_batch must succeed");
    assert_eq!(outcomes.len(), count, "one outcome for each command");
    outcomes
}

/// The receipts of the buyers that got a unit.
pub fn receipts(outcomes: &[BuyOutcome]) -> Vec<PurchaseReceipt> {
    let receipt = |outcome: &BuyOutcome| match outcome {
        BuyOutcome::Bought { receipt, .. } => Some(*receipt),
        BuyOutcome::Refused(_) | BuyOutcome::UnknownSku | BuyOutcome::Throttled { .. } => None,
    };
    outcomes.iter().filter_map(receipt).collect()
}

/// Each outcome as a letter: Bought, Already purchased, Sold out, Not active, Unknown, Throttled.
pub fn outcome_letters(outcomes: &[BuyOutcome]) -> String {
    let letter = |outcome: &BuyOutcome| match outcome {
        BuyOutcome::Bought { .. } => 'B',
        BuyOutcome::Refused(PurchaseRefusal::AlreadyPurchased) => 'A',
        BuyOutcome::Refused(PurchaseRefusal::SoldOut) => 'S',
        BuyOutcome::Refused(PurchaseRefusal::NotActive) => 'N',
        BuyOutcome::UnknownSku => 'U',
        BuyOutcome::Throttled { .. } => 'T',
    };
    outcomes.iter().map(letter).collect()
}

/// Buys for one buyer after the other. Returns the outcomes as letters.
pub async fn buy_each<H: HasSales>(h: &H, name: &str, buyers: &[&str]) -> String {
    let mut outcomes = Vec::new();
    for buyer in buyers {
        outcomes.extend(buy_batch(h, vec![buy_command(name, buyer)]).await);
    }
    outcome_letters(&outcomes)
}

pub async fn find_purchase<H: HasSales>(h: &H, name: &str, buyer: &str) -> Option<PurchaseReceipt> {
    let Buy { sku, buyer, .. } = buy_command(name, buyer);
    let found = h.sales().find_purchase(&buyer, Some(&sku)).await.expect("find_purchase must succeed");
    found.map(|found| {
        assert_eq!(found.sku, sku, "the purchase of the product that was asked for");
        found.receipt
    })
}

/// Waits until the ledger has every purchase of an engine that writes behind.
pub async fn wait_until_persisted(sales: &dyn SaleStore, timeout: Duration) {
    let give_up_at = Instant::now() + timeout;
    loop {
        let books = sales.audit_sales().await.expect("audit_sales must succeed");
        if books.sold == books.persisted && books.different.is_empty() {
            return;
        }
        assert!(Instant::now() < give_up_at, "every purchase must be persisted: {books:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Asserts that the audit finds no difference and that `sold` units are sold.
pub async fn expect_books<H: HasSales>(h: &H, sold: u64) {
    h.wait_until_persisted().await;
    let books = h.sales().audit_sales().await.expect("audit_sales must succeed");
    assert_eq!((books.sold, books.persisted), (sold, sold), "every purchase is persisted: {books:?}");
    assert!(books.different.is_empty(), "counts equal purchases: {books:?}");
    for item in &books.items {
        assert!(item.sold == item.persisted && item.sold <= item.initial_stock, "{item:?}");
    }
    crate::books::expect_counts(h).await;
}
