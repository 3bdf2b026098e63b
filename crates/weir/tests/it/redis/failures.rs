//! A Redis that is gone, late, empty or out of date.

use std::time::Duration;

use serde_json::json;
use weir_testkit::proxy::Proxy;
use weir_testkit::wait;

use super::fixtures::{DOWN, Fleet, Load, forgetful, outage, send, skipped};
use crate::fixtures::{PATIENCE, configure, deliveries, operator, send_in_parallel, wait_until_delivered};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_becomes_of_redis_under_load_nobody_gets_past_the_limit() {
    if skipped() {
        return;
    }
    const LIMIT: usize = 8_000;
    let mut redis = forgetful();
    let fleet = Fleet::start(2, redis.url()).await;
    fleet.configure(fleet.first(), "u", 8_000, 600).await;
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
    fleet.configure(fleet.first(), "u", 1_000, 60).await;
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
