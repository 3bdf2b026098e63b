//! Limits in Redis when it is unavailable or loses data, and the batching of decisions.

use std::sync::Arc;
use std::time::Duration;

use weir_core::PolicyName;
use weir_core::tier::{FixedWindow, Limit, Tier};
use weir_store::tier::{LimitCheck, LimitStore, OnOutage, Policy, PolicySpec};
use weir_store_conformance::tier::fixtures::{call, policy, remaining, take, tier_rule, unique_user};
use weir_store_conformance::{ENGINE_TIMEOUT, EngineFixture};
use weir_testkit::redis::Server;
use weir_testkit::wait;

use crate::fixtures::private_redis;

type RedisFixture = crate::fixtures::RedisFixture<false>;

/// Waits until Redis answers, or with `up` false until it does not.
async fn until_redis_is(up: bool, h: &RedisFixture) {
    wait::until("Redis has the expected state", ENGINE_TIMEOUT, async || h.redis.ping().await == up).await;
}

#[tokio::test]
async fn redis_counts_its_scripts() {
    if RedisFixture::skipped() {
        return;
    }
    let server = private_redis();
    let h = RedisFixture::at(server.url()).await;
    until_redis_is(true, &h).await;
    let before = h.redis.script_counts().await.expect("this Redis counts");
    let policy = policy(fixed(1_000));
    for _ in 0..5 {
        assert!(take(&h, &policy, "k", 1).await.is_allowed());
    }
    let after = h.redis.script_counts().await.expect("this Redis counts");
    assert!(after.executed >= before.executed + 5, "{before:?} {after:?}");
    assert!(after.slow <= after.executed, "{after:?}");
}

fn fixed(limit: u32) -> Limit {
    Limit::FixedWindow(FixedWindow::new(limit, Duration::from_secs(3_600)).expect("valid"))
}

fn with_outage_mode(policy: &Policy, on_outage: OnOutage) -> Arc<Policy> {
    let name = PolicyName::parse(on_outage.as_str()).expect("a name");
    Arc::new(Policy::new(name, policy.scope(), PolicySpec { on_outage, ..policy.spec.clone() }))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_redis_each_server_continues_from_what_it_remembers() {
    if RedisFixture::skipped() {
        return;
    }
    let mut server = private_redis();
    let a = RedisFixture::at(server.url()).await;
    let b = a.second_server().await.expect("another server");
    let (shared, user, free) = (policy(fixed(10)), unique_user(), tier_rule(Tier::Free));
    for h in [&a, &b] {
        assert!(take(h, &shared, "k", 2).await.is_allowed());
        assert!(call(h, &user, &free).await.decision.is_allowed());
    }
    server.crash();
    for h in [&a, &b] {
        until_redis_is(false, h).await;
    }
    // Each server remembers what Redis returned last: 2 to A, 4 to B.
    assert!(take(&a, &shared, "k", 8).await.is_allowed());
    assert!(!take(&a, &shared, "k", 1).await.is_allowed());
    assert!(take(&b, &shared, "k", 6).await.is_allowed());
    assert!(!take(&b, &shared, "k", 1).await.is_allowed());
    for (h, left) in [(&a, 7), (&b, 6)] {
        for _ in 0..left {
            assert!(call(h, &user, &free).await.decision.is_allowed());
        }
        assert!(!call(h, &user, &free).await.decision.is_allowed());
    }
    assert!(a.limits.status().decided_alone > 0);
    // Back and empty: the servers send what they remember, so no limit starts anew.
    server.start_empty().await;
    for h in [&a, &b] {
        until_redis_is(true, h).await;
        assert!(!take(h, &shared, "k", 1).await.is_allowed());
        assert!(!call(h, &user, &free).await.decision.is_allowed());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flushed_redis_gets_what_was_spent_from_the_servers() {
    if RedisFixture::skipped() {
        return;
    }
    let server = private_redis();
    let h = RedisFixture::at(server.url()).await;
    let (shared, user, free) = (policy(fixed(10)), unique_user(), tier_rule(Tier::Free));
    assert!(take(&h, &shared, "k", 9).await.is_allowed());
    for _ in 0..8 {
        assert!(call(&h, &user, &free).await.decision.is_allowed());
    }
    server.command(&["FLUSHALL"]).await;
    server.command(&["SCRIPT", "FLUSH"]).await;
    assert_eq!(remaining(&h, &shared, "k").await, 1);
    assert!(!call(&h, &user, &free).await.decision.is_allowed());
    assert_eq!(h.limits.status().decided_alone, 0, "scripts are loaded again, and Redis decides");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_redis_each_policy_decides_as_it_says() {
    if RedisFixture::skipped() {
        return;
    }
    let mut server = private_redis();
    let h = RedisFixture::at(server.url()).await;
    let local = with_outage_mode(&policy(fixed(2)), OnOutage::Local);
    let open = with_outage_mode(&policy(fixed(2)), OnOutage::Open);
    let closed = with_outage_mode(&policy(fixed(2)), OnOutage::Closed);
    server.crash();
    until_redis_is(false, &h).await;
    for _ in 0..5 {
        assert!(take(&h, &open, "k", 1).await.is_allowed());
    }
    let asks =
        [LimitCheck { policy: &local, key: "k", cost: 1 }, LimitCheck { policy: &closed, key: "k", cost: 1 }];
    let denied = h.limits.take(&asks, false).await.expect("an answer");
    assert!(!denied.decision.is_allowed() && denied.each[0].0.is_allowed() && !denied.each[1].0.is_allowed());
    for fits in [true, true, false] {
        assert_eq!(take(&h, &local, "k", 1).await.is_allowed(), fits, "the denial spent nothing");
    }
}

/// Returns how often a script was called.
async fn script_calls(server: &Server) -> u64 {
    let stats = server.command(&["INFO", "commandstats"]).await.text();
    let calls = stats.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
    calls.map_or(0, |line| line.split(',').next().expect("a number").parse().expect("a number"))
}

#[tokio::test]
async fn concurrent_decisions_share_calls_and_are_exact() {
    if RedisFixture::skipped() {
        return;
    }
    let server = private_redis();
    let h = RedisFixture::at(server.url()).await;
    let shared = policy(fixed(100));
    let taken = futures_util::future::join_all((0..300).map(|_| take(&h, &shared, "k", 1))).await;
    assert_eq!(taken.iter().filter(|decision| decision.is_allowed()).count(), 100);
    let calls = script_calls(&server).await;
    assert!(calls < 30, "300 decisions took {calls} calls");
    assert_eq!(h.limits.status().decided_alone, 0);
}

#[tokio::test]
async fn a_decision_that_fails_in_redis_fails_no_other() {
    if RedisFixture::skipped() {
        return;
    }
    let server = private_redis();
    let h = RedisFixture::at(server.url()).await;
    let shared = policy(fixed(100));
    assert!(take(&h, &shared, "bad", 1).await.is_allowed());
    let names = server.command(&["KEYS", "*{bad}"]).await.texts();
    server.command(&["DEL", &names[0]]).await;
    server.command(&["HSET", &names[0], "no", "text"]).await;
    let keys = std::iter::repeat_n("good", 20).chain(["bad"]).chain(std::iter::repeat_n("good", 20));
    let taken = futures_util::future::join_all(keys.map(|key| take(&h, &shared, key, 1))).await;
    assert!(taken.iter().all(weir_core::tier::Decision::is_allowed));
    assert_eq!(h.limits.status().decided_alone, 1, "only the decision about the malformed key");
    assert_eq!(remaining(&h, &shared, "good").await, 60);
}
