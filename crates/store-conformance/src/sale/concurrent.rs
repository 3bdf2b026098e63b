//! Concurrent buyers and servers.

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::Arc;

use tokio::sync::Semaphore;

use weir_core::sale::{EndReason, SaleState};
use weir_store::sale::{Buy, BuyOutcome, DeleteOutcome, SaleStore};

use super::fixtures::{
    SALE_LENGTH, buy_command, buy_commands, create_active, expect_books, find_product, outcome_letters,
    receipts, sku, state_and_stock,
};
use crate::HasSales;
use crate::fixtures::run_concurrently;

/// Maximum number of calls in flight: engines limit how long a call waits for others, and machines may be slow.
const CALLS_IN_FLIGHT_MAX: usize = 6;

async fn run_a_few_concurrently<T, F>(calls: impl IntoIterator<Item = F>) -> Vec<T>
where
    F: Future<Output = T> + Send + 'static,
    T: Send + 'static,
{
    let permits = Arc::new(Semaphore::new(CALLS_IN_FLIGHT_MAX));
    let calls = calls.into_iter().map(|call| {
        let permits = Arc::clone(&permits);
        async move {
            let _permit = permits.acquire_owned().await.expect("the semaphore is never closed");
            call.await
        }
    });
    run_concurrently(calls).await
}

/// Buys in concurrent batches, spread over stores.
async fn buy_concurrently(stores: &[Arc<dyn SaleStore>], batches: Vec<Vec<Buy>>) -> Vec<BuyOutcome> {
    let calls = batches.into_iter().enumerate().map(|(n, batch)| {
        let store = Arc::clone(&stores[n % stores.len()]);
        async move { store.buy_batch(batch.into()).await.expect("buy_batch must succeed") }
    });
    run_a_few_concurrently(calls).await.into_iter().flatten().collect()
}

/// Asserts that `count` units were bought and that their numbers are 1 to `count`.
fn expect_numbers(outcomes: &[BuyOutcome], count: u32) {
    let numbers: Vec<u32> = receipts(outcomes).iter().map(|receipt| receipt.number).collect();
    assert_eq!(numbers.len(), count as usize, "exactly the stock");
    assert_eq!(numbers.into_iter().collect::<BTreeSet<_>>(), (1..=count).collect::<BTreeSet<_>>());
}

pub async fn many_buyers_get_exactly_the_stock<H: HasSales>() {
    let h = H::open().await;
    create_active(&h, "W", 37).await;
    let batches = (0..100).map(|n| buy_commands("W", &format!("c{n}"), 5)).collect();
    let outcomes = buy_concurrently(&[h.sales()], batches).await;
    expect_numbers(&outcomes, 37);
    assert_eq!(outcome_letters(&outcomes).matches('S').count(), 463, "all others get SoldOut");
    assert_eq!(state_and_stock(&h, "W").await, (SaleState::Ended(EndReason::SoldOut), 0));
    expect_books(&h, 37).await;
}

pub async fn a_buyer_with_parallel_calls_gets_one_unit<H: HasSales>() {
    let h = H::open().await;
    create_active(&h, "W", 50).await;
    let batches = (0..60).map(|_| vec![buy_command("W", "a"), buy_command("W", "a")]).collect();
    let outcomes = buy_concurrently(&[h.sales()], batches).await;
    expect_numbers(&outcomes, 1);
    assert_eq!(outcome_letters(&outcomes).matches('A').count(), 119);
    assert_eq!(state_and_stock(&h, "W").await, (SaleState::Active, 49));
    expect_books(&h, 1).await;
}

pub async fn two_servers_sell_exactly_the_stock<H: HasSales>() {
    let h = H::open().await;
    let Some(other) = h.second_server().await else { return };
    create_active(&h, "W", 40).await;
    // Every buyer calls both servers.
    let batches = (0..60).map(|n| buy_commands("W", &format!("c{}", n / 2), 4)).collect();
    let outcomes = buy_concurrently(&[h.sales(), other.sales()], batches).await;
    expect_numbers(&outcomes, 40);
    for h in [&h, &other] {
        assert_eq!(state_and_stock(h, "W").await, (SaleState::Ended(EndReason::SoldOut), 0));
    }
    expect_books(&h, 40).await;
}

pub async fn batches_over_many_sales_do_not_deadlock<H: HasSales>() {
    let h = H::open().await;
    let names = ["A", "B", "C", "D", "E"];
    for name in names {
        create_active(&h, name, 1_000).await;
    }
    let batches = (0..60)
        .map(|n| {
            let mut batch: Vec<Buy> = names.map(|name| buy_command(name, &format!("b{n}"))).to_vec();
            batch.rotate_left(n % 5);
            if n % 2 == 0 {
                batch.reverse();
            }
            batch
        })
        .collect();
    let outcomes = buy_concurrently(&[h.sales()], batches).await;
    assert_eq!(receipts(&outcomes).len(), 300, "every buyer gets a unit");
    expect_books(&h, 300).await;
}

pub async fn a_reset_under_load_leaves_nothing_behind<H: HasSales>() {
    let h = H::open().await;
    create_active(&h, "W", 1_000).await;
    let calls = (0..40).map(|n| {
        let store = h.sales();
        async move {
            if n == 20 {
                let deleted =
                    store.delete_product(&sku("W"), false).await.expect("delete_product must succeed");
                assert_eq!(deleted, DeleteOutcome::Deleted);
                return Vec::new();
            }
            store
                .buy_batch(buy_commands("W", &format!("c{n}"), 5).into())
                .await
                .expect("buy_batch must succeed")
        }
    });
    let outcomes: Vec<BuyOutcome> = run_a_few_concurrently(calls).await.into_iter().flatten().collect();
    let letters = outcome_letters(&outcomes);
    assert!(letters.chars().all(|letter| matches!(letter, 'B' | 'U')), "{letters}");
    assert_eq!(find_product(&h, "W").await, None);
    expect_books(&h, 0).await;
}

pub async fn nothing_is_sold_after_the_end_of_a_sale_under_load<H: HasSales>() {
    let h = H::open().await;
    create_active(&h, "W", 1_000).await;
    let calls = (0..60).map(|n| {
        let (store, clock) = (h.sales(), h.clock().clone());
        async move {
            if n == 30 {
                clock.advance(SALE_LENGTH);
                store.save_due_states().await.expect("save_due_states must succeed");
            }
            store
                .buy_batch(buy_commands("W", &format!("c{n}"), 3).into())
                .await
                .expect("buy_batch must succeed")
        }
    });
    let outcomes: Vec<BuyOutcome> = run_a_few_concurrently(calls).await.into_iter().flatten().collect();
    let sold = receipts(&outcomes).len();
    let product = find_product(&h, "W").await.expect("the product exists");
    assert_eq!(product.sale.state, SaleState::Ended(EndReason::TimeExpired));
    assert_eq!(product.sale.sold as usize, sold);
    assert!(receipts(&outcomes).iter().all(|receipt| receipt.at < product.sale.terms.end));
    assert_eq!(buy_concurrently(&[h.sales()], vec![vec![buy_command("W", "late")]]).await.len(), 1);
    expect_books(&h, sold as u64).await;
}
