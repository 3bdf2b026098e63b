//! Servers on one Redis notify each other over its channel, without polling.

use std::time::Duration;

use futures_util::{StreamExt, stream};
use weir_testkit::http::Client;
use weir_testkit::postgres::{self, Database};
use weir_testkit::process::Weir;
use weir_testkit::proxy::Proxy;
use weir_testkit::redis::{Options, Reply, Server};
use weir_testkit::{skip, wait};

use super::fixtures::{Event, Listener, buy, create_active, create_soon, wait_for_state};
use crate::fixtures::{TEST_TIMEOUT, audit, operator, weir};

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
async fn a_server_publishes_what_it_missed_when_its_connection_is_back() {
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
    for stock in [3, 2] {
        assert_eq!(listener.until("stock-update").await.data["stock"], stock, "none is left out");
    }
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

/// How the version before sells. Its KEYS and ARGV are in the file.
const SELL_BEFORE: &str = include_str!("version_before/sale_buy.lua");

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_of_the_version_before_may_sell_beside_this_one() {
    if skip("postgres") || skip("redis") {
        return;
    }
    let pair = ServerPair::start().await;
    let mut far = pair.listener(40).await;
    let mut near = Listener::connect(pair.near.addr(), "?sku=W", None).await;
    let sell = async |buyer: &str| {
        let reply = pair.redis.command(&["EVAL", SELL_BEFORE, "1", "sale:{W}", "", "1", buyer]).await;
        let Reply::List(sales) = reply else { panic!("a list of sales: {reply:?}") };
        let [Reply::List(sale)] = &sales[..] else { panic!("one sale: {sales:?}") };
        sale.last().expect("an outcome").integer()
    };
    for n in 0..6 {
        if n % 2 == 0 {
            assert_eq!(sell(&format!("a{n}")).await, n + 1, "the number of the purchase");
        } else {
            assert!(buy(&pair.client(), "W", &format!("a{n}")).await.is_ok());
        }
    }
    assert_eq!(buy(&pair.client(), "W", "a0").await, Err("ALREADY_PURCHASED".to_owned()));
    assert_eq!(sell("a1").await, 0, "it has one already");
    let (on_near, on_far) = (read_until(&mut near, 34).await, read_until(&mut far, 34).await);
    assert_eq!(on_near, on_far, "the events of all purchases, with the same ids");
    let stocks: Vec<u64> = on_near.iter().filter_map(|event| event.data["stock"].as_u64()).collect();
    assert_eq!(stocks, (34..40).rev().collect::<Vec<_>>());
    wait::until("all purchases are recorded", TEST_TIMEOUT * 2, async || {
        let audit = audit(&operator(&pair.near)).await;
        audit["ok"] == true && audit["sale"]["items"][0]["persisted"] == 6
    })
    .await;
}

/// Reads stock updates until that of `stock`. Returns all events, without `initial`.
async fn read_until(listener: &mut Listener, stock: u32) -> Vec<Event> {
    let mut events = Vec::new();
    loop {
        let event = listener.next().await.expect("the stream must not end");
        let is_last = event.data["stock"] == stock && event.name == "stock-update";
        if event.name != "initial" {
            events.push(event);
        }
        if is_last {
            return events;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_continues_on_any_server_with_exactly_what_it_missed() {
    if skip("postgres") || skip("redis") {
        return;
    }
    let pair = ServerPair::start().await;
    let mut near = {
        let _far = pair.listener(40).await;
        Listener::connect(pair.near.addr(), "?sku=W", None).await
    };
    let mut far = Listener::connect(pair.far.addr(), "", None).await;
    let servers = [pair.client(), Client::new(pair.far.base_url())];
    // Twenty are sold in all: no more than have an event each, however fast the machine is.
    for n in 0..15 {
        assert!(buy(&servers[n % 2], "W", &format!("a{n}")).await.is_ok());
    }
    let (on_near, on_far) = (read_until(&mut near, 25).await, read_until(&mut far, 25).await);
    assert_eq!(on_near, on_far, "the same events with the same ids on both servers");
    let stocks: Vec<u64> = on_near.iter().filter_map(|event| event.data["stock"].as_u64()).collect();
    assert_eq!(stocks, (25..40).rev().collect::<Vec<_>>(), "every unit has an event");
    drop((near, far));
    // A client that had received some of them continues on the other server, at once, while more is sold.
    for n in 15..20 {
        assert!(buy(&servers[n % 2], "W", &format!("a{n}")).await.is_ok());
    }
    for (received, query) in [(3, "?sku=W"), (14, "")] {
        let last = &on_near[received].id;
        let mut replays = Vec::new();
        for address in [pair.near.addr(), pair.far.addr()] {
            let mut back = Listener::connect(address, query, Some(last)).await;
            // With what comes first, so that an `initial` is seen.
            let mut replay = vec![back.next().await.expect("an event")];
            replay.extend(read_until(&mut back, 20).await);
            let told: Vec<_> =
                replay.iter().map(|event| (&*event.name, event.data["stock"].as_u64())).collect();
            let expected = (20..39 - received as u64).rev().map(|stock| ("stock-update", Some(stock)));
            assert_eq!(told, expected.collect::<Vec<_>>(), "in order, each once");
            assert!(replay.starts_with(&on_near[received + 1..]), "as they were told before");
            replays.push(replay);
        }
        assert_eq!(replays[0], replays[1], "the same events with the same ids on both servers");
    }
    let mut unknown = Listener::connect(pair.far.addr(), "?sku=W", Some("1-1")).await;
    assert_eq!(unknown.next().await.expect("an event").name, "initial");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_stock_in_a_stream_never_goes_up_whichever_server_a_client_is_on() {
    if skip("postgres") || skip("redis") {
        return;
    }
    let pair = ServerPair::start().await;
    drop(pair.listener(400).await);
    let addresses = [pair.near.addr(), pair.far.addr()];
    // Each client reconnects after a few events, in turn to either server.
    let clients = (0..4).map(|n| {
        tokio::spawn(async move {
            let (mut last, mut lowest, mut connections) = (None::<String>, 401, n);
            loop {
                connections += 1;
                let address = addresses[connections % 2];
                let mut listener = Listener::connect(address, "?sku=W", last.as_deref()).await;
                for _ in 0..7 {
                    let event = listener.next().await.expect("the stream must not end");
                    assert!(event.name != "initial" || last.is_none(), "everything can be replayed");
                    last = Some(event.id);
                    if let Some(stock) = event.data["stock"].as_u64() {
                        assert!(stock < lowest, "{stock} after {lowest}");
                        lowest = stock;
                    }
                    if event.data["state"] == "ENDED" {
                        return lowest;
                    }
                }
            }
        })
    });
    let clients: Vec<_> = clients.collect();
    let servers = [pair.client(), Client::new(pair.far.base_url())];
    let buys = (0..400).map(|n| {
        let server = servers[n % 2].clone();
        async move { buy(&server, "W", &format!("b{n}")).await.expect("enough units are in stock") }
    });
    stream::iter(buys).buffer_unordered(20).collect::<Vec<_>>().await;
    for client in clients {
        let lowest =
            tokio::time::timeout(TEST_TIMEOUT * 2, client).await.expect("in time").expect("no panic");
        assert_eq!(lowest, 0, "the last stock is told before the end");
    }
}
