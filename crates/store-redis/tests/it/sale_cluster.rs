//! Sale on a cluster of three: sales are spread over its nodes, and all keys of a sale are on the same node.

use std::collections::BTreeSet;

use tokio::sync::mpsc;
use weir_core::sale::Sku;
use weir_store::sale::{BuyOutcome, SaleEvent, SaleStore};
use weir_store_conformance::sale::fixtures::{
    LEAD, buy_commands, buy_each, create_active, create_upcoming, expect_books, sku, state_and_stock, terms,
};
use weir_store_conformance::{ENGINE_TIMEOUT, EngineFixture, HasSales};
use weir_testkit::redis::Cluster;

type RedisFixture = crate::fixtures::RedisFixture<true>;

/// Starts a cluster for one test, and a server on it.
async fn start_cluster() -> (Cluster, RedisFixture) {
    let cluster = tokio::task::spawn_blocking(Cluster::private).await.expect("the cluster forms");
    let h = RedisFixture::at(&cluster.url()).await;
    (cluster, h)
}

/// Returns the node that has a sale.
async fn node_of(cluster: &Cluster, sku: &str) -> usize {
    cluster.owner_of(cluster.slot_of(&format!("sale:{{{sku}}}:config")).await).await
}

/// Returns skus of which every node has some.
async fn skus_on_every_node(cluster: &Cluster) -> Vec<String> {
    let names: Vec<String> = (0..12).map(|n| format!("S{n}")).collect();
    let mut nodes = BTreeSet::new();
    for name in &names {
        nodes.insert(node_of(cluster, name).await);
    }
    assert_eq!(nodes.len(), 3, "every node has a sale");
    names
}

/// Creates sales of `stock` units each and starts them.
async fn start_sales(h: &RedisFixture, names: &[String], stock: u32) {
    for name in names {
        create_upcoming(h, name, terms(stock)).await;
    }
    h.clock().advance(LEAD);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_servers_sell_exactly_the_stock_of_sales_on_every_node() {
    if RedisFixture::skipped() {
        return;
    }
    let (cluster, h) = start_cluster().await;
    let other = h.second_server().await.expect("another server");
    let names = skus_on_every_node(&cluster).await;
    start_sales(&h, &names, 20).await;
    let servers = [&h, &other];
    let calls = servers.iter().enumerate().flat_map(|(n, server)| {
        names.iter().map(move |name| server.sales.buy_batch(buy_commands(name, &format!("s{n}-"), 30).into()))
    });
    let outcomes = futures_util::future::join_all(calls).await;
    let is_bought = |outcome: &&BuyOutcome| matches!(outcome, BuyOutcome::Bought { .. });
    let sold = outcomes.iter().flatten().flatten().filter(is_bought).count();
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    assert_eq!(sold, 20 * names.len());
    for name in &names {
        assert_eq!(state_and_stock(&other, name).await.1, 0, "{name} is sold out everywhere");
    }
    h.wait_until_persisted().await;
    let keys = ["config", "state", "end_reason", "stock", "seq", "buyers", "stream"];
    let mut slots = BTreeSet::new();
    for key in keys {
        slots.insert(cluster.slot_of(&format!("sale:{{S0}}:{key}")).await);
    }
    assert_eq!(slots.len(), 1, "all keys of a sale are together");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_subscription_to_one_node_receives_the_events_of_all() {
    if RedisFixture::skipped() {
        return;
    }
    let (cluster, h) = start_cluster().await;
    let other = h.second_server().await.expect("another server");
    let names = skus_on_every_node(&cluster).await;
    start_sales(&h, &names, 5).await;
    let (sender, mut events) = mpsc::unbounded_channel();
    let sales = other.sales.clone();
    let subscription = tokio::spawn(async move {
        let send = |event| drop(sender.send(event));
        sales.follow_events(&send).await;
    });
    assert_eq!(events.recv().await, Some(SaleEvent::Subscribed));
    for name in &names {
        assert_eq!(buy_each(&h, name, &["a"]).await, "B");
    }
    let mut missing: BTreeSet<Sku> = names.iter().map(|name| sku(name)).collect();
    let received = async {
        while !missing.is_empty() {
            if let SaleEvent::Sold { sku, stock: 4, .. } =
                events.recv().await.expect("the subscription lasts")
            {
                missing.remove(&sku);
            }
        }
    };
    tokio::time::timeout(ENGINE_TIMEOUT, received).await.expect("all events are received");
    subscription.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sale_that_moves_to_another_node_is_rebuilt_there_and_sells_no_unit_twice() {
    if RedisFixture::skipped() {
        return;
    }
    let (cluster, h) = start_cluster().await;
    create_active(&h, "W", 5).await;
    assert_eq!(buy_each(&h, "W", &["a", "b", "c"]).await, "BBB");
    h.wait_until_persisted().await;
    let slot = cluster.slot_of("sale:{W}:config").await;
    let to = (node_of(&cluster, "W").await + 1) % 3;
    cluster.move_slot(slot, to).await;
    assert_eq!(buy_each(&h, "W", &["a", "b", "c", "d", "e", "f"]).await, "AAABBS");
    expect_books(&h, 5).await;
}
