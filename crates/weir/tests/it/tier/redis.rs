//! Limits that servers share through Redis, and limits while Redis is down.

use std::time::Instant;

use futures_util::future::join_all;
use serde_json::json;
use weir_testkit::http::Client;
use weir_testkit::postgres::{self, Database};
use weir_testkit::process::Weir;
use weir_testkit::redis::{Options, Server};
use weir_testkit::{skip, wait};

use super::fixtures::{check_one, put_policy, remaining, slow_bucket, user};
use crate::fixtures::{TEST_TIMEOUT, operator, weir};

/// Two servers on one database and one Redis.
struct ServerPair {
    _database: Database,
    weirs: [Weir; 2],
}

impl ServerPair {
    async fn start(redis: &Server) -> Self {
        let database = postgres::Server::shared().database("tier").await;
        let engines = || weir().env("WEIR_STORE", database.url()).env("WEIR_CACHE", redis.url());
        // Timeouts that a busy machine does not exceed.
        let start = || engines().env("WEIR_HTTP_TIMEOUT", "60s").env("WEIR_REDIS_TIMEOUT", "30s").spawn();
        let (a, b) = tokio::join!(start(), start());
        let pair = Self { _database: database, weirs: [a, b] };
        pair.wait_until_redis_is("up").await;
        pair
    }

    async fn wait_until_redis_is(&self, state: &str) {
        for weir in &self.weirs {
            wait::until("health reports the state of Redis", TEST_TIMEOUT, async || {
                let health = operator(weir).get("/health").await.unwrap().json();
                health["data"]["checks"]["redis"]["status"] == state
            })
            .await;
        }
    }

    /// The number of decisions that the servers made without Redis.
    async fn decided_without_redis(&self) -> u64 {
        let mut total = 0;
        for weir in &self.weirs {
            let metrics = operator(weir).get("/metrics").await.unwrap().body;
            let metrics = String::from_utf8(metrics.to_vec()).unwrap();
            let alone = metrics.lines().find_map(|line| line.strip_prefix("weir_tier_decided_alone_total "));
            total += alone.unwrap().parse::<u64>().unwrap();
        }
        total
    }

    /// Expects that exactly the limit was allowed, and that Redis made all decisions.
    async fn expect_exactly(&self, limit: usize, allowed: usize) {
        assert_eq!((allowed, self.decided_without_redis().await), (limit, 0));
    }

    /// Puts a policy, and waits until both servers have it.
    async fn put_policy(&self, name: &str, policy: serde_json::Value) {
        put_policy(&operator(&self.weirs[0]), name, policy).await;
        wait::until("the other server has the policy", TEST_TIMEOUT, async || {
            operator(&self.weirs[1]).get(&format!("/admin/policies/{name}")).await.unwrap().status == 200
        })
        .await;
    }
}

fn skipped() -> bool {
    skip("postgres") || skip("redis")
}

fn redis_without_persistence() -> Server {
    Server::private(&Options { appendonly: false, ..Options::default() })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_of_one_server_is_settled_on_another_once() {
    if skipped() {
        return;
    }
    let redis = redis_without_persistence();
    let pair = ServerPair::start(&redis).await;
    pair.put_policy("p", json!({"kind": "fixed_window", "limit": 1_000, "window": "P300D"})).await;
    let [a, b] = [0, 1].map(|at| operator(&pair.weirs[at]));
    let body = json!({"policy": "p", "key": "k", "cost": 600, "ttl": "PT1H"});
    let held = a.post("/v1/hold", &body).await.unwrap().json();
    let settle = |caller: &Client, cost: u32| {
        let (caller, body) = (caller.clone(), json!({"holdId": held["holdId"], "cost": cost}));
        async move { caller.post("/v1/settle", &body).await.unwrap().json() }
    };
    let answers = join_all((0..8).map(|n| settle(if n % 2 == 0 { &a } else { &b }, 100 + n))).await;
    assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
    let cost = answers[0]["cost"].as_u64().unwrap();
    let remaining = [remaining(&a, "p", "k").await, remaining(&b, "p", "k").await];
    // If a busy machine made Redis too slow, each server has counted by itself.
    if pair.decided_without_redis().await == 0 {
        assert_eq!(remaining, [1_000 - cost; 2]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_servers_follow_the_switch_and_a_subscription_that_expires() {
    if skipped() {
        return;
    }
    let redis = redis_without_persistence();
    let pair = ServerPair::start(&redis).await;
    let [a, b] = [0, 1].map(|at| operator(&pair.weirs[at]));
    let users = [user(&pair.weirs[0], "u"), user(&pair.weirs[1], "u")];
    let soon = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(4);
    let body = json!({"plan": "PRO_MONTHLY", "expiresAt": soon.to_string()});
    assert_eq!(a.put("/admin/subscriptions/u", &body).await.unwrap().status, 200);
    let limit = async |caller: &Client| {
        let call = caller.get("/api/v1/ai/x").await.unwrap();
        let header = |name| call.header(name).unwrap_or_default().to_owned();
        (call.status, header("x-ratelimit-limit"), header("x-ratelimit-remaining"))
    };
    assert_eq!(limit(&users[0]).await.1, "30");
    for caller in &users {
        wait::until("the subscription has expired", TEST_TIMEOUT, async || limit(caller).await.1 == "5")
            .await;
        assert!(jiff::Timestamp::now() >= soon, "not before its time");
    }
    assert_eq!(b.put("/admin/rate-limit/enabled", &json!({"enabled": false})).await.unwrap().status, 200);
    for caller in &users {
        wait::until("limits are off", TEST_TIMEOUT, async || {
            limit(caller).await == (200, "5".to_owned(), "9223372036854775807".to_owned())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_servers_allow_exactly_the_limit() {
    if skipped() {
        return;
    }
    let redis = redis_without_persistence();
    let pair = ServerPair::start(&redis).await;
    pair.put_policy("p", slow_bucket(17)).await;
    let callers = [operator(&pair.weirs[0]), operator(&pair.weirs[1])];
    let body = json!({"checks": [{"policy": "p", "key": "other", "cost": 17}], "explain": true});
    let explained = callers[1].post("/v1/check", &body).await.unwrap().json();
    let sentence = explained["checks"][0]["explanation"].as_str().unwrap();
    assert!(sentence.contains("17 is spent, 0 of 17 left"), "{sentence}");
    let checks = (0..200).map(|n| check_one(&callers[n % 2], "p", "k", 1));
    let allowed = join_all(checks).await.iter().filter(|answer| answer["allowed"] == true).count();
    pair.expect_exactly(17, allowed).await;
    let users = [user(&pair.weirs[0], "u"), user(&pair.weirs[1], "u")];
    let started = Instant::now();
    let calls = (0..200).map(|n| users[n % 2].get("/api/v1/ai/x"));
    let passed =
        join_all(calls).await.into_iter().filter(|call| call.as_ref().unwrap().status == 200).count();
    // One token is refilled every 12 seconds, in case the calls take that long.
    let refilled = usize::try_from(started.elapsed().as_secs() / 12).unwrap();
    pair.expect_exactly(8, passed.saturating_sub(refilled).max(passed.min(8))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_continue_without_redis_as_their_policies_say() {
    if skipped() {
        return;
    }
    let mut redis = redis_without_persistence();
    let pair = ServerPair::start(&redis).await;
    for (name, choice) in [("mine", "local"), ("all", "open"), ("none", "closed")] {
        let mut policy = slow_bucket(5);
        policy["onOutage"] = json!(choice);
        pair.put_policy(name, policy).await;
    }
    let callers = [operator(&pair.weirs[0]), operator(&pair.weirs[1])];
    let mut last_remaining = Vec::new();
    for caller in &callers {
        last_remaining.push(check_one(caller, "mine", "k", 1).await["remaining"].as_u64().unwrap());
    }
    redis.crash();
    pair.wait_until_redis_is("down").await;
    // Each server continues from the last remaining amount that it got from Redis.
    for (caller, left) in callers.iter().zip(last_remaining) {
        assert_eq!(remaining(caller, "mine", "k").await, left);
        assert_eq!(check_one(caller, "mine", "k", u32::try_from(left).unwrap()).await["allowed"], true);
        assert_eq!(check_one(caller, "mine", "k", 1).await["allowed"], false);
        assert_eq!(check_one(caller, "all", "k", 5).await["allowed"], true);
        assert_eq!(check_one(caller, "all", "k", 5).await["allowed"], true);
        let closed = check_one(caller, "none", "k", 1).await;
        assert_eq!((&closed["allowed"], &closed["retryAfterMs"]), (&json!(false), &json!(1_000)));
        let checks = json!([{"policy": "mine", "key": "k"}, {"policy": "all", "key": "k"}, {"policy": "none", "key": "k"}]);
        let body = json!({"checks": checks, "explain": true, "peek": true});
        let answer = caller.post("/v1/check", &body).await.unwrap().json();
        for (at, part) in [
            "this server counts alone.",
            "policy all is open then: allowed without counting.",
            "policy none is closed then: denied, try again in 1.000 s.",
        ]
        .into_iter()
        .enumerate()
        {
            let sentence = answer["checks"][at]["explanation"].as_str().unwrap();
            assert!(sentence.contains(part) && sentence.contains("Redis does not answer"), "{sentence}");
        }
        let metrics = caller.get("/metrics").await.unwrap().body;
        assert!(String::from_utf8_lossy(&metrics).contains("weir_engine_up{engine=\"redis\"} 0"));
    }
    assert!(pair.decided_without_redis().await >= 12);
    assert_eq!(user(&pair.weirs[0], "u").get("/api/v1/ai/x").await.unwrap().status, 200);
    redis.start_empty().await;
    pair.wait_until_redis_is("up").await;
    for caller in &callers {
        assert_eq!(
            check_one(caller, "mine", "k", 1).await["allowed"],
            false,
            "what was spent without Redis stays spent"
        );
    }
}
