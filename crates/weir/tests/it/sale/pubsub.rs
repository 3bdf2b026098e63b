//! Servers on one Redis notify each other over its channel, without polling.

use std::time::Duration;

use weir_testkit::http::Client;
use weir_testkit::postgres::{self, Database};
use weir_testkit::process::Weir;
use weir_testkit::proxy::Proxy;
use weir_testkit::redis::{Options, Server};
use weir_testkit::{skip, wait};

use super::fixtures::{Listener, buy, create_active, create_soon, wait_for_state};
use crate::fixtures::{TEST_TIMEOUT, operator, weir};

/// Two servers on one Redis; the far one reaches it through a proxy.
struct ServerPair {
    redis: Server,
    proxy: Proxy,
    near: Weir,
    far: Weir,
    _database: Database,
}

impl ServerPair {
    async fn start() -> Self {
        let database = postgres::Server::shared().database("sale").await;
        let redis = Server::private(&Options { appendonly: false, ..Options::default() });
        let proxy = Proxy::start(redis.address()).await;
        let start = |cache: &str| weir().env("WEIR_STORE", database.url()).env("WEIR_CACHE", cache).spawn();
        let near = start(redis.url()).await;
        let far = start(&redis.url_via(proxy.addr())).await;
        Self { redis, proxy, near, far, _database: database }
    }

    fn client(&self) -> Client {
        Client::new(self.near.base_url())
    }

    /// Creates a sale and subscribes to it on the far server.
    async fn listener(&self, stock: u32) -> Listener {
        create_active(&operator(&self.near), "W", stock).await;
        wait_for_state(&Client::new(self.far.base_url()), "W", "ACTIVE").await;
        let mut listener = Listener::connect(self.far.addr(), "?sku=W", None).await;
        assert_eq!(listener.next().await.unwrap().data["stock"], stock);
        listener
    }

    /// The number of scripts that Redis has run so far.
    async fn script_calls(&self) -> u64 {
        let stats = self.redis.command(&["INFO", "commandstats"]).await.text();
        let line = stats.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
        line.and_then(|line| line.split(',').next()?.parse().ok()).unwrap_or(0)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_publishes_the_last_value_when_its_connection_is_back() {
    if skip("postgres") || skip("redis") {
        return;
    }
    let pair = ServerPair::start().await;
    let mut listener = pair.listener(5).await;
    assert!(buy(&pair.client(), "W", "a").await.is_ok());
    assert_eq!(listener.until("stock-update").await.data["stock"], 4);
    pair.proxy.refuse();
    pair.proxy.cut();
    // Published while the far server is not connected.
    assert!(buy(&pair.client(), "W", "b").await.is_ok());
    assert!(buy(&pair.client(), "W", "c").await.is_ok());
    pair.proxy.pass();
    assert_eq!(listener.until("stock-update").await.data["stock"], 2);
    assert!(buy(&pair.client(), "W", "d").await.is_ok());
    assert_eq!(listener.until("stock-update").await.data["stock"], 1, "the far server is subscribed again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sale_created_on_another_server_is_published_here_when_it_starts() {
    if skip("postgres") || skip("redis") {
        return;
    }
    let pair = ServerPair::start().await;
    let mut listener = pair.listener(5).await;
    let mut all = Listener::connect(pair.far.addr(), "", None).await;
    assert_eq!(all.next().await.unwrap().name, "initial");
    create_soon(&operator(&pair.near), "X", 3, 3_600_000).await;
    assert_eq!(all.until("state-change").await.data["sku"], "X");
    assert!(buy(&pair.client(), "X", "b").await.is_ok());
    assert_eq!(all.until("stock-update").await.data, serde_json::json!({"sku": "X", "stock": 2}));
    assert!(buy(&pair.client(), "W", "a").await.is_ok());
    assert_eq!(listener.next().await.unwrap().data["stock"], 4, "subscribers of W get no events of X");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_sale_with_a_subscriber_hardly_loads_redis() {
    if skip("postgres") || skip("redis") {
        return;
    }
    let pair = ServerPair::start().await;
    let _listener = pair.listener(5).await;
    // Waits for four quiet seconds: the start of the sale takes some time, and a busy machine may lose the channel.
    wait::until("Redis runs few scripts", TEST_TIMEOUT * 4, async || {
        let before = pair.script_calls().await;
        tokio::time::sleep(Duration::from_secs(4)).await;
        // Polling ten times a second would be at least forty.
        pair.script_calls().await - before <= 24
    })
    .await;
}
