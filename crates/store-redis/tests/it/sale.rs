//! The cases of sale with Redis in front of Postgres, each in a database and on a Redis of its own, and what only Redis does.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::{CancellationToken, DropGuard};
use weir_core::ManualClock;
use weir_core::sale::{EndReason, State};
use weir_store::sale::{FollowMetrics, News, SaleStore};
use weir_store_conformance::START;
use weir_store_conformance::sale::SaleHarness;
use weir_store_conformance::sale::given::{
    active, bought, expect_books, found, purchase, sku, stand, wishes, written_down,
};
use weir_store_postgres::Postgres;
use weir_store_redis::{Redis, RedisSales, Target};
use weir_testkit::postgres::{self, Database};
use weir_testkit::proxy::Proxy;
use weir_testkit::redis::{Options, Server};
use weir_testkit::wait;

const PATIENCE: Duration = Duration::from_secs(60);
const ANSWERED_WITHIN: Duration = Duration::from_secs(10);

struct OnRedis {
    database: Arc<Database>,
    server: Arc<Server>,
    clock: Arc<ManualClock>,
    metrics: FollowMetrics,
    engine: RedisSales,
    _worker: DropGuard,
}

impl OnRedis {
    async fn on(database: Arc<Database>, server: Arc<Server>, clock: Arc<ManualClock>) -> Self {
        let url = server.url().to_owned();
        Self::at(database, server, clock, &url).await
    }

    /// Another one, whose way to the same Redis is through a proxy.
    async fn via(h: &Self, proxy: SocketAddr) -> Self {
        let url = h.server.url_via(proxy);
        Self::at(Arc::clone(&h.database), Arc::clone(&h.server), Arc::clone(&h.clock), &url).await
    }

    async fn at(database: Arc<Database>, server: Arc<Server>, clock: Arc<ManualClock>, url: &str) -> Self {
        let target: weir_store_postgres::Target = database.url().parse().expect("a Postgres URL");
        let time = Arc::<ManualClock>::clone(&clock);
        let ledger =
            Postgres::open_with_clock(target.with_patience(PATIENCE), 8, Some(time)).await.expect("it opens");
        let target: Target = url.parse().expect("a Redis URL");
        // What is late is not gone: a busy machine must not decide what these tests see.
        let redis = Redis::start(target.with_patience(ANSWERED_WITHIN));
        redis.connected().await;
        let (time, metrics) = (Arc::<ManualClock>::clone(&clock), FollowMetrics::default());
        let engine = RedisSales::new(redis, Arc::new(ledger), Some(time), metrics.clone());
        let closing = CancellationToken::new();
        tokio::spawn(engine.clone().follow(closing.clone()));
        Self { database, server, clock, metrics, engine, _worker: closing.drop_guard() }
    }

    async fn count(&self, key: &str) -> String {
        format!("{:?}", self.server.command(&["XLEN", key]).await)
    }
}

#[async_trait::async_trait]
impl SaleHarness for OnRedis {
    async fn open() -> Self {
        let database = Arc::new(postgres::Server::shared().database("sale").await);
        let server = Arc::new(Server::private(&Options { appendonly: false, ..Options::default() }));
        Self::on(database, server, Arc::new(ManualClock::at(START))).await
    }

    fn skipped() -> bool {
        weir_testkit::skip("postgres") || weir_testkit::skip("redis")
    }

    fn clock(&self) -> &ManualClock {
        &self.clock
    }

    fn sales(&self) -> Arc<dyn SaleStore> {
        Arc::new(self.engine.clone())
    }

    async fn settled(&self) {
        written_down(&self.engine, PATIENCE).await;
    }

    async fn reopen(self) -> Self {
        let Self { database, server, clock, engine, _worker: worker, .. } = self;
        drop((engine, worker));
        Self::on(database, server, clock).await
    }

    async fn another(&self) -> Option<Self> {
        let (database, server) = (Arc::clone(&self.database), Arc::clone(&self.server));
        Some(Self::on(database, server, Arc::clone(&self.clock)).await)
    }
}

weir_store_conformance::sale_suite!(OnRedis);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_forgot_everything_sells_nothing_twice_and_nothing_too_much() {
    if OnRedis::skipped() {
        return;
    }
    let h = OnRedis::open().await;
    active(&h, "W", 5).await;
    assert_eq!(bought(&h, "W", &["a", "b", "c"]).await, "BBB");
    // At once: what was sold is not written down by anybody but the server that sold it.
    h.server.command(&["FLUSHALL"]).await;
    assert_eq!(bought(&h, "W", &["a", "b", "c", "d", "e", "f"]).await, "AAABBS");
    assert_eq!(purchase(&h, "W", "e").await.map(|receipt| receipt.number), Some(5), "numbers go on");
    expect_books(&h, 5).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_server_that_rebuilds_a_sale_waits_for_what_this_one_has_sold() {
    if OnRedis::skipped() {
        return;
    }
    let h = OnRedis::open().await;
    let other = h.another().await.expect("another server");
    active(&h, "W", 5).await;
    assert_eq!(bought(&h, "W", &["a", "b", "c"]).await, "BBB");
    h.server.command(&["FLUSHALL"]).await;
    assert_eq!(bought(&other, "W", &["a", "x", "y", "z"]).await, "ABBS");
    expect_books(&other, 5).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_empties_the_stream_of_a_server_that_died() {
    if OnRedis::skipped() {
        return;
    }
    let h = OnRedis::open().await;
    active(&h, "W", 100).await;
    // Purchases that no living server remembers: only the stream has them.
    let id = found(&h, "W").await.expect("it is there").id.0.to_string();
    for n in 1..=3 {
        let (user, number) = (format!("u{n}"), n.to_string());
        let fields =
            ["XADD", "sale:{W}:stream", "*", "product", &id, "user", &user, "number", &number, "at", "7"];
        h.server.command(&fields).await;
        h.server.command(&["HSET", "sale:{W}:buyers", &user, &format!("{number}:7")]).await;
    }
    h.server.command(&["XADD", "sale:{W}:stream", "*", "what", "nonsense"]).await;
    h.settled().await;
    wait::until("the stream is empty", PATIENCE, async || h.count("sale:{W}:stream").await.contains('0'))
        .await;
    assert_eq!(purchase(&h, "W", "u2").await.map(|receipt| receipt.number), Some(2));
    expect_books(&h, 3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reconciliation_mends_either_side_and_counts_what_differed() {
    if OnRedis::skipped() {
        return;
    }
    let h = OnRedis::open().await;
    active(&h, "W", 10).await;
    assert_eq!(bought(&h, "W", &["a", "b", "c", "d"]).await, "BBBB");
    h.settled().await;
    assert_eq!(h.engine.reconcile_sale(&sku("W")).await.expect("an answer"), 0);
    h.database.execute("DELETE FROM purchases WHERE user_id = 'a'; UPDATE products SET sold = 3").await;
    h.server.command(&["HDEL", "sale:{W}:buyers", "b"]).await;
    assert_eq!(h.engine.reconcile_sale(&sku("W")).await.expect("an answer"), 2);
    assert_eq!(h.metrics.mismatches.get(), 2);
    assert_eq!(bought(&h, "W", &["a", "b"]).await, "AA");
    assert_eq!(stand(&h, "W").await.1, 6);
    expect_books(&h, 4).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_redis_is_away_nothing_is_sold_and_nothing_is_lost() {
    if OnRedis::skipped() {
        return;
    }
    let mut h = OnRedis::open().await;
    active(&h, "W", 10).await;
    assert_eq!(bought(&h, "W", &["a", "b"]).await, "BB");
    h.settled().await;
    let server = Arc::get_mut(&mut h.server).expect("nobody else has it");
    server.stop().await;
    let refused = h.engine.buy_batch(wishes("W", "x", 3).into()).await;
    assert!(refused.is_err_and(|error| error.is_transient()));
    server.start_empty().await;
    wait::until("it sells again", PATIENCE, async || {
        h.engine.buy_batch(wishes("W", "a", 1).into()).await.is_ok()
    })
    .await;
    assert_eq!(bought(&h, "W", &["a", "b", "c"]).await, "AAB");
    expect_books(&h, 4).await;
}

/// What an engine tells, as it comes.
fn listen(h: &OnRedis) -> (tokio::sync::mpsc::UnboundedReceiver<News>, DropGuard) {
    let (tell, told) = tokio::sync::mpsc::unbounded_channel();
    let (engine, closing) = (h.engine.clone(), CancellationToken::new());
    let telling = async move {
        let hear = |news| drop(tell.send(news));
        engine.tell(&hear).await;
    };
    tokio::spawn(closing.clone().run_until_cancelled_owned(telling));
    (told, closing.drop_guard())
}

async fn hears(told: &mut tokio::sync::mpsc::UnboundedReceiver<News>, wanted: &News) {
    let hearing = async { while told.recv().await.expect("it goes on") != *wanted {} };
    tokio::time::timeout(PATIENCE, hearing).await.unwrap_or_else(|_| panic!("{wanted:?} must be heard"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_one_server_does_is_told_to_the_other_also_after_a_cut() {
    if OnRedis::skipped() {
        return;
    }
    let h = OnRedis::open().await;
    let other = h.another().await.expect("another server");
    let (mut told, _ears) = listen(&other);
    hears(&mut told, &News::Begun).await;
    active(&h, "W", 2).await;
    let w = || sku("W");
    hears(&mut told, &News::Changed { sku: w() }).await;
    let product = found(&h, "W").await.expect("it is there").id;
    assert_eq!(bought(&h, "W", &["a"]).await, "B");
    hears(&mut told, &News::Sold { sku: w(), product, stock: 1 }).await;
    h.server.command(&["CLIENT", "KILL", "TYPE", "pubsub"]).await;
    hears(&mut told, &News::Ended).await;
    hears(&mut told, &News::Begun).await;
    assert_eq!(bought(&h, "W", &["b"]).await, "B");
    hears(&mut told, &News::Sold { sku: w(), product, stock: 0 }).await;
    hears(&mut told, &News::Turned { sku: w(), product, state: State::Ended(EndReason::SoldOut) }).await;
    assert!(h.engine.delete_product(&w()).await.expect("an answer"));
    hears(&mut told, &News::Changed { sku: w() }).await;
    // Whoever reads because of it is not given what was remembered, if the store answers in time.
    wait::until("it is gone from the other's board", PATIENCE, async || {
        other.engine.board().await.is_ok_and(|board| board.products.is_empty())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_subscription_that_is_silently_lost_is_noticed() {
    if OnRedis::skipped() {
        return;
    }
    let h = OnRedis::open().await;
    active(&h, "W", 2).await;
    let proxy = Proxy::start(h.server.address()).await;
    let far = OnRedis::via(&h, proxy.addr()).await;
    let (mut told, _ears) = listen(&far);
    hears(&mut told, &News::Begun).await;
    proxy.black_hole();
    hears(&mut told, &News::Ended).await;
    proxy.pass();
    hears(&mut told, &News::Begun).await;
    let product = found(&h, "W").await.expect("it is there").id;
    assert_eq!(bought(&h, "W", &["a"]).await, "B");
    hears(&mut told, &News::Sold { sku: sku("W"), product, stock: 1 }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_server_has_sold_leaves_the_stream_without_a_worker() {
    if OnRedis::skipped() {
        return;
    }
    let mut h = OnRedis::open().await;
    h._worker = CancellationToken::new().drop_guard();
    active(&h, "W", 5).await;
    assert_eq!(bought(&h, "W", &["a", "b", "c"]).await, "BBB");
    wait::until("the stream is empty", PATIENCE, async || h.count("sale:{W}:stream").await.contains('0'))
        .await;
    expect_books(&h, 3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_moves_what_was_sold_before_the_clock_was_set_back() {
    if OnRedis::skipped() {
        return;
    }
    let h = OnRedis::open().await;
    active(&h, "W", 5).await;
    let id = found(&h, "W").await.expect("it is there").id.0.to_string();
    let entry = ["product", &id, "user", "u", "number", "1", "at", "7"];
    h.server.command(&[&["XADD", "sale:{W}:stream", "9999999999999-0"][..], &entry].concat()).await;
    h.server.command(&["HSET", "sale:{W}:buyers", "u", "1:7"]).await;
    wait::until("the stream is empty", PATIENCE, async || h.count("sale:{W}:stream").await.contains('0'))
        .await;
    expect_books(&h, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_sold_before_a_script_failed_is_counted() {
    if OnRedis::skipped() {
        return;
    }
    let h = OnRedis::open().await;
    active(&h, "W", 10).await;
    // The unit is sold when it turns out that it cannot be put into the stream.
    h.server.command(&["SET", "sale:{W}:stream", "no stream"]).await;
    assert!(h.engine.buy_batch(wishes("W", "x", 3).into()).await.is_err());
    for (name, left) in [("stock", "9"), ("seq", "1")] {
        assert_eq!(h.server.command(&["GET", &format!("sale:{{W}}:{name}")]).await.text(), left, "{name}");
    }
    h.server.command(&["DEL", "sale:{W}:stream"]).await;
    assert_eq!(bought(&h, "W", &["x-0", "x-1"]).await, "AB");
    assert_eq!(purchase(&h, "W", "x-1").await.map(|receipt| receipt.number), Some(2));
}
