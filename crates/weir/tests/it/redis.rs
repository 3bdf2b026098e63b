//! Quota with Redis in front of Postgres: exact on any number of servers, and whatever becomes of Redis.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde_json::json;
use weir_testkit::history::Tally;
use weir_testkit::http::Client;
use weir_testkit::postgres::{self, Database};
use weir_testkit::process::Weir;
use weir_testkit::proxy::Proxy;
use weir_testkit::redis::{Cluster, Options, Reply, Server};
use weir_testkit::{skip, wait};

use crate::given::{
    PATIENCE, configure, deliveries, message, operator, send_in_parallel, wait_until_delivered, weir,
};

/// The contract's bound: 2 s for the API, and room for a busy machine.
const ANSWER_WITHIN: Duration = Duration::from_secs(3);
const DOWN: &str = "REDIS DOWN — Falling back to Postgres";

fn skipped() -> bool {
    skip("postgres") || skip("redis")
}

/// A Redis that forgets what it has not been told to save.
fn forgetful() -> Server {
    Server::private(&Options { appendonly: false, ..Options::default() })
}

/// Servers on one database and one Redis.
struct Fleet {
    database: Database,
    weirs: Vec<Weir>,
    clients: Vec<Client>,
}

impl Fleet {
    async fn start(servers: usize, redis: &str) -> Self {
        let database = postgres::Server::shared().database("redis").await;
        let start = |_| weir().env("WEIR_STORE", database.url()).env("WEIR_CACHE", redis).spawn();
        let weirs = join_all((0..servers).map(start)).await;
        let clients: Vec<_> = weirs.iter().map(|weir| Client::new(weir.base_url())).collect();
        let fleet = Self { database, weirs, clients };
        fleet.is_healthy().await;
        fleet
    }

    /// Waits until every server has all its engines.
    async fn is_healthy(&self) {
        for client in &self.clients {
            wait::until("health is good", PATIENCE, async || {
                client.get("/health").await.unwrap().status == 200
            })
            .await;
        }
    }

    fn first(&self) -> &Client {
        &self.clients[0]
    }

    /// What the table says of a user.
    async fn stored(&self, user: &str) -> u32 {
        let select = format!("SELECT current_count::text FROM rate_limit_store WHERE user_id = '{user}'");
        let rows = self.database.query_strings(&select).await;
        rows[0][0].as_deref().unwrap().parse().unwrap()
    }

    fn lines(&self, text: &str) -> usize {
        let lines = self.weirs.iter().flat_map(Weir::log_lines);
        lines.filter(|line| line.contains(text)).count()
    }
}

/// What a line tells of an outage.
fn outage(line: &str) -> Option<&'static str> {
    if line.contains(DOWN) {
        return Some("down");
    }
    line.contains("Redis is back").then_some("back")
}

async fn send(client: &Client, user: &str) -> u16 {
    let started = Instant::now();
    let response = client.post("/api/send", &message(user, "m")).await.expect("an answer");
    assert!(started.elapsed() < ANSWER_WITHIN, "an answer took {:?}", started.elapsed());
    response.status
}

/// Callers that send for one user over all servers until told to stop.
struct Load {
    stop: Arc<AtomicBool>,
    tally: Arc<Tally>,
    callers: Vec<tokio::task::JoinHandle<()>>,
}

impl Load {
    fn start(clients: &[Client], user: &'static str) -> Self {
        let (stop, tally) = (Arc::new(AtomicBool::new(false)), Arc::new(Tally::new()));
        let callers = (0..16).map(|n| {
            let (client, stop, tally) =
                (clients[n % clients.len()].clone(), Arc::clone(&stop), Arc::clone(&tally));
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    tally.record(send(&client, user).await);
                }
            })
        });
        Self { callers: callers.collect(), stop, tally }
    }

    /// Waits until so many more were accepted, or the limit is reached.
    async fn goes_on(&self, more: usize) {
        let from = self.tally.count(200);
        wait::until("sends are accepted or over the limit", PATIENCE, async || {
            self.tally.count(200) >= from + more || self.tally.count(429) > 0
        })
        .await;
    }

    async fn end(self) -> Arc<Tally> {
        self.stop.store(true, Ordering::Relaxed);
        for caller in self.callers {
            caller.await.expect("no caller fails");
        }
        self.tally
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_400_parallel_sends_on_two_servers_exactly_50_pass_a_cold_cache() {
    if skipped() {
        return;
    }
    let redis = forgetful();
    let fleet = Fleet::start(2, redis.url()).await;
    for user in ["a", "b"] {
        configure(fleet.first(), user, 50, 60).await;
        let tally = send_in_parallel(&fleet.clients, user, 400).await;
        tally.expect(200, 50);
        tally.expect(429, 350);
        assert_eq!(fleet.stored(user).await, 50);
    }
    assert_eq!(redis.command(&["HGET", "RateLimiterCache:a", "currentCount"]).await.text(), "50");
    let books = wait_until_delivered(&operator(&fleet.weirs[0])).await;
    assert_eq!((&books["ok"], &books["quota"]["accepted"]), (&json!(true), &json!(100)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_hash_has_limit_count_and_the_rest_of_the_window_and_new_limits_delete_it() {
    if skipped() {
        return;
    }
    let redis = forgetful();
    let fleet = Fleet::start(2, redis.url()).await;
    let (a, b) = (&fleet.clients[0], &fleet.clients[1]);
    configure(a, "u", 10, 2).await;
    let exists = async || redis.command(&["EXISTS", "RateLimiterCache:u"]).await.integer();
    assert_eq!(exists().await, 0, "configuring writes nothing to Redis");
    for _ in 0..3 {
        assert_eq!(send(a, "u").await, 200);
    }
    let field = async |name| redis.command(&["HGET", "RateLimiterCache:u", name]).await.text();
    assert_eq!((field("rateLimit").await, field("currentCount").await), ("10".to_owned(), "3".to_owned()));
    let left = redis.command(&["PTTL", "RateLimiterCache:u"]).await.integer();
    assert!((90_000..=120_000).contains(&left), "{left} ms of 2 minutes");
    assert_eq!(a.get("/api/config/u").await.unwrap().json()["currentCount"], 3, "live");
    assert_eq!(
        b.get("/api/config/u").await.unwrap().json()["currentCount"],
        3,
        "live on the other server too"
    );

    configure(b, "u", 2, 60).await;
    assert_eq!(exists().await, 0, "the hash of the old limits is gone");
    let statuses = [send(a, "u").await, send(a, "u").await, send(a, "u").await];
    assert_eq!(statuses, [200, 200, 429], "the new limits hold on the other server");
    assert_eq!(b.delete("/api/config/u").await.unwrap().status, 204);
    wait::until("the user is unknown everywhere", PATIENCE, async || send(a, "u").await == 404).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cache_that_loses_its_memory_goes_on_from_the_count_in_postgres() {
    if skipped() {
        return;
    }
    let redis = forgetful();
    let fleet = Fleet::start(1, redis.url()).await;
    // Below ten nothing is reserved ahead, so nothing is lost either.
    configure(fleet.first(), "u", 9, 60).await;
    for round in 1..=9 {
        assert_eq!(send(fleet.first(), "u").await, 200, "send {round}");
        redis.command(&["FLUSHALL"]).await;
    }
    assert_eq!(send(fleet.first(), "u").await, 429);
    assert_eq!(fleet.stored("u").await, 9);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_becomes_of_redis_under_load_nobody_gets_past_the_limit() {
    if skipped() {
        return;
    }
    const LIMIT: usize = 8_000;
    let mut redis = forgetful();
    let fleet = Fleet::start(2, redis.url()).await;
    configure(fleet.first(), "u", 8_000, 600).await;
    let load = Load::start(&fleet.clients, "u");
    load.goes_on(300).await;
    // Gone, and back without its memory.
    redis.crash();
    load.goes_on(300).await;
    redis.start_empty().await;
    fleet.is_healthy().await;
    load.goes_on(300).await;
    // Gone, and back with an old memory.
    redis.command(&["SAVE"]).await;
    load.goes_on(300).await;
    redis.crash();
    redis.start().await;
    fleet.is_healthy().await;
    load.goes_on(300).await;
    // Silent for a while, and back with what it had.
    redis.pause();
    load.goes_on(300).await;
    redis.resume();
    fleet.is_healthy().await;
    load.goes_on(300).await;
    redis.command(&["FLUSHALL"]).await;
    wait::until("the limit is reached", Duration::from_secs(120), async || load.tally.count(429) > 100).await;
    let tally = load.end().await;
    let accepted = tally.count(200);
    assert!(accepted <= LIMIT, "{accepted} of {LIMIT} were accepted");
    // Each loss may cost what each server had reserved ahead, a tenth of the limit; here there are at most four.
    assert!(accepted >= LIMIT - 4 * 2 * LIMIT / 10, "only {accepted} of {LIMIT} were accepted");
    assert_eq!(tally.total(), accepted + tally.count(429) + tally.count(503));
    wait_until_delivered(&operator(&fleet.weirs[0])).await;
    let delivered: usize = fleet.weirs.iter().map(|weir| deliveries(weir).len()).sum();
    assert!(delivered >= accepted, "{delivered} of {accepted} were delivered");
    for weir in &fleet.weirs {
        // A slow machine may have outages of its own. Each is told of once, and so is its end.
        let told: Vec<_> = weir.log_lines().into_iter().filter_map(|line| outage(&line)).collect();
        assert!(told.contains(&"down"), "{told:?}");
        assert!(
            told.iter().zip(["down", "back"].iter().cycle()).all(|(told, next)| told == next),
            "{told:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_limits_that_redis_cannot_hear_of_hold_when_it_is_back() {
    if skipped() {
        return;
    }
    let mut redis = forgetful();
    let fleet = Fleet::start(2, redis.url()).await;
    let (a, b) = (&fleet.clients[0], &fleet.clients[1]);
    configure(a, "u", 1_000, 60).await;
    for _ in 0..5 {
        assert_eq!(send(b, "u").await, 200);
    }
    redis.pause();
    configure(a, "u", 3, 60).await;
    redis.resume();
    fleet.is_healthy().await;
    // The hash of the old limits is still there, and nobody may use it.
    let tally = send_in_parallel(&fleet.clients, "u", 40).await;
    tally.expect(200, 3);
    // So short an outage may be over before health has noticed it.
    wait::until("the outage is told to be over", PATIENCE, async || {
        fleet.lines("Redis is back") == fleet.lines(DOWN)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outage_is_one_line_and_no_error() {
    if skipped() {
        return;
    }
    let mut redis = forgetful();
    let fleet = Fleet::start(1, redis.url()).await;
    configure(fleet.first(), "u", 1_000, 60).await;
    redis.stop().await;
    for _ in 0..50 {
        assert_eq!(send(fleet.first(), "u").await, 200);
    }
    assert_eq!(fleet.lines(DOWN), 1);
    wait::until("health tells", PATIENCE, async || fleet.first().get("/health").await.unwrap().status == 503)
        .await;
    let health = fleet.first().get("/health").await.unwrap().json();
    assert_eq!(
        (&health["data"]["status"], &health["data"]["checks"]["redis"]["status"]),
        (&json!("degraded"), &json!("down"))
    );
    let metrics = fleet.first().get("/metrics").await.unwrap();
    let metrics = String::from_utf8_lossy(&metrics.body);
    assert!(metrics.contains(r#"weir_engine_up{engine="redis"} 0"#), "{metrics}");
    assert_eq!(fleet.first().get("/readyz").await.unwrap().status, 200, "it can do its work");
    redis.start_empty().await;
    fleet.is_healthy().await;
    assert_eq!(send(fleet.first(), "u").await, 200);
    let hash = redis.command(&["HGET", "RateLimiterCache:u", "currentCount"]).await;
    assert_eq!(hash.text(), "51", "Redis counts again, from where Postgres was");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_table_has_the_true_count_when_a_user_rests_and_when_the_server_stops() {
    if skipped() {
        return;
    }
    let redis = forgetful();
    let mut fleet = Fleet::start(1, redis.url()).await;
    for user in ["rests", "stops"] {
        configure(fleet.first(), user, 1_000, 60).await;
    }
    for _ in 0..7 {
        assert_eq!(send(fleet.first(), "rests").await, 200);
    }
    assert!(fleet.stored("rests").await >= 7, "never below the true count");
    wait::until("what was reserved ahead is given back", PATIENCE, async || fleet.stored("rests").await == 7)
        .await;
    assert_eq!(send(fleet.first(), "stops").await, 200);
    fleet.weirs[0].terminate();
    assert!(fleet.weirs[0].wait(PATIENCE).await.success());
    assert_eq!(fleet.stored("stops").await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_network_to_redis_is_answered_by_postgres() {
    if skipped() {
        return;
    }
    let redis = forgetful();
    let proxy = Proxy::start(redis.address()).await;
    let fleet = Fleet::start(1, &redis.url_via(proxy.addr())).await;
    let client = fleet.first();
    configure(client, "u", 100_000, 600).await;
    let expect_service = async || {
        for _ in 0..5 {
            assert_eq!(send(client, "u").await, 200);
        }
    };
    proxy.delay(Duration::from_millis(20));
    expect_service().await;
    proxy.cut();
    expect_service().await;
    proxy.pass();
    fleet.is_healthy().await;
    proxy.half_open_after(64);
    expect_service().await;
    proxy.pass();
    proxy.cut();
    fleet.is_healthy().await;
    proxy.black_hole();
    expect_service().await;
    proxy.pass();
    proxy.cut();
    fleet.is_healthy().await;
    proxy.refuse();
    proxy.cut();
    expect_service().await;
    proxy.pass();
    fleet.is_healthy().await;
    expect_service().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_serves_every_user_and_the_loss_of_a_node_costs_nobody_an_answer() {
    if skipped() {
        return;
    }
    let mut cluster = Cluster::private();
    let fleet = Fleet::start(2, &cluster.url()).await;
    let users: Vec<String> = (0..12).map(|n| format!("user-{n}")).collect();
    for user in &users {
        configure(fleet.first(), user, 8, 60).await;
        assert_eq!(send(fleet.first(), user).await, 200);
    }
    for node in cluster.nodes() {
        let keys = node.command(&["DBSIZE"]).await.integer();
        assert!(keys > 0, "every node has some of the users");
    }
    // A user's slot moves: the hash goes with it, and servers follow.
    let slot = cluster.slot_of("RateLimiterCache:user-0").await;
    let to = (cluster.owner_of(slot).await + 1) % 3;
    cluster.move_slot(slot, to).await;
    assert_eq!(send(&fleet.clients[1], "user-0").await, 200);
    cluster.nodes_mut()[0].crash();
    for user in &users {
        let tally = send_in_parallel(&fleet.clients, user, 20).await;
        let left = if user == "user-0" { 6 } else { 7 };
        tally.expect(200, left);
        tally.expect(429, 20 - left);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_with_tls_and_a_password_is_used_and_a_wrong_password_is_not_told() {
    if skipped() {
        return;
    }
    let password = Some("s3cret-of-redis".to_owned());
    let redis = Server::private(&Options { password, tls: true, appendonly: false, ..Options::default() });
    let ca = redis.ca_file().expect("a certificate").display().to_string();
    let fleet = Fleet::start(1, &format!("{}?sslrootcert={ca}", redis.url())).await;
    configure(fleet.first(), "u", 5, 60).await;
    assert_eq!(send(fleet.first(), "u").await, 200);
    assert_eq!(redis.command(&["HGET", "RateLimiterCache:u", "currentCount"]).await.text(), "1");

    let wrong = redis.url().replace("s3cret-of-redis", "wr0ng-password");
    let database = postgres::Server::shared().database("redis").await;
    let untrusted = weir().env("WEIR_STORE", database.url()).env("WEIR_CACHE", redis.url()).spawn().await;
    let refused = weir()
        .env("WEIR_STORE", database.url())
        .env("WEIR_CACHE", format!("{wrong}?sslrootcert={ca}"))
        .spawn()
        .await;
    for weir in [&untrusted, &refused] {
        let client = Client::new(weir.base_url());
        configure(&client, "v", 5, 60).await;
        assert_eq!(send(&client, "v").await, 200, "Postgres serves");
        weir.wait_for_log(|line| line.contains(DOWN), PATIENCE).await;
        let log = weir.log_lines().join("\n");
        assert!(!log.contains("wr0ng-password") && !log.contains("s3cret-of-redis"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_was_demoted_and_promoted_again_hands_nothing_out_twice() {
    if skipped() {
        return;
    }
    let (a, b) = (forgetful(), forgetful());
    let port = |server: &Server| server.address().port().to_string();
    let fleet = Fleet::start(1, a.url()).await;
    configure(fleet.first(), "u", 100, 600).await;
    assert_eq!(send(fleet.first(), "u").await, 200);
    let is_copied = async |from: &Server, to: &Server| {
        let count = ["HGET", "RateLimiterCache:u", "currentCount"];
        wait::until("the copy is there", PATIENCE, async || {
            to.try_command(&count).await.is_ok_and(|copy| copy == Reply::Text("1".into()))
                && from.try_command(&["PING"]).await.is_ok()
        })
        .await;
    };
    // A copy of an early state comes back to where it was made, in the same run of the same process.
    b.command(&["REPLICAOF", "127.0.0.1", &port(&a)]).await;
    is_copied(&a, &b).await;
    b.command(&["REPLICAOF", "NO", "ONE"]).await;
    for _ in 0..10 {
        assert_eq!(send(fleet.first(), "u").await, 200);
    }
    a.command(&["REPLICAOF", "127.0.0.1", &port(&b)]).await;
    is_copied(&b, &a).await;
    a.command(&["REPLICAOF", "NO", "ONE"]).await;
    let tally = send_in_parallel(&fleet.clients, "u", 150).await;
    assert!(tally.count(200) + 11 <= 100, "{} more were accepted", tally.count(200));
    assert!(tally.count(200) + 11 >= 80, "only {} more were accepted", tally.count(200));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_on_different_redis_servers_obey_the_same_new_limits() {
    if skipped() {
        return;
    }
    let (left, right) = (forgetful(), forgetful());
    let database = postgres::Server::shared().database("redis").await;
    let start =
        |redis: &Server| weir().env("WEIR_STORE", database.url()).env("WEIR_CACHE", redis.url()).spawn();
    let (one, two) = tokio::join!(start(&left), start(&right));
    let (a, b) = (Client::new(one.base_url()), Client::new(two.base_url()));
    for client in [&a, &b] {
        wait::until("health is good", PATIENCE, async || client.get("/health").await.unwrap().status == 200)
            .await;
    }
    configure(&a, "u", 10_000, 600).await;
    for _ in 0..20 {
        assert_eq!(send(&b, "u").await, 200);
    }
    configure(&a, "u", 5, 600).await;
    wait::until("the new limits hold on the other server", Duration::from_secs(1), async || {
        b.get("/api/config/u").await.unwrap().json()["rateLimit"] == 5 && {
            let left = right.command(&["HGET", "RateLimiterCache:u", "rateLimit"]).await;
            left != Reply::Text("10000".into())
        }
    })
    .await;
    let tally = send_in_parallel(&[a, b], "u", 60).await;
    assert!(tally.count(200) <= 5, "{} were accepted", tally.count(200));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_is_no_hash_troubles_nobody() {
    if skipped() {
        return;
    }
    let redis = forgetful();
    let fleet = Fleet::start(1, redis.url()).await;
    for user in ["spoilt", "well"] {
        configure(fleet.first(), user, 20, 600).await;
    }
    redis.command(&["SET", "RateLimiterCache:spoilt", "x"]).await;
    for _ in 0..5 {
        assert_eq!([send(fleet.first(), "spoilt").await, send(fleet.first(), "well").await], [200, 200]);
    }
    redis.command(&["SET", "RateLimiterCache:spoilt", "x"]).await;
    configure(fleet.first(), "spoilt", 2, 600).await;
    let tally = send_in_parallel(&fleet.clients, "spoilt", 10).await;
    tally.expect(200, 2);
    assert_eq!(fleet.lines(DOWN), 0);
    assert_eq!(fleet.first().get("/health").await.unwrap().status, 200);
}
