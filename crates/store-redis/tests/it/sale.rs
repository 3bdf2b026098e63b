//! Sales when Redis loses data or is unavailable, and the events that it publishes to other servers.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio_util::sync::{CancellationToken, DropGuard};
use weir_core::sale::{EndReason, SaleStage, SaleState, Stock};
use weir_store::sale::{DeleteOutcome, EventId, LoggedEvent, ProductId, Publication, SaleEvent, SaleStore};
use weir_store_conformance::sale::fixtures::{
    buy_batch, buy_commands, buy_each, create_active, expect_books, find_product, find_purchase, receipts,
    sku, state_and_stock,
};
use weir_store_conformance::{ENGINE_TIMEOUT, EngineFixture, HasSales};
use weir_testkit::proxy::Proxy;
use weir_testkit::redis::Server;
use weir_testkit::wait;

use crate::fixtures::private_redis;

type RedisFixture = crate::fixtures::RedisFixture<false>;

/// After this long without a reply to a ping a subscription is lost.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

async fn wait_for_empty_stream(server: &Server) {
    wait::until("the stream is empty", ENGINE_TIMEOUT, async || {
        server.command(&["XLEN", "sale:{W}:stream"]).await.integer() == 0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flushed_redis_sells_no_unit_twice_and_none_too_many() {
    if RedisFixture::skipped() {
        return;
    }
    let server = private_redis();
    let h = RedisFixture::at(server.url()).await;
    create_active(&h, "W", 5).await;
    assert_eq!(buy_each(&h, "W", &["a", "b", "c"]).await, "BBB");
    // At once, before anyone but the server that sold them can have recorded the purchases.
    server.command(&["FLUSHALL"]).await;
    assert_eq!(buy_each(&h, "W", &["a", "b", "c", "d", "e", "f"]).await, "AAABBS");
    assert_eq!(find_purchase(&h, "W", "e").await.map(|receipt| receipt.number), Some(5), "numbers continue");
    expect_books(&h, 5).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_rebuilds_a_sale_waits_for_the_purchases_of_others() {
    if RedisFixture::skipped() {
        return;
    }
    let server = private_redis();
    let h = RedisFixture::at(server.url()).await;
    let other = h.second_server().await.expect("another server");
    create_active(&h, "W", 5).await;
    assert_eq!(buy_each(&h, "W", &["a", "b", "c"]).await, "BBB");
    server.command(&["FLUSHALL"]).await;
    assert_eq!(buy_each(&other, "W", &["a", "x", "y", "z"]).await, "ABBS");
    expect_books(&other, 5).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_records_the_purchases_of_a_server_that_died() {
    if RedisFixture::skipped() {
        return;
    }
    let server = private_redis();
    let h = RedisFixture::at(server.url()).await;
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
    wait_for_empty_stream(&server).await;
    assert_eq!(find_purchase(&h, "W", "u2").await.map(|receipt| receipt.number), Some(2));
    expect_books(&h, 3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reconciliation_repairs_both_sides_and_counts_the_differences() {
    if RedisFixture::skipped() {
        return;
    }
    let server = private_redis();
    let h = RedisFixture::at(server.url()).await;
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
async fn the_final_reconciliation_says_what_remains_after_the_repair() {
    if RedisFixture::skipped() {
        return;
    }
    let server = private_redis();
    let h = RedisFixture::at(server.url()).await;
    create_active(&h, "W", 3).await;
    assert_eq!(buy_each(&h, "W", &["a", "b", "c"]).await, "BBB");
    h.wait_until_persisted().await;
    h.clock().advance(Duration::from_secs(60));
    let reconcile = async || h.sales.reconcile_finally(&sku("W")).await.expect("an answer");
    assert_eq!(reconcile().await, (0, 0));
    // The store has lost two purchases, and refuses one of them.
    h.database
        .execute(
            "DELETE FROM purchases WHERE user_id IN ('a', 'b'); UPDATE products SET sold = 1;
             ALTER TABLE purchases ADD CONSTRAINT refused CHECK (user_id <> 'a')",
        )
        .await;
    assert_eq!(reconcile().await, (2, 1));
    h.database.execute("ALTER TABLE purchases DROP CONSTRAINT refused").await;
    assert_eq!(reconcile().await, (1, 0));
    expect_books(&h, 3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_redis_is_down_nothing_is_sold_and_nothing_is_lost() {
    if RedisFixture::skipped() {
        return;
    }
    let mut server = private_redis();
    let h = RedisFixture::at(server.url()).await;
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

/// Subscribes to the events of a server.
fn subscribe(h: &RedisFixture) -> (tokio::sync::mpsc::UnboundedReceiver<SaleEvent>, DropGuard) {
    let (sender, events) = tokio::sync::mpsc::unbounded_channel();
    let (sales, closing) = (h.sales.clone(), CancellationToken::new());
    let forward = async move {
        let send = |event| drop(sender.send(event));
        sales.follow_events(&send).await;
    };
    tokio::spawn(closing.clone().run_until_cancelled_owned(forward));
    (events, closing.drop_guard())
}

async fn wait_for_event(events: &mut tokio::sync::mpsc::UnboundedReceiver<SaleEvent>, expected: &SaleEvent) {
    let received = async { while events.recv().await.expect("the subscription lasts") != *expected {} };
    tokio::time::timeout(ENGINE_TIMEOUT, received)
        .await
        .unwrap_or_else(|_| panic!("{expected:?} must be received"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_receives_the_events_of_others_also_after_a_reconnect() {
    if RedisFixture::skipped() {
        return;
    }
    let server = private_redis();
    let h = RedisFixture::at(server.url()).await;
    let other = h.second_server().await.expect("another server");
    let (mut events, _subscription) = subscribe(&other);
    wait_for_event(&mut events, &SaleEvent::Subscribed).await;
    create_active(&h, "W", 2).await;
    let w = || sku("W");
    wait_for_event(&mut events, &SaleEvent::ProductChanged { sku: w() }).await;
    let product = find_product(&h, "W").await.expect("it is there").id;
    assert_eq!(buy_each(&h, "W", &["a"]).await, "B");
    wait_for_event(&mut events, &SaleEvent::Sold { sku: w(), product, stock: 1 }).await;
    server.command(&["CLIENT", "KILL", "TYPE", "pubsub"]).await;
    wait_for_event(&mut events, &SaleEvent::Lost).await;
    wait_for_event(&mut events, &SaleEvent::Subscribed).await;
    assert_eq!(buy_each(&h, "W", &["b"]).await, "B");
    wait_for_event(&mut events, &SaleEvent::Sold { sku: w(), product, stock: 0 }).await;
    wait_for_event(
        &mut events,
        &SaleEvent::StateChanged { sku: w(), product, state: SaleState::Ended(EndReason::SoldOut) },
    )
    .await;
    let deleted = h.sales.delete_product(&w(), false).await.expect("an answer");
    assert_eq!(deleted, DeleteOutcome::Deleted);
    wait_for_event(&mut events, &SaleEvent::ProductChanged { sku: w() }).await;
    // A read after the event does not get the cached catalogue, if the store answers in time.
    wait::until("the product is gone from the other server's snapshot", ENGINE_TIMEOUT, async || {
        other.sales.snapshot().await.is_ok_and(|snapshot| snapshot.products.is_empty())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_subscription_that_is_lost_silently_is_noticed() {
    if RedisFixture::skipped() {
        return;
    }
    let server = private_redis();
    let h = RedisFixture::at(server.url()).await;
    create_active(&h, "W", 2).await;
    let proxy = Proxy::start(server.address()).await;
    let proxied = h.via(&server.url_via(proxy.addr()), CALL_TIMEOUT).await;
    let (mut events, _subscription) = subscribe(&proxied);
    wait_for_event(&mut events, &SaleEvent::Subscribed).await;
    proxy.black_hole();
    wait_for_event(&mut events, &SaleEvent::Lost).await;
    proxy.pass();
    wait_for_event(&mut events, &SaleEvent::Subscribed).await;
    let product = find_product(&h, "W").await.expect("it is there").id;
    assert_eq!(buy_each(&h, "W", &["a"]).await, "B");
    wait_for_event(&mut events, &SaleEvent::Sold { sku: sku("W"), product, stock: 1 }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_records_its_own_purchases_without_a_worker() {
    if RedisFixture::skipped() {
        return;
    }
    let server = private_redis();
    let mut h = RedisFixture::at(server.url()).await;
    h.sale_worker = CancellationToken::new().drop_guard();
    create_active(&h, "W", 5).await;
    assert_eq!(buy_each(&h, "W", &["a", "b", "c"]).await, "BBB");
    wait_for_empty_stream(&server).await;
    expect_books(&h, 3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_moves_entries_from_before_the_clock_was_set_back() {
    if RedisFixture::skipped() {
        return;
    }
    let server = private_redis();
    let h = RedisFixture::at(server.url()).await;
    create_active(&h, "W", 5).await;
    let id = find_product(&h, "W").await.expect("it is there").id.0.to_string();
    let entry = ["product", &id, "user", "u", "number", "1", "at", "7"];
    server.command(&[&["XADD", "sale:{W}:stream", "9999999999999-0"][..], &entry].concat()).await;
    server.command(&["HSET", "sale:{W}:buyers", "u", "1:7"]).await;
    wait_for_empty_stream(&server).await;
    expect_books(&h, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn purchases_before_a_script_failed_are_counted() {
    if RedisFixture::skipped() {
        return;
    }
    let server = private_redis();
    let h = RedisFixture::at(server.url()).await;
    create_active(&h, "W", 10).await;
    // The script fails after it has sold a unit, when it appends the purchase to the stream.
    server.command(&["SET", "sale:{W}:stream", "not a stream"]).await;
    assert!(h.sales.buy_batch(buy_commands("W", "x", 3).into()).await.is_err());
    for (name, value) in [("stock", "9"), ("seq", "1")] {
        assert_eq!(server.command(&["GET", &format!("sale:{{W}}:{name}")]).await.text(), value, "{name}");
    }
    server.command(&["DEL", "sale:{W}:stream"]).await;
    assert_eq!(buy_each(&h, "W", &["x-0", "x-1"]).await, "AB");
    assert_eq!(find_purchase(&h, "W", "x-1").await.map(|receipt| receipt.number), Some(2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_hangs_stops_no_sale_and_records_everything_afterwards() {
    if RedisFixture::skipped() {
        return;
    }
    const BUYERS: usize = 4_000;
    let server = private_redis();
    let h = RedisFixture::at(server.url()).await;
    create_active(&h, "W", 5_000).await;
    let holder = h.database.connect().await.expect("a session");
    holder.batch_execute("BEGIN; SELECT FROM products FOR UPDATE").await.expect("the product is locked");
    for n in 0..BUYERS / 500 {
        let outcomes = buy_batch(&h, buy_commands("W", &format!("x{n}"), 500)).await;
        assert_eq!(receipts(&outcomes).len(), 500);
    }
    let recorded = h.sales.audit_sales().await.expect("an answer").persisted;
    assert_eq!(recorded, 0, "the store hangs");
    holder.batch_execute("COMMIT").await.expect("the product is unlocked");
    wait_for_empty_stream(&server).await;
    expect_books(&h, BUYERS as u64).await;
}

/// A stage at random.
fn random_stage(rng: &mut fastrand::Rng) -> SaleStage {
    let ends = [EndReason::SoldOut, EndReason::TimeExpired, EndReason::EndedByOperator].map(SaleState::Ended);
    let state = match rng.u32(..30) {
        0 => ends[rng.usize(..3)],
        1..5 => SaleState::Upcoming,
        _ => SaleState::Active,
    };
    SaleStage { state, stock: rng.u32(..40) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_log_follows_the_rule_and_every_reader_gets_the_same_events() {
    if RedisFixture::skipped() {
        return;
    }
    let server = private_redis();
    let h = RedisFixture::at(server.url()).await;
    let (mut rng, initial_stock) = (fastrand::Rng::with_seed(1), Stock::new(40).unwrap());
    let (mut stages, mut expected) = (BTreeMap::new(), Vec::new());
    let (mut reader, mut read): (Option<EventId>, Vec<LoggedEvent>) = (None, Vec::new());
    for _ in 0..500 {
        let publications: Vec<Publication> = (0..rng.usize(1..3))
            .map(|_| {
                let product = ProductId(rng.i64(1..500));
                let (from, to, stocks_max) = (random_stage(&mut rng), random_stage(&mut rng), rng.u32(..25));
                Publication { sku: sku("W"), product, from, to, initial_stock, stocks_max }
            })
            .collect();
        let page = h.sales.publish_events(&publications, None).await.expect("a page");
        for (publication, told) in publications.iter().zip(&page.stages) {
            let Publication { product, from, to, stocks_max, .. } = publication;
            let stage = stages.entry(*product).or_insert(*from);
            for (change, after) in stage.changes_to(to, initial_stock, *stocks_max) {
                expected.push((*product, change, after));
                *stage = after;
            }
            if (stage.state, to.state) == (SaleState::Upcoming, SaleState::Upcoming) {
                stage.stock = to.stock;
            }
            assert_eq!(told, stage);
        }
        let first = expected.len().saturating_sub(1_024);
        let all: Vec<_> =
            page.events.iter().map(|event| (event.product, event.change, event.stage)).collect();
        assert_eq!(all, expected[first..], "the last 1,024 in order");
        assert_eq!((page.latest.number, page.dropped.number), (expected.len() as u64, first as u64));
        assert!(page.events.iter().zip(first as u64 + 1..).all(|(event, number)| event.id.number == number));
        if rng.bool() {
            let news = h.sales.publish_events(&[], reader).await.expect("a page");
            reader = Some(news.latest);
            read.extend(news.events);
        }
    }
    assert!(expected.len() > 1_100, "the log was full: {}", expected.len());
    read.extend(h.sales.publish_events(&[], reader).await.expect("a page").events);
    let read: Vec<_> = read.into_iter().map(|event| (event.product, event.change, event.stage)).collect();
    assert_eq!(read, expected, "a reader that comes back gets each event once");
    server.command(&["FLUSHALL"]).await;
    let lost = h.sales.publish_events(&[], reader).await.expect("a page");
    assert!(Some(lost.latest) > reader && lost.events.is_empty(), "a lost log begins anew, in a later epoch");
}
