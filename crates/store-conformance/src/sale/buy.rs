//! Buying, one batch after the other.

use std::time::Duration;

use weir_core::sale::{EndReason, PurchaseReceipt, SaleState};
use weir_core::{Clock, UserId};
use weir_store::sale::{Buy, BuyOutcome};

use super::fixtures::{
    LEAD, SALE_LENGTH, buy_batch, buy_command, buy_commands, buy_each, create_active, create_upcoming,
    expect_books, find_purchase, outcome_letters, receipts, state_and_stock, terms,
};
use crate::HasSales;
use crate::fixtures::TICK;

const SECOND: Duration = Duration::from_secs(1);

pub async fn each_buyer_gets_one_unit_and_a_number<H: HasSales>() {
    let h = H::open().await;
    let product = create_active(&h, "W", 5).await;
    let now = h.clock().now();
    let first = buy_batch(&h, buy_commands("W", "a", 2)).await;
    let unit = |number, stock| BuyOutcome::Bought {
        product: product.id,
        receipt: PurchaseReceipt { number, at: now },
        stock,
    };
    assert_eq!(first, [unit(1, 4), unit(2, 3)]);
    h.clock().advance(SECOND);
    let [BuyOutcome::Bought { receipt, stock, .. }] = buy_batch(&h, vec![buy_command("W", "b")]).await[..]
    else {
        panic!("there is stock")
    };
    assert_eq!((receipt.number, receipt.at, stock), (3, now.plus(SECOND), 2));
    assert_eq!(state_and_stock(&h, "W").await, (SaleState::Active, 2));
    expect_books(&h, 3).await;
}

pub async fn a_buyer_gets_one_unit_in_a_batch<H: HasSales>() {
    let h = H::open().await;
    create_active(&h, "W", 5).await;
    let batch = ["a", "a", "b", "a", "b"].map(|buyer| buy_command("W", buyer)).to_vec();
    assert_eq!(outcome_letters(&buy_batch(&h, batch.clone()).await), "BABAA");
    assert_eq!(outcome_letters(&buy_batch(&h, batch).await), "AAAAA");
    assert_eq!(state_and_stock(&h, "W").await, (SaleState::Active, 3));
    expect_books(&h, 2).await;
}

pub async fn a_buyer_sees_the_purchase_in_every_state<H: HasSales>() {
    let h = H::open().await;
    create_active(&h, "W", 2).await;
    assert_eq!(buy_each(&h, "W", &["a", "a", "b", "a", "b", "c"]).await, "BABAAS", "active, then sold out");
    h.clock().advance(SALE_LENGTH);
    assert_eq!(buy_each(&h, "W", &["a", "c"]).await, "AS", "after the end");
    create_active(&h, "X", 2).await;
    assert_eq!(buy_each(&h, "X", &["a"]).await, "B");
    h.clock().advance(SALE_LENGTH);
    assert_eq!(buy_each(&h, "X", &["a", "c"]).await, "AN", "expired with stock left");
    expect_books(&h, 3).await;
}

pub async fn nothing_is_sold_before_the_start_or_after_the_end<H: HasSales>() {
    let h = H::open().await;
    create_upcoming(&h, "W", terms(5)).await;
    assert_eq!(buy_each(&h, "W", &["a"]).await, "N");
    h.clock().advance(LEAD - TICK);
    assert_eq!(buy_each(&h, "W", &["a"]).await, "N");
    h.clock().advance(TICK);
    assert_eq!(buy_each(&h, "W", &["a"]).await, "B");
    h.clock().advance(SALE_LENGTH - TICK);
    assert_eq!(buy_each(&h, "W", &["b"]).await, "B");
    h.clock().advance(TICK);
    assert_eq!(buy_each(&h, "W", &["c"]).await, "N");
    assert_eq!(
        state_and_stock(&h, "W").await,
        (SaleState::Ended(EndReason::TimeExpired), 3),
        "unsold stock stays"
    );
    expect_books(&h, 2).await;
}

pub async fn the_last_unit_ends_the_sale<H: HasSales>() {
    let h = H::open().await;
    create_active(&h, "W", 3).await;
    let outcomes = buy_batch(&h, buy_commands("W", "a", 5)).await;
    assert_eq!(outcome_letters(&outcomes), "BBBSS", "first come, first served");
    assert_eq!(state_and_stock(&h, "W").await, (SaleState::Ended(EndReason::SoldOut), 0));
    h.clock().advance(SALE_LENGTH);
    assert_eq!(
        state_and_stock(&h, "W").await,
        (SaleState::Ended(EndReason::SoldOut), 0),
        "the reason stays sold out"
    );
    expect_books(&h, 3).await;
}

pub async fn an_unknown_sku_is_not_an_error<H: HasSales>() {
    let h = H::open().await;
    create_active(&h, "W", 3).await;
    let batch = vec![buy_command("X", "a"), buy_command("W", "a"), buy_command("w", "a")];
    assert_eq!(outcome_letters(&buy_batch(&h, batch).await), "UBU");
    assert_eq!(find_purchase(&h, "X", "a").await, None);
}

pub async fn sales_in_one_batch_do_not_disturb_each_other<H: HasSales>() {
    let h = H::open().await;
    create_active(&h, "A", 1).await;
    create_active(&h, "B", 2).await;
    create_upcoming(
        &h,
        "C",
        super::fixtures::terms_at(9, h.clock().now().plus(LEAD), h.clock().now().plus(SALE_LENGTH)),
    )
    .await;
    let batch = [("A", "x"), ("B", "x"), ("C", "x"), ("A", "y"), ("B", "y"), ("B", "z"), ("A", "x")];
    let batch = batch.map(|(name, buyer)| buy_command(name, buyer)).to_vec();
    let outcomes = buy_batch(&h, batch).await;
    assert_eq!(outcome_letters(&outcomes), "BBNSBSA");
    let numbers: Vec<u32> = receipts(&outcomes).iter().map(|receipt| receipt.number).collect();
    assert_eq!(numbers, [1, 1, 2], "each sale counts its own");
    expect_books(&h, 3).await;
}

pub async fn a_purchase_is_found_immediately_by_its_sku_or_as_the_latest<H: HasSales>() {
    let h = H::open().await;
    create_active(&h, "A", 5).await;
    let first = receipts(&buy_batch(&h, buy_commands("A", "x", 2)).await);
    create_active(&h, "B", 5).await;
    assert_eq!(find_purchase(&h, "A", "x-1").await, Some(first[1]));
    assert_eq!(find_purchase(&h, "B", "x-1").await, None);
    assert_eq!(find_purchase(&h, "A", "x-9").await, None);
    let latest = async |buyer: &str| {
        let Buy { buyer, .. } = buy_command("A", buyer);
        let found = h.sales().find_purchase(&buyer, None).await.expect("find_purchase must succeed");
        found.map(|found| (found.sku.to_string(), found.receipt))
    };
    assert_eq!(latest("x-1").await, Some(("A".to_owned(), first[1])));
    assert_eq!(latest("nobody").await, None);
    let second = receipts(&buy_batch(&h, vec![buy_command("B", "x-1")]).await)[0];
    assert!(second.at > first[1].at);
    assert_eq!(latest("x-1").await, Some(("B".to_owned(), second)));
    h.wait_until_persisted().await;
    assert_eq!(latest("x-1").await, Some(("B".to_owned(), second)), "also once it is persisted");
    assert_eq!(find_purchase(&h, "A", "x-1").await, Some(first[1]));
}

pub async fn buyer_ids_differ_by_every_character<H: HasSales>() {
    let h = H::open().await;
    create_active(&h, "W", 100).await;
    let long = "ü".repeat(255);
    let odd = ["a", "A", "a ", "a:b", "a{b}", "ä", "a\u{308}", "☃", "'; --", "\"", "\\", "1", "01", &long];
    for buyer in odd {
        UserId::parse(buyer).expect("odd and allowed");
        assert_eq!(buy_each(&h, "W", &[buyer, buyer]).await, "BA", "{buyer}");
    }
    for (number, buyer) in (1..).zip(odd) {
        assert_eq!(
            find_purchase(&h, "W", buyer).await.map(|receipt| receipt.number),
            Some(number),
            "{buyer}"
        );
    }
    expect_books(&h, odd.len() as u64).await;
}
