//! Sale with Redis in front of Postgres: Redis decides, Postgres follows. Whichever of them fails, no unit is sold twice and
//! no answered purchase is lost.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use futures_util::StreamExt;
use futures_util::stream;
use serde_json::{Value, json};
use weir_testkit::http::Client;
use weir_testkit::postgres::{self, Database};
use weir_testkit::process::Weir;
use weir_testkit::proxy::Proxy;
use weir_testkit::redis::{Options, Server};
use weir_testkit::{skip, wait};

use super::crowd::buy_in_parallel;
use super::fixtures::{
    Listener, MANY_CALLERS, UNTHROTTLED, attempt, buy, create_active, many_connections, metric, purchase,
    status, wait_for_state,
};
use crate::fixtures::{TEST_TIMEOUT, audit, operator, weir_with_long_timeouts};

pub(super) fn skipped() -> bool {
    skip("postgres") || skip("redis")
}

/// Two servers on one database and one Redis without persistence, each behind a proxy.
pub(super) struct Fleet {
    pub(super) redis: Server,
    pub(super) to_redis: Proxy,
    pub(super) to_postgres: Proxy,
    pub(super) weirs: Vec<Weir>,
    pub(super) clients: Vec<Client>,
    database: Database,
}

impl Fleet {
    pub(super) async fn start() -> Self {
        Self::start_with(|proxy, _direct| proxy, &[UNTHROTTLED]).await
    }

    /// Starts servers for ten thousand concurrent callers, without proxies: the callers keep this process busy, in which
    /// the proxies run.
    async fn start_for_many_callers() -> Self {
        Self::start_with(|_proxy, direct| direct, &MANY_CALLERS).await
    }

    /// Starts servers with these environment variables. `choose` picks the proxy's or the direct address of an engine.
    pub(super) async fn start_with(
        choose: fn(SocketAddr, SocketAddr) -> SocketAddr,
        settings: &[(&str, &str)],
    ) -> Self {
        let database = postgres::Server::shared().database("sale").await;
        let redis = Server::private(&Options { appendonly: false, ..Options::default() });
        let to_redis = Proxy::start(redis.address()).await;
        let to_postgres = Proxy::start(postgres::Server::shared().addr()).await;
        let store = database.url_via(choose(to_postgres.addr(), postgres::Server::shared().addr()));
        let cache = redis.url_via(choose(to_redis.addr(), redis.address()));
        let start = || {
            let builder = weir_with_long_timeouts().env("WEIR_STORE", &store).env("WEIR_CACHE", &cache);
            settings.iter().fold(builder, |builder, (name, value)| builder.env(name, value)).spawn()
        };
        let weirs = vec![start().await, start().await];
        let clients: Vec<Client> = weirs.iter().map(|weir| Client::new(weir.base_url())).collect();
        let fleet = Self { redis, to_redis, to_postgres, weirs, clients, database };
        fleet.wait_until_healthy().await;
        fleet
    }

    pub(super) async fn wait_until_healthy(&self) {
        for client in &self.clients {
            wait::until("health is good", TEST_TIMEOUT * 2, async || {
                client.get("/health").await.is_ok_and(|answer| answer.status == 200)
            })
            .await;
        }
    }

    pub(super) fn operator(&self) -> Client {
        operator(&self.weirs[0])
    }

    /// Waits until all sold units are persisted and the audit balances.
    pub(super) async fn expect_audit(&self, sku: &str, stock: u32, sold: u32) {
        self.expect_items(json!([{"sku": sku, "initialStock": stock, "sold": sold, "persisted": sold}]))
            .await;
    }

    pub(super) async fn expect_items(&self, items: Value) {
        wait::until("all purchases are persisted", TEST_TIMEOUT * 2, async || {
            let audit = audit(&self.operator()).await;
            audit["ok"] == true && audit["sale"]["items"] == items
        })
        .await;
    }

    /// Runs a query that returns a count, directly in Postgres.
    pub(super) async fn count(&self, sql: &str) -> i64 {
        let rows = self.database.query_strings(sql).await;
        rows[0][0].as_deref().expect("a count").parse().expect("a number")
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_buyers_on_two_servers_get_exactly_a_hundred_units() {
    if skipped() {
        return;
    }
    let _turn = many_connections().await;
    let fleet = Fleet::start_for_many_callers().await;
    create_active(&fleet.operator(), "W", 100).await;
    wait_for_state(&fleet.clients[1], "W", "ACTIVE").await;
    let (bought, refused) =
        buy_in_parallel(&fleet.clients, "W", (0..10_000).map(|n| format!("buyer-{n}"))).await;
    assert_eq!(bought.len(), 100);
    assert_eq!(refused, BTreeMap::from([("SOLD_OUT".to_owned(), 9_900)]));
    for client in &fleet.clients {
        wait_for_state(client, "W", "ENDED").await;
        assert_eq!(status(client, "W").await["stock"], 0);
        for (buyer, number) in bought.iter().take(10) {
            assert_eq!(purchase(client, "W", buyer).await.json()["data"]["purchaseNo"], **number);
        }
    }
    fleet.expect_audit("W", 100, 100).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flush_of_redis_during_a_sale_oversells_nothing() {
    if skipped() {
        return;
    }
    let fleet = Fleet::start().await;
    create_active(&fleet.operator(), "W", 60).await;
    let (first, _) = buy_in_parallel(&fleet.clients, "W", (0..40).map(|n| format!("a-{n}"))).await;
    assert_eq!(first.len(), 40);
    fleet.redis.command(&["FLUSHALL"]).await;
    let buyers = (0..60).map(|n| format!("b-{n}"));
    let attempts = buyers.enumerate().map(|(n, buyer)| {
        let client = &fleet.clients[n % 2];
        async move { buy(client, "W", &buyer).await }
    });
    let answers: Vec<_> = stream::iter(attempts).buffer_unordered(20).collect().await;
    assert_eq!(
        answers.iter().filter(|answer| answer.is_ok()).count(),
        20,
        "exactly the remaining stock is sold"
    );
    for (buyer, number) in &first {
        let client = &fleet.clients[1];
        assert_eq!(purchase(client, "W", buyer).await.json()["data"]["purchaseNo"], **number, "{buyer}");
    }
    fleet.expect_audit("W", 60, 60).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sales_continue_without_postgres_and_are_persisted_when_it_is_back() {
    if skipped() {
        return;
    }
    let fleet = Fleet::start().await;
    create_active(&fleet.operator(), "W", 100).await;
    wait_for_state(&fleet.clients[1], "W", "ACTIVE").await;
    fleet.to_postgres.refuse();
    fleet.to_postgres.cut();
    let (bought, _) = buy_in_parallel(&fleet.clients, "W", (0..50).map(|n| format!("a-{n}"))).await;
    assert_eq!(bought.len(), 50, "Redis decides");
    for client in &fleet.clients {
        wait::until("status is current", TEST_TIMEOUT, async || status(client, "W").await["stock"] == 50)
            .await;
        let (buyer, number) = bought.iter().next().unwrap();
        assert_eq!(purchase(client, "W", buyer).await.json()["data"]["purchaseNo"], **number);
        wait::until("what waits is shown", TEST_TIMEOUT * 2, async || {
            metric(client, "weir_sale_queue_depth").await == 50
        })
        .await;
    }
    fleet.to_postgres.pass();
    fleet.wait_until_healthy().await;
    fleet.expect_audit("W", 100, 50).await;
    for client in &fleet.clients {
        wait::until("nothing waits any more", TEST_TIMEOUT * 2, async || {
            metric(client, "weir_sale_queue_depth").await == 0
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sales_are_unavailable_without_redis_and_continue_when_it_is_back() {
    if skipped() {
        return;
    }
    let fleet = Fleet::start().await;
    create_active(&fleet.operator(), "W", 10).await;
    let client = &fleet.clients[0];
    assert!(buy(client, "W", "a").await.is_ok());
    fleet.to_redis.refuse();
    fleet.to_redis.cut();
    // The cached status may be returned for another tenth of a second.
    wait::until("status is unavailable, too", TEST_TIMEOUT, async || {
        client.get("/api/v1/sales?sku=W").await.unwrap().status == 503
    })
    .await;
    for response in [attempt(client, "W", "b").await, client.get("/api/v1/sales?sku=W").await.unwrap()] {
        let error = response.json()["error"].clone();
        assert_eq!((response.status, &error["code"]), (503, &json!("SERVICE_UNAVAILABLE")));
        assert_eq!(error["message"], "Service temporarily unavailable. Please try again.");
        assert!(response.header("retry-after").is_some());
    }
    fleet.to_redis.pass();
    fleet.wait_until_healthy().await;
    wait::until("sales are available again", TEST_TIMEOUT, async || {
        client.get("/api/v1/sales?sku=W").await.unwrap().status == 200
    })
    .await;
    assert!(buy(client, "W", "c").await.is_ok());
    assert_eq!(buy(client, "W", "a").await, Err("ALREADY_PURCHASED".to_owned()));
    fleet.expect_audit("W", 10, 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn purchases_of_a_killed_server_are_persisted_by_the_others() {
    if skipped() {
        return;
    }
    let mut fleet = Fleet::start().await;
    create_active(&fleet.operator(), "W", 100).await;
    wait_for_state(&fleet.clients[1], "W", "ACTIVE").await;
    let (bought, _) = buy_in_parallel(&fleet.clients[1..], "W", (0..30).map(|n| format!("a-{n}"))).await;
    fleet.weirs[1].kill_9();
    for (buyer, number) in &bought {
        let found = purchase(&fleet.clients[0], "W", buyer).await;
        assert_eq!(found.json()["data"]["purchaseNo"], **number, "{buyer}");
    }
    fleet.expect_audit("W", 100, 30).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sales_of_one_server_are_published_by_the_other() {
    if skipped() {
        return;
    }
    let fleet = Fleet::start().await;
    create_active(&fleet.operator(), "W", 2).await;
    wait_for_state(&fleet.clients[1], "W", "ACTIVE").await;
    let mut listener = Listener::connect(fleet.weirs[1].addr(), "?sku=W", None).await;
    assert_eq!(listener.next().await.unwrap().data["stock"], 2);
    assert!(buy(&fleet.clients[0], "W", "a").await.is_ok());
    assert_eq!(listener.until("stock-update").await.data["stock"], 1);
    assert!(buy(&fleet.clients[0], "W", "b").await.is_ok());
    assert_eq!(listener.until("state-change").await.data["reason"], "SOLD_OUT");
}
