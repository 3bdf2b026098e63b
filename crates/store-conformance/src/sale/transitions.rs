//! State transitions of sales over time.

use std::time::Duration;

use weir_core::Clock;
use weir_core::sale::{EndReason, SaleState};

use super::fixtures::{
    LEAD, SALE_LENGTH, buy_each, create_active, create_upcoming, expect_books, find_product, state_and_stock,
    terms, terms_at,
};
use crate::HasSales;
use crate::fixtures::TICK;

async fn store_transitions<H: HasSales>(h: &H) {
    h.sales().save_due_states().await.expect("save_due_states must succeed");
}

pub async fn states_change_on_time<H: HasSales>() {
    for is_stored in [false, true] {
        let h = H::open().await;
        create_upcoming(&h, "W", terms(5)).await;
        let steps = [
            (LEAD - TICK, SaleState::Upcoming),
            (TICK, SaleState::Active),
            (SALE_LENGTH - TICK, SaleState::Active),
            (TICK, SaleState::Ended(EndReason::TimeExpired)),
            (SALE_LENGTH, SaleState::Ended(EndReason::TimeExpired)),
        ];
        for (step, state) in steps {
            h.clock().advance(step);
            if is_stored {
                store_transitions(&h).await;
            }
            assert_eq!(state_and_stock(&h, "W").await, (state, 5));
            let snapshot = h.sales().snapshot().await.expect("snapshot must succeed");
            assert_eq!(snapshot.now, h.clock().now());
            assert_eq!(snapshot.products.len(), 1);
            assert_eq!(snapshot.products[0].sale.state_at(snapshot.now), state);
        }
    }
}

pub async fn storing_the_states_changes_no_purchase<H: HasSales>() {
    let h = H::open().await;
    store_transitions(&h).await;
    create_active(&h, "W", 2).await;
    store_transitions(&h).await;
    assert_eq!(buy_each(&h, "W", &["a"]).await, "B");
    store_transitions(&h).await;
    assert_eq!(buy_each(&h, "W", &["a", "b", "c"]).await, "ABS");
    let before = find_product(&h, "W").await;
    h.clock().advance(SALE_LENGTH * 2);
    store_transitions(&h).await;
    assert_eq!(find_product(&h, "W").await, before, "sold out is not expired");
    expect_books(&h, 2).await;
}

pub async fn the_snapshot_shows_upcoming_active_and_ended_sales<H: HasSales>() {
    let h = H::open().await;
    create_active(&h, "ENDED", 1).await;
    assert_eq!(buy_each(&h, "ENDED", &["a"]).await, "B");
    create_active(&h, "RUNS", 2).await;
    let now = h.clock().now();
    create_upcoming(&h, "COMES", terms_at(3, now.plus(LEAD), now.plus(Duration::from_secs(3_600)))).await;
    let snapshot = h.sales().snapshot().await.expect("snapshot must succeed");
    let mut shown: Vec<(String, SaleState, u32)> = snapshot
        .products
        .iter()
        .map(|product| (product.sku.to_string(), product.sale.state_at(snapshot.now), product.sale.stock()))
        .collect();
    shown.sort();
    assert_eq!(
        shown,
        [
            ("COMES".to_owned(), SaleState::Upcoming, 3),
            ("ENDED".to_owned(), SaleState::Ended(EndReason::SoldOut), 0),
            ("RUNS".to_owned(), SaleState::Active, 2),
        ]
    );
}
