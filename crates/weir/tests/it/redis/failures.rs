//! Quota when Redis is down, slow, empty or has stale data.

use std::time::Duration;

use serde_json::json;
use weir_testkit::proxy::Proxy;
use weir_testkit::wait;

use super::fixtures::{DOWN, Fleet, Load, outage_event, redis_without_persistence, send, skipped};
use crate::fixtures::{
    TEST_TIMEOUT, configure, deliveries, operator, send_in_parallel, wait_until_delivered,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_redis_failure_under_load_lets_a_user_exceed_the_limit() {
    if skipped() {
        return;
    }
    const LIMIT: usize = 8_000;
    let mut redis = redis_without_persistence();
    let fleet = Fleet::start(2, redis.url()).await;
    fleet.configure(fleet.first(), "u", 8_000, 600).await;
    let load = Load::start(&fleet.clients, "u");
    load.wait_for_more(300).await;
    // Crashed, and back without its data.
    redis.crash();
    load.wait_for_more(300).await;
    redis.start_empty().await;
    fleet.wait_until_healthy().await;
    load.wait_for_more(300).await;
    // Crashed, and back with stale data.
    redis.command(&["SAVE"]).await;
    load.wait_for_more(300).await;
    redis.crash();
    redis.start().await;
    fleet.wait_until_healthy().await;
    load.wait_for_more(300).await;
    // Paused for a while, and back with its data.
    redis.pause();
    load.wait_for_more(300).await;
    redis.resume();
    fleet.wait_until_healthy().await;
    load.wait_for_more(300).await;
    redis.command(&["FLUSHALL"]).await;
    wait::until("the limit is reached", Duration::from_secs(120), async || load.counts.count(429) > 100)
        .await;
    let counts = load.end().await;
    let accepted = counts.count(200);
    assert!(accepted <= LIMIT, "{accepted} of {LIMIT} were accepted");
    // Each loss may cost the reservation of each server, a tenth of the limit. There are at most four losses here.
    assert!(accepted >= LIMIT - 4 * 2 * LIMIT / 10, "only {accepted} of {LIMIT} were accepted");
    assert_eq!(counts.total(), accepted + counts.count(429) + counts.count(503));
    wait_until_delivered(&operator(&fleet.weirs[0])).await;
    let delivered: usize = fleet.weirs.iter().map(|weir| deliveries(weir).len()).sum();
    assert!(delivered >= accepted, "{delivered} of {accepted} were delivered");
    for weir in &fleet.weirs {
        // A slow machine may cause more outages. Each is logged once, and so is its end.
        let events: Vec<_> = weir.log_lines().into_iter().filter_map(|line| outage_event(&line)).collect();
        assert!(events.contains(&"down"), "{events:?}");
        assert!(
            events.iter().zip(["down", "back"].iter().cycle()).all(|(events, next)| events == next),
            "{events:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_limits_set_during_a_redis_outage_apply_when_it_is_back() {
    if skipped() {
        return;
    }
    let mut redis = redis_without_persistence();
    let fleet = Fleet::start(2, redis.url()).await;
    let (a, b) = (&fleet.clients[0], &fleet.clients[1]);
    configure(a, "u", 1_000, 60).await;
    for _ in 0..5 {
        assert_eq!(send(b, "u").await, 200);
    }
    redis.pause();
    configure(a, "u", 3, 60).await;
    redis.resume();
    fleet.wait_until_healthy().await;
    // The hash of the old limits still exists, but no server may use it.
    let counts = send_in_parallel(&fleet.clients, "u", 40).await;
    counts.expect(200, 3);
    // The health check may report the end of such a short outage late.
    wait::until("the end of the outage is logged", TEST_TIMEOUT, async || {
        fleet.count_lines("Redis is back") == fleet.count_lines(DOWN)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_outage_is_logged_once_and_causes_no_error() {
    if skipped() {
        return;
    }
    let mut redis = redis_without_persistence();
    let fleet = Fleet::start(1, redis.url()).await;
    fleet.configure(fleet.first(), "u", 1_000, 60).await;
    redis.stop().await;
    for _ in 0..50 {
        assert_eq!(send(fleet.first(), "u").await, 200);
    }
    assert_eq!(fleet.count_lines(DOWN), 1);
    wait::until("health reports the outage", TEST_TIMEOUT, async || {
        fleet.first().get("/health").await.unwrap().status == 503
    })
    .await;
    let health = fleet.first().get("/health").await.unwrap().json();
    assert_eq!(
        (&health["data"]["status"], &health["data"]["checks"]["redis"]["status"]),
        (&json!("degraded"), &json!("down"))
    );
    let metrics = fleet.first().get("/metrics").await.unwrap();
    let metrics = String::from_utf8_lossy(&metrics.body);
    assert!(metrics.contains(r#"weir_engine_up{engine="redis"} 0"#), "{metrics}");
    assert_eq!(fleet.first().get("/readyz").await.unwrap().status, 200, "the server is ready without Redis");
    redis.start_empty().await;
    fleet.wait_until_healthy().await;
    assert_eq!(send(fleet.first(), "u").await, 200);
    let hash = redis.command(&["HGET", "RateLimiterCache:u", "currentCount"]).await;
    assert_eq!(hash.text(), "51", "Redis counts again from the count in Postgres");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_network_to_redis_is_answered_by_postgres() {
    if skipped() {
        return;
    }
    let redis = redis_without_persistence();
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
    fleet.wait_until_healthy().await;
    proxy.half_open_after(64);
    expect_service().await;
    proxy.pass();
    proxy.cut();
    fleet.wait_until_healthy().await;
    proxy.black_hole();
    expect_service().await;
    proxy.pass();
    proxy.cut();
    fleet.wait_until_healthy().await;
    proxy.refuse();
    proxy.cut();
    expect_service().await;
    proxy.pass();
    fleet.wait_until_healthy().await;
    expect_service().await;
}
