//! Creating, changing and deleting products.

use std::time::Duration;

use weir_core::sale::{ChangeError, SaleState, TermsChange, TermsError};
use weir_store::sale::{ChangeOutcome, CreateOutcome, DeleteOutcome};

use super::fixtures::{
    LEAD, SALE_LENGTH, buy_each, create, create_active, create_upcoming, expect_books, find_product,
    find_purchase, sku, state_and_stock, terms, terms_at,
};
use crate::HasSales;
use crate::START;
use crate::fixtures::TICK;

async fn change<H: HasSales>(h: &H, name: &str, change: TermsChange) -> ChangeOutcome {
    h.sales().change_product(&sku(name), change).await.expect("change_product must succeed")
}

async fn delete<H: HasSales>(h: &H, name: &str) -> bool {
    let outcome = h.sales().delete_product(&sku(name), false).await.expect("delete_product must succeed");
    outcome == DeleteOutcome::Deleted
}

pub async fn a_new_product_is_upcoming_with_all_its_stock<H: HasSales>() {
    let h = H::open().await;
    assert_eq!(find_product(&h, "W").await, None);
    let product = create_upcoming(&h, "W", terms(100)).await;
    assert_eq!(product.sku, sku("W"));
    assert_eq!(product.sale.terms, terms(100));
    assert_eq!((product.sale.state, product.sale.stock(), product.sale.sold), (SaleState::Upcoming, 100, 0));
    assert_eq!(product.created_at, START);
    assert_eq!(find_product(&h, "W").await, Some(product));
    expect_books(&h, 0).await;
}

pub async fn a_sku_is_taken_once<H: HasSales>() {
    let h = H::open().await;
    let first = create_upcoming(&h, "W", terms(1)).await;
    assert_eq!(create(&h, "W", terms(2)).await, CreateOutcome::Exists);
    assert_eq!(find_product(&h, "W").await, Some(first));
    let other = create_upcoming(&h, "w", terms(3)).await;
    assert_eq!(other.sale.stock(), 3, "case matters");
}

pub async fn a_sale_must_start_in_the_future<H: HasSales>() {
    let h = H::open().await;
    let end = START.plus(SALE_LENGTH);
    let refused = CreateOutcome::Refused(TermsError::StartTime);
    assert_eq!(create(&h, "W", terms_at(1, START, end)).await, refused);
    assert_eq!(find_product(&h, "W").await, None);
    let product = create_upcoming(&h, "W", terms_at(1, START.plus(TICK), end)).await;
    assert_eq!(product.sale.terms.start, START.plus(TICK));
}

pub async fn products_are_listed_by_sku<H: HasSales>() {
    let h = H::open().await;
    for name in ["b", "C", "a", "a-2", "A"] {
        create_upcoming(&h, name, terms(1)).await;
    }
    let list = async |after: Option<&str>, limit| {
        let after = after.map(sku);
        let products = h.sales().products(after.as_ref(), limit).await.expect("products must succeed");
        products.into_iter().map(|product| product.sku.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(list(None, 10).await, ["A", "C", "a", "a-2", "b"]);
    assert_eq!(list(Some("C"), 2).await, ["a", "a-2"]);
    assert!(list(Some("b"), 2).await.is_empty());
}

pub async fn terms_change_until_the_start<H: HasSales>() {
    let h = H::open().await;
    let before = create_upcoming(&h, "W", terms(5)).await;
    let more = TermsChange {
        product_name: Some("Super Widget".into()),
        initial_stock: Some(7),
        ..TermsChange::default()
    };
    let ChangeOutcome::Changed(after) = change(&h, "W", more.clone()).await else {
        panic!("an upcoming sale must change")
    };
    assert_eq!((&*after.sale.terms.product_name, after.sale.stock()), ("Super Widget", 7));
    assert_eq!(
        (after.id, after.created_at, after.sale.terms.start),
        (before.id, START, before.sale.terms.start)
    );
    assert_eq!(find_product(&h, "W").await, Some(after.clone()));
    let past = TermsChange { start: Some(START), ..TermsChange::default() };
    let refused = ChangeOutcome::Refused(ChangeError::Terms(TermsError::StartTime));
    assert_eq!(change(&h, "W", past).await, refused);
    h.clock().advance(LEAD - TICK);
    let earlier_end = TermsChange { end: Some(START.plus(LEAD + TICK)), ..TermsChange::default() };
    assert!(matches!(change(&h, "W", earlier_end).await, ChangeOutcome::Changed(_)));
    h.clock().advance(TICK);
    let refused = ChangeOutcome::Refused(ChangeError::NotModifiable);
    assert_eq!(change(&h, "W", more.clone()).await, refused, "it is active");
    assert_eq!(buy_each(&h, "W", &["a"]).await, "B");
    h.clock().advance(TICK);
    assert_eq!(change(&h, "W", more).await, refused, "it has ended");
    assert_eq!(buy_each(&h, "W", &["b"]).await, "N");
}

pub async fn an_unknown_product_cannot_be_changed_or_deleted<H: HasSales>() {
    let h = H::open().await;
    assert_eq!(change(&h, "W", TermsChange::default()).await, ChangeOutcome::UnknownSku);
    assert!(!delete(&h, "W").await);
}

pub async fn a_deleted_product_is_gone_with_its_purchases<H: HasSales>() {
    let h = H::open().await;
    create_active(&h, "W", 5).await;
    create_active(&h, "X", 5).await;
    assert_eq!(buy_each(&h, "W", &["a", "b"]).await, "BB");
    assert_eq!(buy_each(&h, "X", &["a"]).await, "B");
    expect_books(&h, 3).await;
    assert!(delete(&h, "W").await);
    assert!(!delete(&h, "W").await);
    assert_eq!(find_product(&h, "W").await, None);
    assert_eq!(find_purchase(&h, "W", "a").await, None);
    assert_eq!(buy_each(&h, "W", &["c"]).await, "U");
    assert_eq!(find_purchase(&h, "X", "a").await.map(|receipt| receipt.number), Some(1));
    expect_books(&h, 1).await;
}

pub async fn a_product_created_again_starts_anew<H: HasSales>() {
    let h = H::open().await;
    let first = create_active(&h, "W", 2).await;
    assert_eq!(buy_each(&h, "W", &["a", "b", "c"]).await, "BBS");
    assert!(delete(&h, "W").await);
    h.clock().advance(Duration::from_secs(1));
    let second = create_active(&h, "W", 3).await;
    assert_ne!(first.id, second.id, "a new product under the same sku");
    assert_eq!(state_and_stock(&h, "W").await, (SaleState::Active, 3));
    assert_eq!(find_purchase(&h, "W", "a").await, None);
    assert_eq!(buy_each(&h, "W", &["a", "a"]).await, "BA");
    assert_eq!(find_purchase(&h, "W", "a").await.map(|receipt| receipt.number), Some(1));
    expect_books(&h, 1).await;
}
