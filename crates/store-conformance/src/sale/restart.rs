//! A restart loses nothing and repeats nothing.

use std::time::Duration;

use weir_core::Clock;
use weir_core::sale::{EndReason, State};

use super::fixtures::{
    LASTS, LEAD, active, bought, expect_books, found, purchase, stand, terms_at, upcoming,
};
use crate::HasSales;

pub async fn everything_stands_as_before<H: HasSales>() {
    let h = H::open().await;
    active(&h, "EXPIRED", 5).await;
    assert_eq!(bought(&h, "EXPIRED", &["a", "b"]).await, "BB");
    h.clock().advance(LASTS);
    active(&h, "SOLD-OUT", 2).await;
    assert_eq!(bought(&h, "SOLD-OUT", &["a", "b"]).await, "BB");
    active(&h, "RUNS", 9).await;
    assert_eq!(bought(&h, "RUNS", &["a", "c"]).await, "BB");
    let now = h.clock().now();
    upcoming(&h, "COMES", terms_at(4, now.plus(LEAD), now.plus(LASTS))).await;
    let read = async |h: &H| {
        let mut read = Vec::new();
        for name in ["EXPIRED", "SOLD-OUT", "RUNS", "COMES"] {
            read.push((found(h, name).await, purchase(h, name, "a").await, purchase(h, name, "b").await));
        }
        read
    };
    let before = read(&h).await;
    let states: Vec<State> = before.iter().flat_map(|(product, ..)| product).map(|p| p.sale.state).collect();
    let ended = [EndReason::TimeExpired, EndReason::SoldOut].map(State::Ended);
    assert_eq!(states, [ended[0], ended[1], State::Active, State::Upcoming]);
    let h = h.reopen().await;
    assert_eq!(read(&h).await, before);
    expect_books(&h, 6).await;
}

pub async fn a_sale_goes_on_where_it_was<H: HasSales>() {
    let h = H::open().await;
    active(&h, "W", 3).await;
    assert_eq!(bought(&h, "W", &["a", "b"]).await, "BB");
    let h = h.reopen().await;
    assert_eq!(bought(&h, "W", &["a", "b", "c", "d"]).await, "AABS");
    assert_eq!(purchase(&h, "W", "c").await.map(|receipt| receipt.number), Some(3));
    let h = h.reopen().await;
    assert_eq!(bought(&h, "W", &["c", "e"]).await, "AS");
    h.clock().advance(LASTS + Duration::from_secs(1));
    assert_eq!(stand(&h, "W").await, (State::Ended(EndReason::SoldOut), 0));
    expect_books(&h, 3).await;
}
