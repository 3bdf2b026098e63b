//! What operators do: ending and extending sales, deleting only what is unused, and listing purchases.

use std::sync::Arc;
use std::time::Duration;

use weir_core::sale::{ChangeError, EndReason, SaleState, TermsError};
use weir_core::{Clock, Timestamp};
use weir_store::sale::{ChangeOutcome, DeleteOutcome, EndOutcome, PurchasePosition};

use super::fixtures::{
    LEAD, SALE_LENGTH, buy_batch, buy_commands, buy_each, create_active, create_upcoming, expect_books,
    find_product, receipts, sku, state_and_stock, terms, terms_at,
};
use crate::HasSales;
use crate::START;
use crate::fixtures::{TICK, run_concurrently};

const BY_OPERATOR: SaleState = SaleState::Ended(EndReason::EndedByOperator);

async fn end<H: HasSales>(h: &H, name: &str) -> EndOutcome {
    h.sales().end_sale(&sku(name)).await.expect("end_sale must succeed")
}

async fn extend<H: HasSales>(h: &H, name: &str, end: Timestamp) -> ChangeOutcome {
    h.sales().extend_sale(&sku(name), end).await.expect("extend_sale must succeed")
}

async fn delete_unused<H: HasSales>(h: &H, name: &str) -> DeleteOutcome {
    h.sales().delete_product(&sku(name), true).await.expect("delete_product must succeed")
}

pub async fn an_operator_ends_an_active_sale_for_ever<H: HasSales>() {
    let h = H::open().await;
    assert_eq!(end(&h, "W").await, EndOutcome::UnknownSku);
    create_upcoming(&h, "W", terms(5)).await;
    assert_eq!(end(&h, "W").await, EndOutcome::NotActive, "it has not begun");
    h.clock().advance(LEAD);
    assert_eq!(buy_each(&h, "W", &["a"]).await, "B");
    let EndOutcome::Ended(product) = end(&h, "W").await else { panic!("an active sale ends") };
    assert_eq!((product.sale.state, product.sale.sold), (BY_OPERATOR, 1));
    assert_eq!(find_product(&h, "W").await, Some(product));
    assert_eq!(buy_each(&h, "W", &["a", "b"]).await, "AN");
    assert_eq!(end(&h, "W").await, EndOutcome::NotActive, "it has ended");
    let snapshot = h.sales().snapshot().await.expect("snapshot must succeed");
    assert_eq!(snapshot.products[0].sale.state_at(snapshot.now), BY_OPERATOR);
    h.clock().advance(SALE_LENGTH);
    h.sales().save_due_states().await.expect("save_due_states must succeed");
    assert_eq!(
        state_and_stock(&h, "W").await,
        (BY_OPERATOR, 4),
        "the time is over, too, and that changes nothing"
    );
    expect_books(&h, 1).await;
    let h = h.reopen().await;
    assert_eq!(state_and_stock(&h, "W").await, (BY_OPERATOR, 4));
    assert_eq!(buy_each(&h, "W", &["c"]).await, "N");
}

pub async fn a_sale_that_was_over_or_sold_out_is_not_ended_again<H: HasSales>() {
    let h = H::open().await;
    create_active(&h, "SOLD-OUT", 1).await;
    assert_eq!(buy_each(&h, "SOLD-OUT", &["a"]).await, "B");
    create_active(&h, "EXPIRED", 1).await;
    h.clock().advance(SALE_LENGTH);
    for (name, reason, stock) in [("SOLD-OUT", EndReason::SoldOut, 0), ("EXPIRED", EndReason::TimeExpired, 1)]
    {
        assert_eq!(end(&h, name).await, EndOutcome::NotActive);
        assert_eq!(state_and_stock(&h, name).await, (SaleState::Ended(reason), stock));
    }
}

pub async fn a_sale_is_extended_until_it_has_ended<H: HasSales>() {
    let h = H::open().await;
    let (first, later) = (START.plus(LEAD + SALE_LENGTH), START.plus(LEAD + SALE_LENGTH * 2));
    assert_eq!(extend(&h, "W", later).await, ChangeOutcome::UnknownSku);
    create_upcoming(&h, "W", terms(5)).await;
    let not_later = ChangeOutcome::Refused(ChangeError::Terms(TermsError::NotExtended));
    assert_eq!(extend(&h, "W", first).await, not_later);
    assert!(matches!(extend(&h, "W", first.plus(TICK)).await, ChangeOutcome::Changed(_)), "before the start");
    h.clock().advance(LEAD);
    assert_eq!(buy_each(&h, "W", &["a"]).await, "B");
    let ChangeOutcome::Changed(product) = extend(&h, "W", later).await else { panic!("it is extended") };
    assert_eq!(
        (product.sale.terms.end, product.sale.state, product.sale.sold),
        (later, SaleState::Active, 1)
    );
    assert_eq!(find_product(&h, "W").await, Some(product));
    assert_eq!(extend(&h, "W", later).await, not_later);
    h.clock().advance(SALE_LENGTH * 2 - TICK);
    h.sales().save_due_states().await.expect("save_due_states must succeed");
    assert_eq!(buy_each(&h, "W", &["b"]).await, "B", "after the first end");
    let h = h.reopen().await;
    assert_eq!(buy_each(&h, "W", &["c"]).await, "B");
    h.clock().advance(TICK);
    assert_eq!(buy_each(&h, "W", &["d"]).await, "N");
    let ended = ChangeOutcome::Refused(ChangeError::NotModifiable);
    assert_eq!(extend(&h, "W", later.plus(SALE_LENGTH)).await, ended);
    assert_eq!(state_and_stock(&h, "W").await, (SaleState::Ended(EndReason::TimeExpired), 2));
    expect_books(&h, 3).await;
}

pub async fn nothing_is_sold_once_an_operator_has_ended_the_sale<H: HasSales>() {
    let h = H::open().await;
    create_active(&h, "W", 100_000).await;
    let store = h.sales();
    let buyers = (0..12).map(|n| {
        let store = Arc::clone(&store);
        async move {
            let mut sold = 0;
            for round in 0..6 {
                let batch = buy_commands("W", &format!("c{n}-{round}"), 4);
                sold += receipts(&store.buy_batch(batch.into()).await.expect("buy_batch must succeed")).len();
            }
            sold
        }
    });
    let (sold, ended) = tokio::join!(run_concurrently(buyers), end(&h, "W"));
    let (EndOutcome::Ended(product), sold) = (ended, sold.iter().sum::<usize>()) else {
        panic!("the sale was active")
    };
    assert_eq!(product.sale.sold as usize, sold, "what was sold when it ended is all that is ever sold");
    assert_eq!(buy_each(&h, "W", &["late"]).await, "N");
    expect_books(&h, sold as u64).await;
}

pub async fn only_unused_products_are_deleted_where_resets_are_disabled<H: HasSales>() {
    let h = H::open().await;
    assert_eq!(delete_unused(&h, "W").await, DeleteOutcome::UnknownSku);
    create_upcoming(&h, "W", terms(5)).await;
    assert_eq!(delete_unused(&h, "W").await, DeleteOutcome::Deleted, "it has not begun");
    assert_eq!(find_product(&h, "W").await, None);
    create_active(&h, "W", 5).await;
    assert_eq!(delete_unused(&h, "W").await, DeleteOutcome::InUse, "it is active");
    assert_eq!(buy_each(&h, "W", &["a"]).await, "B");
    create_active(&h, "UNSOLD", 5).await;
    h.clock().advance(SALE_LENGTH);
    assert_eq!(delete_unused(&h, "W").await, DeleteOutcome::InUse, "it has a purchase");
    assert_eq!(delete_unused(&h, "UNSOLD").await, DeleteOutcome::Deleted, "nobody has bought");
    assert_eq!(buy_each(&h, "W", &["a", "b"]).await, "AN");
    expect_books(&h, 1).await;
    let deleted = h.sales().delete_product(&sku("W"), false).await.expect("delete_product must succeed");
    assert_eq!(deleted, DeleteOutcome::Deleted);
    expect_books(&h, 0).await;
}

pub async fn purchases_are_listed_in_order_of_time_and_number<H: HasSales>() {
    let h = H::open().await;
    let now = h.clock().now();
    for name in ["W", "X"] {
        create_upcoming(&h, name, terms_at(50, now.plus(LEAD), now.plus(LEAD + SALE_LENGTH))).await;
    }
    h.clock().advance(LEAD);
    let mut bought = Vec::new();
    for round in 0..4 {
        // Buyers in descending order: neither their names nor those of another sale decide.
        let mut batch = buy_commands("W", &format!("c{}", 9 - round), 5);
        batch.reverse();
        let outcomes = buy_batch(&h, batch.clone()).await;
        let names = batch.iter().map(|buy| buy.buyer.to_string());
        bought.extend(names.zip(receipts(&outcomes)));
        assert_eq!(buy_each(&h, "X", &[&format!("x{round}")]).await, "B");
        h.clock().advance(Duration::from_secs(1));
    }
    let product = find_product(&h, "W").await.expect("the product exists");
    let list = async |after: Option<PurchasePosition>, limit| {
        h.sales().list_purchases(&product, after, limit).await.expect("list_purchases must succeed")
    };
    for is_recorded in [false, true] {
        let (mut listed, mut after) = (Vec::new(), None);
        loop {
            let page = list(after, 3).await;
            assert!(page.len() <= 3 && page.iter().all(|purchase| purchase.product == product.id));
            let Some(last) = page.last() else { break };
            after = Some(last.position());
            listed.extend(page.into_iter().map(|purchase| (purchase.buyer.to_string(), purchase.receipt)));
        }
        assert_eq!(listed, bought, "all of them, whether they are recorded: {is_recorded}");
        h.wait_until_persisted().await;
    }
    assert_eq!(list(None, 100).await.len(), 20);
}
