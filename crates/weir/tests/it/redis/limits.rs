//! Limits and counts in Redis and Postgres.

use serde_json::json;
use weir_testkit::http::Client;
use weir_testkit::redis::Server;
use weir_testkit::wait;

use super::fixtures::{DOWN, Fleet, redis_without_persistence, send, skipped};
use crate::fixtures::{TEST_TIMEOUT, configure, operator, send_in_parallel, wait_until_delivered};

/// What a test observes of a user while its limits are set, used and replaced.
#[derive(Debug, PartialEq)]
struct Observed {
    when_configured: i64,
    sent: [u16; 3],
    limit_and_count: [String; 2],
    lives_for_the_window: bool,
    counts: [serde_json::Value; 2],
    when_configured_again: i64,
    sent_again: [u16; 3],
}

/// Sends on one of two servers for a user whose limits the other one replaces.
async fn observe(fleet: &Fleet, redis: &Server, user: &str) -> Observed {
    let (a, b) = (&fleet.clients[0], &fleet.clients[1]);
    let key = format!("RateLimiterCache:{user}");
    let exists = async || redis.command(&["EXISTS", &key]).await.integer();
    let field = async |name| redis.command(&["HGET", &key, name]).await.text();
    let count = async |client: &Client| {
        client.get(&format!("/api/config/{user}")).await.unwrap().json()["currentCount"].clone()
    };
    fleet.configure(a, user, 10, 2).await;
    let when_configured = exists().await;
    let sent = [send(a, user).await, send(a, user).await, send(a, user).await];
    let limit_and_count = [field("rateLimit").await, field("currentCount").await];
    let left = redis.command(&["PTTL", &key]).await.integer();
    let counts = [count(a).await, count(b).await];
    configure(b, user, 2, 60).await;
    let when_configured_again = exists().await;
    let sent_again = [send(a, user).await, send(a, user).await, send(a, user).await];
    let lives_for_the_window = (90_000..=120_000).contains(&left);
    Observed {
        when_configured,
        sent,
        limit_and_count,
        lives_for_the_window,
        counts,
        when_configured_again,
        sent_again,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_400_parallel_sends_on_two_servers_exactly_50_pass_a_cold_cache() {
    if skipped() {
        return;
    }
    let redis = redis_without_persistence();
    let fleet = Fleet::start(2, redis.url()).await;
    for user in ["a", "b"] {
        fleet.configure(fleet.first(), user, 50, 60).await;
        let counts = send_in_parallel(&fleet.clients, user, 400).await;
        counts.expect(200, 50);
        counts.expect(429, 350);
        fleet.wait_for_sent(user, 50).await;
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
    let redis = redis_without_persistence();
    let fleet = Fleet::start(2, redis.url()).await;
    let expected = Observed {
        when_configured: 0,
        sent: [200; 3],
        limit_and_count: ["10".to_owned(), "3".to_owned()],
        lives_for_the_window: true,
        counts: [json!(3), json!(3)],
        when_configured_again: 0,
        sent_again: [200, 200, 429],
    };
    let mut user = "u0".to_owned();
    for attempt in 1.. {
        let outages = fleet.count_lines(DOWN);
        let observed = observe(&fleet, &redis, &user).await;
        if observed == expected {
            break;
        }
        // On a busy machine Redis may be slow; then Postgres decides, there is no hash, and a log line says so.
        wait::until(&format!("a slow Redis to be the reason for {observed:?}"), TEST_TIMEOUT, async || {
            fleet.count_lines(DOWN) > outages
        })
        .await;
        fleet.wait_until_healthy().await;
        user = format!("u{attempt}");
    }
    let [a, b] = [&fleet.clients[0], &fleet.clients[1]];
    assert_eq!(b.delete(&format!("/api/config/{user}")).await.unwrap().status, 204);
    wait::until("the user is unknown everywhere", TEST_TIMEOUT, async || send(a, &user).await == 404).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cache_that_loses_its_data_continues_from_the_count_in_postgres() {
    if skipped() {
        return;
    }
    let redis = redis_without_persistence();
    let fleet = Fleet::start(1, redis.url()).await;
    fleet.configure(fleet.first(), "u", 9, 60).await;
    let mut accepted = 0;
    while send(fleet.first(), "u").await == 200 {
        accepted += 1;
        redis.command(&["FLUSHALL"]).await;
    }
    // Each flush costs one place at most: five sends and four places. A slow Redis may have held none.
    assert!((5..=9).contains(&accepted), "{accepted} sends at limit 9");
    assert_eq!(send(fleet.first(), "u").await, 429);
    assert_eq!(fleet.stored_counts("u").await, (accepted, 9 - accepted));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_table_shows_what_was_sent_and_after_a_stop_nothing_is_reserved() {
    if skipped() {
        return;
    }
    let redis = redis_without_persistence();
    let mut fleet = Fleet::start(1, redis.url()).await;
    for user in ["rests", "stops"] {
        fleet.configure(fleet.first(), user, 1_000, 60).await;
    }
    for _ in 0..7 {
        assert_eq!(send(fleet.first(), "rests").await, 200);
    }
    let (sent, reserved) = fleet.stored_counts("rests").await;
    assert!(sent + reserved >= 7, "what counts is never too low");
    fleet.wait_for_sent("rests", 7).await;
    assert_eq!(send(fleet.first(), "stops").await, 200);
    fleet.weirs[0].terminate();
    assert!(fleet.weirs[0].wait(TEST_TIMEOUT).await.success());
    assert_eq!(fleet.stored_counts("stops").await, (1, 0));
    assert_eq!(fleet.stored_counts("rests").await, (7, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_of_the_wrong_type_affects_no_user() {
    if skipped() {
        return;
    }
    let redis = redis_without_persistence();
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
    let counts = send_in_parallel(&fleet.clients, "spoilt", 10).await;
    counts.expect(200, 2);
    assert_eq!(fleet.count_lines(DOWN), 0);
    assert_eq!(fleet.first().get("/health").await.unwrap().status, 200);
}
