//! A restart loses nothing and repeats nothing.

use std::time::Duration;

use weir_core::Clock;
use weir_core::sale::{EndReason, SaleState};

use super::fixtures::{
    LEAD, SALE_LENGTH, buy_each, create_active, create_upcoming, expect_books, find_product, find_purchase,
    state_and_stock, terms_at,
};
use crate::HasSales;

pub async fn everything_is_unchanged_after_a_restart<H: HasSales>() {
    let h = H::open().await;
    create_active(&h, "EXPIRED", 5).await;
    assert_eq!(buy_each(&h, "EXPIRED", &["a", "b"]).await, "BB");
    h.clock().advance(SALE_LENGTH);
    create_active(&h, "SOLD-OUT", 2).await;
    assert_eq!(buy_each(&h, "SOLD-OUT", &["a", "b"]).await, "BB");
    create_active(&h, "RUNS", 9).await;
    assert_eq!(buy_each(&h, "RUNS", &["a", "c"]).await, "BB");
    let now = h.clock().now();
    create_upcoming(&h, "COMES", terms_at(4, now.plus(LEAD), now.plus(SALE_LENGTH))).await;
    let read = async |h: &H| {
        let mut read = Vec::new();
        for name in ["EXPIRED", "SOLD-OUT", "RUNS", "COMES"] {
            read.push((
                find_product(h, name).await,
                find_purchase(h, name, "a").await,
                find_purchase(h, name, "b").await,
            ));
        }
        read
    };
    let before = read(&h).await;
    let states: Vec<SaleState> =
        before.iter().flat_map(|(product, ..)| product).map(|p| p.sale.state).collect();
    let ended = [EndReason::TimeExpired, EndReason::SoldOut].map(SaleState::Ended);
    assert_eq!(states, [ended[0], ended[1], SaleState::Active, SaleState::Upcoming]);
    let h = h.reopen().await;
    assert_eq!(read(&h).await, before);
    expect_books(&h, 6).await;
}

pub async fn a_sale_continues_after_a_restart<H: HasSales>() {
    let h = H::open().await;
    create_active(&h, "W", 3).await;
    assert_eq!(buy_each(&h, "W", &["a", "b"]).await, "BB");
    let h = h.reopen().await;
    assert_eq!(buy_each(&h, "W", &["a", "b", "c", "d"]).await, "AABS");
    assert_eq!(find_purchase(&h, "W", "c").await.map(|receipt| receipt.number), Some(3));
    let h = h.reopen().await;
    assert_eq!(buy_each(&h, "W", &["c", "e"]).await, "AS");
    h.clock().advance(SALE_LENGTH + Duration::from_secs(1));
    assert_eq!(state_and_stock(&h, "W").await, (SaleState::Ended(EndReason::SoldOut), 0));
    expect_books(&h, 3).await;
}
