//! How servers on one Redis hear of each other: by its channel, and not by asking again and again.

use std::time::Duration;

use weir_testkit::http::Client;
use weir_testkit::postgres::{self, Database};
use weir_testkit::process::Weir;
use weir_testkit::proxy::Proxy;
use weir_testkit::redis::{Options, Server};
use weir_testkit::{skip, wait};

use super::fixtures::{Listener, active, becomes, buy, soon};
use crate::fixtures::{PATIENCE, operator, weir};

/// Two servers on one Redis; the second one's way there is through a proxy.
struct Pair {
    redis: Server,
    proxy: Proxy,
    near: Weir,
    far: Weir,
    _database: Database,
}

impl Pair {
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

    /// Somebody who listens to a sale at the far server, where all of so many units are left.
    async fn listener(&self, stock: u32) -> Listener {
        active(&operator(&self.near), "W", stock).await;
        becomes(&Client::new(self.far.base_url()), "W", "ACTIVE").await;
        let mut listener = Listener::connect(self.far.addr(), "?sku=W", None).await;
        assert_eq!(listener.next().await.unwrap().data["stock"], stock);
        listener
    }

    /// Scripts that Redis has run so far.
    async fn calls(&self) -> u64 {
        let stats = self.redis.command(&["INFO", "commandstats"]).await.text();
        let line = stats.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
        line.and_then(|line| line.split(',').next()?.parse().ok()).unwrap_or(0)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_was_cut_off_tells_the_last_value_when_it_is_back() {
    if skip("postgres") || skip("redis") {
        return;
    }
    let pair = Pair::start().await;
    let mut listener = pair.listener(5).await;
    assert!(buy(&pair.client(), "W", "a").await.is_ok());
    assert_eq!(listener.until("stock-update").await.data["stock"], 4);
    pair.proxy.refuse();
    pair.proxy.cut();
    // Told on the channel while the far server hears nothing.
    assert!(buy(&pair.client(), "W", "b").await.is_ok());
    assert!(buy(&pair.client(), "W", "c").await.is_ok());
    pair.proxy.pass();
    assert_eq!(listener.until("stock-update").await.data["stock"], 2);
    assert!(buy(&pair.client(), "W", "d").await.is_ok());
    assert_eq!(listener.until("stock-update").await.data["stock"], 1, "and it hears again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sale_made_on_another_server_is_told_here_when_it_begins() {
    if skip("postgres") || skip("redis") {
        return;
    }
    let pair = Pair::start().await;
    let mut listener = pair.listener(5).await;
    let mut all = Listener::connect(pair.far.addr(), "", None).await;
    assert_eq!(all.next().await.unwrap().name, "initial");
    soon(&operator(&pair.near), "X", 3, 3_600_000).await;
    assert_eq!(all.until("state-change").await.data["sku"], "X");
    assert!(buy(&pair.client(), "X", "b").await.is_ok());
    assert_eq!(all.until("stock-update").await.data, serde_json::json!({"sku": "X", "stock": 2}));
    assert!(buy(&pair.client(), "W", "a").await.is_ok());
    assert_eq!(
        listener.next().await.unwrap().data["stock"],
        4,
        "and whoever listens to W hears nothing of X"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_nothing_happens_redis_is_hardly_asked_although_somebody_listens() {
    if skip("postgres") || skip("redis") {
        return;
    }
    let pair = Pair::start().await;
    let _listener = pair.listener(5).await;
    // Four quiet seconds must come: what the beginning has caused takes its time, and a busy machine may lose the channel.
    wait::until("Redis is hardly asked", PATIENCE * 4, async || {
        let before = pair.calls().await;
        tokio::time::sleep(Duration::from_secs(4)).await;
        // Asking ten times a second would be forty and more.
        pair.calls().await - before <= 24
    })
    .await;
}
