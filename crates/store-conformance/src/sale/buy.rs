//! Who gets a unit, one batch after the other.

use std::time::Duration;

use weir_core::sale::{EndReason, Receipt, State};
use weir_core::{Clock, UserId};
use weir_store::sale::{Buy, BuyOutcome};

use super::fixtures::{
    LASTS, LEAD, active, bought, decided, expect_books, letters, purchase, receipts, stand, terms, upcoming,
    wish, wishes,
};
use crate::HasSales;
use crate::fixtures::TICK;

const SECOND: Duration = Duration::from_secs(1);

pub async fn each_buyer_gets_one_unit_and_a_number<H: HasSales>() {
    let h = H::open().await;
    let product = active(&h, "W", 5).await;
    let now = h.clock().now();
    let first = decided(&h, wishes("W", "a", 2)).await;
    let unit = |number, stock| BuyOutcome::Bought {
        product: product.id,
        receipt: Receipt { number, at: now },
        stock,
    };
    assert_eq!(first, [unit(1, 4), unit(2, 3)]);
    h.clock().advance(SECOND);
    let [BuyOutcome::Bought { receipt, stock, .. }] = decided(&h, vec![wish("W", "b")]).await[..] else {
        panic!("there is stock")
    };
    assert_eq!((receipt.number, receipt.at, stock), (3, now.plus(SECOND), 2));
    assert_eq!(stand(&h, "W").await, (State::Active, 2));
    expect_books(&h, 3).await;
}

pub async fn a_buyer_gets_one_unit_in_a_batch<H: HasSales>() {
    let h = H::open().await;
    active(&h, "W", 5).await;
    let batch = ["a", "a", "b", "a", "b"].map(|buyer| wish("W", buyer)).to_vec();
    assert_eq!(letters(&decided(&h, batch.clone()).await), "BABAA");
    assert_eq!(letters(&decided(&h, batch).await), "AAAAA");
    assert_eq!(stand(&h, "W").await, (State::Active, 3));
    expect_books(&h, 2).await;
}

pub async fn a_buyer_is_told_of_the_purchase_whatever_the_state<H: HasSales>() {
    let h = H::open().await;
    active(&h, "W", 2).await;
    assert_eq!(bought(&h, "W", &["a", "a", "b", "a", "b", "c"]).await, "BABAAS", "active, then sold out");
    h.clock().advance(LASTS);
    assert_eq!(bought(&h, "W", &["a", "c"]).await, "AS", "after its time");
    active(&h, "X", 2).await;
    assert_eq!(bought(&h, "X", &["a"]).await, "B");
    h.clock().advance(LASTS);
    assert_eq!(bought(&h, "X", &["a", "c"]).await, "AN", "its time is over and there is stock");
    expect_books(&h, 3).await;
}

pub async fn nothing_is_sold_before_the_start_or_from_the_end_on<H: HasSales>() {
    let h = H::open().await;
    upcoming(&h, "W", terms(5)).await;
    assert_eq!(bought(&h, "W", &["a"]).await, "N");
    h.clock().advance(LEAD - TICK);
    assert_eq!(bought(&h, "W", &["a"]).await, "N");
    h.clock().advance(TICK);
    assert_eq!(bought(&h, "W", &["a"]).await, "B");
    h.clock().advance(LASTS - TICK);
    assert_eq!(bought(&h, "W", &["b"]).await, "B");
    h.clock().advance(TICK);
    assert_eq!(bought(&h, "W", &["c"]).await, "N");
    assert_eq!(stand(&h, "W").await, (State::Ended(EndReason::TimeExpired), 3), "what is left stays");
    expect_books(&h, 2).await;
}

pub async fn the_last_unit_ends_the_sale<H: HasSales>() {
    let h = H::open().await;
    active(&h, "W", 3).await;
    let outcomes = decided(&h, wishes("W", "a", 5)).await;
    assert_eq!(letters(&outcomes), "BBBSS", "first come, first served");
    assert_eq!(stand(&h, "W").await, (State::Ended(EndReason::SoldOut), 0));
    h.clock().advance(LASTS);
    assert_eq!(stand(&h, "W").await, (State::Ended(EndReason::SoldOut), 0), "why it ended does not change");
    expect_books(&h, 3).await;
}

pub async fn an_unknown_sku_is_an_answer<H: HasSales>() {
    let h = H::open().await;
    active(&h, "W", 3).await;
    let batch = vec![wish("X", "a"), wish("W", "a"), wish("w", "a")];
    assert_eq!(letters(&decided(&h, batch).await), "UBU");
    assert_eq!(purchase(&h, "X", "a").await, None);
}

pub async fn sales_in_one_batch_do_not_disturb_each_other<H: HasSales>() {
    let h = H::open().await;
    active(&h, "A", 1).await;
    active(&h, "B", 2).await;
    upcoming(&h, "C", super::fixtures::terms_at(9, h.clock().now().plus(LEAD), h.clock().now().plus(LASTS)))
        .await;
    let batch = [("A", "x"), ("B", "x"), ("C", "x"), ("A", "y"), ("B", "y"), ("B", "z"), ("A", "x")];
    let batch = batch.map(|(name, buyer)| wish(name, buyer)).to_vec();
    let outcomes = decided(&h, batch).await;
    assert_eq!(letters(&outcomes), "BBNSBSA");
    let numbers: Vec<u32> = receipts(&outcomes).iter().map(|receipt| receipt.number).collect();
    assert_eq!(numbers, [1, 1, 2], "each sale counts its own");
    expect_books(&h, 3).await;
}

pub async fn a_purchase_is_found_at_once_by_its_sku_or_as_the_latest<H: HasSales>() {
    let h = H::open().await;
    active(&h, "A", 5).await;
    let first = receipts(&decided(&h, wishes("A", "x", 2)).await);
    active(&h, "B", 5).await;
    assert_eq!(purchase(&h, "A", "x-1").await, Some(first[1]));
    assert_eq!(purchase(&h, "B", "x-1").await, None);
    assert_eq!(purchase(&h, "A", "x-9").await, None);
    let latest = async |buyer: &str| {
        let Buy { buyer, .. } = wish("A", buyer);
        h.sales().find_purchase(&buyer, None).await.expect("find_purchase must succeed")
    };
    assert_eq!(latest("x-1").await, Some(first[1]));
    assert_eq!(latest("nobody").await, None);
    let second = receipts(&decided(&h, vec![wish("B", "x-1")]).await)[0];
    assert!(second.at > first[1].at);
    assert_eq!(latest("x-1").await, Some(second));
    h.settled().await;
    assert_eq!(latest("x-1").await, Some(second), "also once it is written down");
    assert_eq!(purchase(&h, "A", "x-1").await, Some(first[1]));
}

pub async fn buyers_are_told_apart_by_every_character<H: HasSales>() {
    let h = H::open().await;
    active(&h, "W", 100).await;
    let long = "ü".repeat(255);
    let odd = ["a", "A", "a ", "a:b", "a{b}", "ä", "a\u{308}", "☃", "'; --", "\"", "\\", "1", "01", &long];
    for buyer in odd {
        UserId::parse(buyer).expect("odd and allowed");
        assert_eq!(bought(&h, "W", &[buyer, buyer]).await, "BA", "{buyer}");
    }
    for (number, buyer) in (1..).zip(odd) {
        assert_eq!(purchase(&h, "W", buyer).await.map(|receipt| receipt.number), Some(number), "{buyer}");
    }
    expect_books(&h, odd.len() as u64).await;
}
