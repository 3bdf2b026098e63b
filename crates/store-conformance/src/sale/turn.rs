//! States and time.

use std::time::Duration;

use weir_core::Clock;
use weir_core::sale::{EndReason, State};

use super::fixtures::{LASTS, LEAD, active, bought, expect_books, found, stand, terms, terms_at, upcoming};
use crate::HasSales;
use crate::fixtures::TICK;

async fn turn<H: HasSales>(h: &H) {
    h.sales().turn_sales().await.expect("turn_sales must succeed");
}

pub async fn states_turn_at_their_time<H: HasSales>() {
    for is_written_down in [false, true] {
        let h = H::open().await;
        upcoming(&h, "W", terms(5)).await;
        let steps = [
            (LEAD - TICK, State::Upcoming),
            (TICK, State::Active),
            (LASTS - TICK, State::Active),
            (TICK, State::Ended(EndReason::TimeExpired)),
            (LASTS, State::Ended(EndReason::TimeExpired)),
        ];
        for (step, state) in steps {
            h.clock().advance(step);
            if is_written_down {
                turn(&h).await;
            }
            assert_eq!(stand(&h, "W").await, (state, 5));
            let board = h.sales().snapshot().await.expect("board must succeed");
            assert_eq!(board.now, h.clock().now());
            assert_eq!(board.products.len(), 1);
            assert_eq!(board.products[0].sale.state_at(board.now), state);
        }
    }
}

pub async fn turning_changes_nothing_that_is_sold<H: HasSales>() {
    let h = H::open().await;
    turn(&h).await;
    active(&h, "W", 2).await;
    turn(&h).await;
    assert_eq!(bought(&h, "W", &["a"]).await, "B");
    turn(&h).await;
    assert_eq!(bought(&h, "W", &["a", "b", "c"]).await, "ABS");
    let before = found(&h, "W").await;
    h.clock().advance(LASTS * 2);
    turn(&h).await;
    assert_eq!(found(&h, "W").await, before, "sold out is not expired");
    expect_books(&h, 2).await;
}

pub async fn the_board_shows_what_is_to_come_what_runs_and_what_ended<H: HasSales>() {
    let h = H::open().await;
    active(&h, "ENDED", 1).await;
    assert_eq!(bought(&h, "ENDED", &["a"]).await, "B");
    active(&h, "RUNS", 2).await;
    let now = h.clock().now();
    upcoming(&h, "COMES", terms_at(3, now.plus(LEAD), now.plus(Duration::from_secs(3_600)))).await;
    let board = h.sales().snapshot().await.expect("board must succeed");
    let mut shown: Vec<(String, State, u32)> = board
        .products
        .iter()
        .map(|product| (product.sku.to_string(), product.sale.state_at(board.now), product.sale.stock()))
        .collect();
    shown.sort();
    assert_eq!(
        shown,
        [
            ("COMES".to_owned(), State::Upcoming, 3),
            ("ENDED".to_owned(), State::Ended(EndReason::SoldOut), 0),
            ("RUNS".to_owned(), State::Active, 2),
        ]
    );
}
