//! What only Redis does for sales: it forgets, goes away, and tells other servers what was sold.

use std::time::Duration;

use tokio_util::sync::{CancellationToken, DropGuard};
use weir_core::sale::{EndReason, SaleState};
use weir_store::sale::{SaleEvent, SaleStore};
use weir_store_conformance::sale::fixtures::{
    buy_commands, buy_each, create_active, expect_books, find_product, find_purchase, sku, state_and_stock,
};
use weir_store_conformance::{ENGINE_TIMEOUT, EngineFixture, HasSales};
use weir_testkit::proxy::Proxy;
use weir_testkit::redis::Server;
use weir_testkit::wait;

use crate::fixtures::private;

type OnRedis = crate::fixtures::OnRedis<false>;

/// After which silence a subscription is taken to be lost.
const ANSWERED_WITHIN: Duration = Duration::from_secs(10);

async fn count(server: &Server, key: &str) -> String {
    format!("{:?}", server.command(&["XLEN", key]).await)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_forgot_everything_sells_nothing_twice_and_nothing_too_much() {
    if OnRedis::skipped() {
        return;
    }
    let server = private();
    let h = OnRedis::at(server.url()).await;
    create_active(&h, "W", 5).await;
    assert_eq!(buy_each(&h, "W", &["a", "b", "c"]).await, "BBB");
    // At once: what was sold is not written down by anybody but the server that sold it.
    server.command(&["FLUSHALL"]).await;
    assert_eq!(buy_each(&h, "W", &["a", "b", "c", "d", "e", "f"]).await, "AAABBS");
    assert_eq!(find_purchase(&h, "W", "e").await.map(|receipt| receipt.number), Some(5), "numbers go on");
    expect_books(&h, 5).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_server_that_rebuilds_a_sale_waits_for_what_this_one_has_sold() {
    if OnRedis::skipped() {
        return;
    }
    let server = private();
    let h = OnRedis::at(server.url()).await;
    let other = h.second_server().await.expect("another server");
    create_active(&h, "W", 5).await;
    assert_eq!(buy_each(&h, "W", &["a", "b", "c"]).await, "BBB");
    server.command(&["FLUSHALL"]).await;
    assert_eq!(buy_each(&other, "W", &["a", "x", "y", "z"]).await, "ABBS");
    expect_books(&other, 5).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_empties_the_stream_of_a_server_that_died() {
    if OnRedis::skipped() {
        return;
    }
    let server = private();
    let h = OnRedis::at(server.url()).await;
    create_active(&h, "W", 100).await;
    // Purchases that no living server remembers: only the stream has them.
    let id = find_product(&h, "W").await.expect("it is there").id.0.to_string();
    for n in 1..=3 {
        let (user, number) = (format!("u{n}"), n.to_string());
        let fields =
            ["XADD", "sale:{W}:stream", "*", "product", &id, "user", &user, "number", &number, "at", "7"];
        server.command(&fields).await;
        server.command(&["HSET", "sale:{W}:buyers", &user, &format!("{number}:7")]).await;
    }
    server.command(&["XADD", "sale:{W}:stream", "*", "what", "nonsense"]).await;
    h.wait_until_persisted().await;
    wait::until("the stream is empty", ENGINE_TIMEOUT, async || {
        count(&server, "sale:{W}:stream").await.contains('0')
    })
    .await;
    assert_eq!(find_purchase(&h, "W", "u2").await.map(|receipt| receipt.number), Some(2));
    expect_books(&h, 3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reconciliation_mends_either_side_and_counts_what_differed() {
    if OnRedis::skipped() {
        return;
    }
    let server = private();
    let h = OnRedis::at(server.url()).await;
    create_active(&h, "W", 10).await;
    assert_eq!(buy_each(&h, "W", &["a", "b", "c", "d"]).await, "BBBB");
    h.wait_until_persisted().await;
    assert_eq!(h.sales.reconcile_sale(&sku("W")).await.expect("an answer"), 0);
    h.database.execute("DELETE FROM purchases WHERE user_id = 'a'; UPDATE products SET sold = 3").await;
    server.command(&["HDEL", "sale:{W}:buyers", "b"]).await;
    assert_eq!(h.sales.reconcile_sale(&sku("W")).await.expect("an answer"), 2);
    assert_eq!(h.sale_metrics.mismatches.get(), 2);
    assert_eq!(buy_each(&h, "W", &["a", "b"]).await, "AA");
    assert_eq!(state_and_stock(&h, "W").await.1, 6);
    expect_books(&h, 4).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_redis_is_away_nothing_is_sold_and_nothing_is_lost() {
    if OnRedis::skipped() {
        return;
    }
    let mut server = private();
    let h = OnRedis::at(server.url()).await;
    create_active(&h, "W", 10).await;
    assert_eq!(buy_each(&h, "W", &["a", "b"]).await, "BB");
    h.wait_until_persisted().await;
    server.stop().await;
    let refused = h.sales.buy_batch(buy_commands("W", "x", 3).into()).await;
    assert!(refused.is_err_and(|error| error.is_transient()));
    server.start_empty().await;
    wait::until("Redis is back", ENGINE_TIMEOUT, async || h.redis.ping().await).await;
    assert_eq!(buy_each(&h, "W", &["a", "b", "c"]).await, "AAB");
    expect_books(&h, 3).await;
}

/// What an engine tells, as it comes.
fn listen(h: &OnRedis) -> (tokio::sync::mpsc::UnboundedReceiver<SaleEvent>, DropGuard) {
    let (tell, told) = tokio::sync::mpsc::unbounded_channel();
    let (engine, closing) = (h.sales.clone(), CancellationToken::new());
    let telling = async move {
        let hear = |news| drop(tell.send(news));
        engine.follow_events(&hear).await;
    };
    tokio::spawn(closing.clone().run_until_cancelled_owned(telling));
    (told, closing.drop_guard())
}

async fn hears(told: &mut tokio::sync::mpsc::UnboundedReceiver<SaleEvent>, wanted: &SaleEvent) {
    let hearing = async { while told.recv().await.expect("it goes on") != *wanted {} };
    tokio::time::timeout(ENGINE_TIMEOUT, hearing)
        .await
        .unwrap_or_else(|_| panic!("{wanted:?} must be heard"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_one_server_does_is_told_to_the_other_also_after_a_cut() {
    if OnRedis::skipped() {
        return;
    }
    let server = private();
    let h = OnRedis::at(server.url()).await;
    let other = h.second_server().await.expect("another server");
    let (mut told, _ears) = listen(&other);
    hears(&mut told, &SaleEvent::Subscribed).await;
    create_active(&h, "W", 2).await;
    let w = || sku("W");
    hears(&mut told, &SaleEvent::ProductChanged { sku: w() }).await;
    let product = find_product(&h, "W").await.expect("it is there").id;
    assert_eq!(buy_each(&h, "W", &["a"]).await, "B");
    hears(&mut told, &SaleEvent::Sold { sku: w(), product, stock: 1 }).await;
    server.command(&["CLIENT", "KILL", "TYPE", "pubsub"]).await;
    hears(&mut told, &SaleEvent::Lost).await;
    hears(&mut told, &SaleEvent::Subscribed).await;
    assert_eq!(buy_each(&h, "W", &["b"]).await, "B");
    hears(&mut told, &SaleEvent::Sold { sku: w(), product, stock: 0 }).await;
    hears(
        &mut told,
        &SaleEvent::StateChanged { sku: w(), product, state: SaleState::Ended(EndReason::SoldOut) },
    )
    .await;
    assert!(h.sales.delete_product(&w()).await.expect("an answer"));
    hears(&mut told, &SaleEvent::ProductChanged { sku: w() }).await;
    // Whoever reads because of it is not given what was remembered, if the store answers in time.
    wait::until("it is gone from the other's board", ENGINE_TIMEOUT, async || {
        other.sales.snapshot().await.is_ok_and(|snapshot| snapshot.products.is_empty())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_subscription_that_is_silently_lost_is_noticed() {
    if OnRedis::skipped() {
        return;
    }
    let server = private();
    let h = OnRedis::at(server.url()).await;
    create_active(&h, "W", 2).await;
    let proxy = Proxy::start(server.address()).await;
    let far = h.via(&server.url_via(proxy.addr()), ANSWERED_WITHIN).await;
    let (mut told, _ears) = listen(&far);
    hears(&mut told, &SaleEvent::Subscribed).await;
    proxy.black_hole();
    hears(&mut told, &SaleEvent::Lost).await;
    proxy.pass();
    hears(&mut told, &SaleEvent::Subscribed).await;
    let product = find_product(&h, "W").await.expect("it is there").id;
    assert_eq!(buy_each(&h, "W", &["a"]).await, "B");
    hears(&mut told, &SaleEvent::Sold { sku: sku("W"), product, stock: 1 }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_server_has_sold_leaves_the_stream_without_a_worker() {
    if OnRedis::skipped() {
        return;
    }
    let server = private();
    let mut h = OnRedis::at(server.url()).await;
    h.sale_worker = CancellationToken::new().drop_guard();
    create_active(&h, "W", 5).await;
    assert_eq!(buy_each(&h, "W", &["a", "b", "c"]).await, "BBB");
    wait::until("the stream is empty", ENGINE_TIMEOUT, async || {
        count(&server, "sale:{W}:stream").await.contains('0')
    })
    .await;
    expect_books(&h, 3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_moves_what_was_sold_before_the_clock_was_set_back() {
    if OnRedis::skipped() {
        return;
    }
    let server = private();
    let h = OnRedis::at(server.url()).await;
    create_active(&h, "W", 5).await;
    let id = find_product(&h, "W").await.expect("it is there").id.0.to_string();
    let entry = ["product", &id, "user", "u", "number", "1", "at", "7"];
    server.command(&[&["XADD", "sale:{W}:stream", "9999999999999-0"][..], &entry].concat()).await;
    server.command(&["HSET", "sale:{W}:buyers", "u", "1:7"]).await;
    wait::until("the stream is empty", ENGINE_TIMEOUT, async || {
        count(&server, "sale:{W}:stream").await.contains('0')
    })
    .await;
    expect_books(&h, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_sold_before_a_script_failed_is_counted() {
    if OnRedis::skipped() {
        return;
    }
    let server = private();
    let h = OnRedis::at(server.url()).await;
    create_active(&h, "W", 10).await;
    // The unit is sold when it turns out that it cannot be put into the stream.
    server.command(&["SET", "sale:{W}:stream", "no stream"]).await;
    assert!(h.sales.buy_batch(buy_commands("W", "x", 3).into()).await.is_err());
    for (name, left) in [("stock", "9"), ("seq", "1")] {
        assert_eq!(server.command(&["GET", &format!("sale:{{W}}:{name}")]).await.text(), left, "{name}");
    }
    server.command(&["DEL", "sale:{W}:stream"]).await;
    assert_eq!(buy_each(&h, "W", &["x-0", "x-1"]).await, "AB");
    assert_eq!(find_purchase(&h, "W", "x-1").await.map(|receipt| receipt.number), Some(2));
}
