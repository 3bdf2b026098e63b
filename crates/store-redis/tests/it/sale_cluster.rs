//! Sale on a cluster of three: sales are spread over its nodes, and all keys of one are on the same.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};
use weir_core::ManualClock;
use weir_core::sale::Sku;
use weir_store::sale::{BuyOutcome, FollowMetrics, News, SaleStore};
use weir_store_conformance::START;
use weir_store_conformance::sale::SaleHarness;
use weir_store_conformance::sale::given::{
    LEAD, active, bought, expect_books, sku, stand, terms, upcoming, wishes, written_down,
};
use weir_store_postgres::Postgres;
use weir_store_redis::{Redis, RedisSales};
use weir_testkit::postgres::{self, Database};
use weir_testkit::redis::Cluster;
use weir_testkit::wait;

const PATIENCE: Duration = Duration::from_secs(120);

struct OnCluster {
    database: Arc<Database>,
    cluster: Arc<Cluster>,
    clock: Arc<ManualClock>,
    engine: RedisSales,
    _worker: DropGuard,
}

impl OnCluster {
    async fn on(database: Arc<Database>, cluster: Arc<Cluster>, clock: Arc<ManualClock>) -> Self {
        let target: weir_store_postgres::Target = database.url().parse().expect("a Postgres URL");
        let time = Arc::<ManualClock>::clone(&clock);
        let ledger =
            Postgres::open_with_clock(target.with_patience(PATIENCE), 8, Some(time)).await.expect("it opens");
        let target: weir_store_redis::Target = cluster.url().parse().expect("a Redis URL");
        // A busy machine may take a while to answer, and nothing here is about that.
        let redis = Redis::start(target.with_patience(Duration::from_secs(10)));
        redis.connected().await;
        let time = Arc::<ManualClock>::clone(&clock);
        let engine = RedisSales::new(redis, Arc::new(ledger), Some(time), FollowMetrics::default());
        let closing = CancellationToken::new();
        tokio::spawn(engine.clone().follow(closing.clone()));
        Self { database, cluster, clock, engine, _worker: closing.drop_guard() }
    }

    /// Which node has a sale.
    async fn node_of(&self, sku: &str) -> usize {
        self.cluster.owner_of(self.cluster.slot_of(&format!("sale:{{{sku}}}:config")).await).await
    }
}

#[async_trait::async_trait]
impl SaleHarness for OnCluster {
    async fn open() -> Self {
        let database = Arc::new(postgres::Server::shared().database("sale").await);
        let cluster = tokio::task::spawn_blocking(Cluster::private).await.expect("it forms");
        Self::on(database, Arc::new(cluster), Arc::new(ManualClock::at(START))).await
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
        let Self { database, cluster, clock, engine, _worker: worker } = self;
        drop((engine, worker));
        Self::on(database, cluster, clock).await
    }

    async fn another(&self) -> Option<Self> {
        let (database, cluster) = (Arc::clone(&self.database), Arc::clone(&self.cluster));
        Some(Self::on(database, cluster, Arc::clone(&self.clock)).await)
    }
}

/// Skus of which every node has some.
async fn spread(h: &OnCluster) -> Vec<String> {
    let names: Vec<String> = (0..12).map(|n| format!("S{n}")).collect();
    let mut nodes = BTreeSet::new();
    for name in &names {
        nodes.insert(h.node_of(name).await);
    }
    assert_eq!(nodes.len(), 3, "every node has a sale");
    names
}

/// Makes sales of so many units each, and has them begin.
async fn open(h: &OnCluster, names: &[String], stock: u32) {
    for name in names {
        upcoming(h, name, terms(stock)).await;
    }
    h.clock.advance(LEAD);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sales_on_every_node_sell_exactly_their_stock_on_two_servers() {
    if OnCluster::skipped() {
        return;
    }
    let h = OnCluster::open().await;
    let other = h.another().await.expect("another server");
    let names = spread(&h).await;
    open(&h, &names, 20).await;
    let servers = [&h, &other];
    let rushes = servers.iter().enumerate().flat_map(|(n, server)| {
        names.iter().map(move |name| server.engine.buy_batch(wishes(name, &format!("s{n}-"), 30).into()))
    });
    let outcomes = futures_util::future::join_all(rushes).await;
    let is_bought = |outcome: &&BuyOutcome| matches!(outcome, BuyOutcome::Bought { .. });
    let sold = outcomes.iter().flatten().flatten().filter(is_bought).count();
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    assert_eq!(sold, 20 * names.len());
    for name in &names {
        assert_eq!(stand(&other, name).await.1, 0, "{name} is sold out everywhere");
    }
    h.settled().await;
    let keys = ["config", "state", "end_reason", "stock", "seq", "buyers", "stream"];
    let mut slots = BTreeSet::new();
    for key in keys {
        slots.insert(h.cluster.slot_of(&format!("sale:{{S0}}:{key}")).await);
    }
    assert_eq!(slots.len(), 1, "all keys of a sale are together");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_sold_on_any_node_is_heard_from_one_of_them() {
    if OnCluster::skipped() {
        return;
    }
    let h = OnCluster::open().await;
    let other = h.another().await.expect("another server");
    let names = spread(&h).await;
    open(&h, &names, 5).await;
    let (tell, mut told) = mpsc::unbounded_channel();
    let engine = other.engine.clone();
    let telling = tokio::spawn(async move {
        let hear = |news| drop(tell.send(news));
        engine.tell(&hear).await;
    });
    assert_eq!(told.recv().await, Some(News::Begun));
    for name in &names {
        assert_eq!(bought(&h, name, &["a"]).await, "B");
    }
    let mut missing: BTreeSet<Sku> = names.iter().map(|name| sku(name)).collect();
    let hearing = async {
        while !missing.is_empty() {
            if let News::Sold { sku, stock: 4, .. } = told.recv().await.expect("it goes on") {
                missing.remove(&sku);
            }
        }
    };
    tokio::time::timeout(PATIENCE, hearing).await.expect("all are heard");
    telling.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sale_that_moves_to_another_node_is_rebuilt_there_and_sells_no_unit_twice() {
    if OnCluster::skipped() {
        return;
    }
    let h = OnCluster::open().await;
    active(&h, "W", 5).await;
    assert_eq!(bought(&h, "W", &["a", "b", "c"]).await, "BBB");
    h.settled().await;
    let slot = h.cluster.slot_of("sale:{W}:config").await;
    let to = (h.node_of("W").await + 1) % 3;
    h.cluster.move_slot(slot, to).await;
    wait::until("it sells again", PATIENCE, async || {
        h.engine.buy_batch(wishes("W", "a", 1).into()).await.is_ok()
    })
    .await;
    assert_eq!(bought(&h, "W", &["a", "b", "c", "d", "e"]).await, "AAABS");
    expect_books(&h, 5).await;
}
