//! Attempts that all servers on one Redis count together.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use weir_core::{Clock, Timestamp, UserId};
use weir_store::sale::{AttemptLimits, Buy, BuyOutcome, SaleStore, ThrottledBy};
use weir_store::throttle::AddressLimit;
use weir_store_conformance::sale::fixtures::{buy_command, create_active, expect_books, outcome_letters};
use weir_store_conformance::{ENGINE_TIMEOUT, EngineFixture};
use weir_store_redis::{Redis, RedisAttempts, RedisTarget};
use weir_testkit::proxy::Proxy;
use weir_testkit::redis::Server;
use weir_testkit::wait;

use crate::fixtures::{RedisFixture, private_redis};

const SECOND: Duration = Duration::from_secs(1);

fn user(name: &str) -> UserId {
    UserId::parse(name).expect("a name")
}

fn address(name: &str, per_second: u32, burst: u32) -> AddressLimit {
    AddressLimit { address: name.into(), per_second, burst }
}

/// Counts attempts of a server on the fixture's Redis, by the fixture's clock.
async fn attempts<const CLUSTER: bool>(h: &RedisFixture<CLUSTER>) -> RedisAttempts {
    let other = h.second_server().await.expect("another server");
    RedisAttempts::new(other.redis, Some(Arc::new(h.clock().clone())))
}

/// Counts by lists of times and levels of buckets.
#[derive(Default)]
struct Model {
    users: BTreeMap<String, Vec<Timestamp>>,
    /// When each bucket is full again, in microseconds.
    addresses: BTreeMap<String, i64>,
}

impl Model {
    fn allows_user(&mut self, key: &str, limit: usize, now: Timestamp) -> bool {
        let times = self.users.entry(key.to_owned()).or_default();
        let is_allowed = times.iter().filter(|at| now.since(**at) < SECOND).count() < limit;
        times.extend(is_allowed.then_some(now));
        is_allowed
    }

    fn allows_address(&mut self, limit: &AddressLimit, now: Timestamp) -> bool {
        let interval = 1_000_000 / i64::from(limit.per_second);
        let full_at = self.addresses.entry(limit.address.to_string()).or_default();
        let next = (*full_at).max(now.as_micros()) + interval;
        let is_allowed = next - now.as_micros() <= interval * i64::from(limit.burst);
        if is_allowed {
            *full_at = next;
        }
        is_allowed
    }
}

async fn attempts_are_counted_together<const CLUSTER: bool>() {
    if RedisFixture::<CLUSTER>::skipped() {
        return;
    }
    const PER_SECOND: u32 = 3;
    let h = RedisFixture::<CLUSTER>::open().await;
    let servers = [attempts(&h).await, attempts(&h).await];
    assert_eq!(servers[0].counts_purchases(), !CLUSTER);
    let (mut model, mut rng) = (Model::default(), fastrand::Rng::with_seed(3));
    // All cases share the cluster, so the names are of this case.
    let case = fastrand::u64(..);
    // Of users and of addresses.
    let mut refused = [0; 2];
    for step in 0..400 {
        // Fast enough that both limits are reached, with pauses that empty a window and fill a bucket.
        let pause_max = if rng.u32(..64) == 0 { 2_000 } else { 30 };
        h.clock().advance(Duration::from_millis(rng.u64(0..pause_max)));
        let (server, is_user) = (&servers[rng.usize(..2)], rng.bool());
        let name = format!("{case}-{}", rng.u32(..3));
        let limit = address(&name, 2, 3);
        let take = async |server: &RedisAttempts| {
            if is_user {
                server.count_user(&user(&name), PER_SECOND).await
            } else {
                server.count_address(&limit).await
            }
        };
        let mut allows = |now| {
            if is_user {
                model.allows_user(&name, PER_SECOND as usize, now)
            } else {
                model.allows_address(&limit, now)
            }
        };
        let wait = take(server).await;
        assert_eq!(wait.is_none(), allows(h.clock().now()), "step {step}: {name}, {wait:?}");
        let Some(wait) = wait else { continue };
        refused[usize::from(!is_user)] += 1;
        assert!(wait > Duration::ZERO && wait <= SECOND, "{wait:?}");
        if rng.u32(..4) == 0 {
            h.clock().advance(wait);
            assert_eq!(take(server).await, None, "after the wait the attempt is allowed");
            assert!(allows(h.clock().now()));
        }
    }
    let is_mixed = |count| (50..150).contains(count);
    assert!(refused.iter().all(is_mixed), "{refused:?} attempts of 400 were refused");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_on_one_redis_count_attempts_together() {
    attempts_are_counted_together::<false>().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_on_a_cluster_count_attempts_together() {
    attempts_are_counted_together::<true>().await;
}

/// A user with one attempt a second: counted by the lifetime of a key, so this test takes some seconds.
async fn one_attempt_a_second_passes<const CLUSTER: bool>() {
    if RedisFixture::<CLUSTER>::skipped() {
        return;
    }
    let h = RedisFixture::<CLUSTER>::open().await;
    let servers = [attempts(&h).await, attempts(&h).await];
    let user = user(&format!("u-{}", fastrand::u64(..)));
    let mut passed: Vec<(Instant, Instant)> = Vec::new();
    for n in 0.. {
        let sent = Instant::now();
        match servers[n % 2].count_user(&user, 1).await {
            None => passed.push((sent, Instant::now())),
            Some(wait) => assert!(wait > Duration::ZERO && wait <= SECOND, "{wait:?}"),
        }
        if passed.len() == 3 {
            break;
        }
    }
    for pair in passed.windows(2) {
        assert!(pair[1].1 - pair[0].0 >= SECOND, "two attempts within a second: {passed:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_attempt_a_second_passes_on_one_redis() {
    one_attempt_a_second_passes::<false>().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_attempt_a_second_passes_on_a_cluster() {
    one_attempt_a_second_passes::<true>().await;
}

/// Buyers with two attempts a second each, from this address.
fn batch(buyers: &[&str], from: Option<&str>) -> Vec<Buy> {
    let limits = AttemptLimits { user_per_second: 2, address: from.map(|name| address(name, 1, 4)) };
    buyers.iter().map(|buyer| Buy { limits: limits.clone(), ..buy_command("W", buyer) }).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_one_redis_the_script_that_sells_counts_the_attempt() {
    if RedisFixture::<false>::skipped() {
        return;
    }
    let h = RedisFixture::<false>::open().await;
    let other = h.second_server().await.expect("another server");
    create_active(&h, "W", 50).await;
    let buy = async |server: &RedisFixture<false>, buyers: &[&str], from: Option<&str>| {
        server.sales.buy_batch(batch(buyers, from).into()).await.expect("an answer")
    };
    assert_eq!(outcome_letters(&buy(&h, &["a", "b"], None).await), "BB");
    let again = buy(&other, &["a", "a", "b"], None).await;
    assert_eq!(outcome_letters(&again), "ATA", "two attempts of a, and one too many");
    assert_eq!(again[1], BuyOutcome::Throttled { by: ThrottledBy::User, retry_after: SECOND });
    assert_eq!(outcome_letters(&buy(&h, &["c", "d"], Some("192.0.2.1")).await), "BB");
    let crowd = buy(&other, &["e", "f", "g"], Some("192.0.2.1")).await;
    assert_eq!(outcome_letters(&crowd), "BBT", "what is one too many sells nothing");
    assert_eq!(crowd[2], BuyOutcome::Throttled { by: ThrottledBy::Address, retry_after: SECOND });
    assert_eq!(
        outcome_letters(&buy(&other, &["g"], Some("192.0.2.2")).await),
        "B",
        "a refused one did not count"
    );
    // Requests of the address that are no purchases count in the same bucket.
    let requests = attempts(&h).await;
    assert_eq!(requests.count_address(&address("192.0.2.1", 1, 4)).await, Some(SECOND));
    h.clock().advance(SECOND);
    assert_eq!(outcome_letters(&buy(&other, &["a", "h"], Some("192.0.2.1")).await), "AT", "one a second");
    assert_eq!(requests.count_address(&address("192.0.2.1", 1, 4)).await, Some(SECOND));
    expect_books(&h, 7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_a_cluster_the_script_that_sells_counts_nothing() {
    if RedisFixture::<true>::skipped() {
        return;
    }
    let h = RedisFixture::<true>::open().await;
    create_active(&h, "W", 50).await;
    let outcomes = h.sales.buy_batch(batch(&["a", "a", "a", "b"], Some("192.0.2.1")).into()).await;
    assert_eq!(outcome_letters(&outcomes.expect("an answer")), "BAAB");
}

async fn keys(server: &Server) -> Vec<String> {
    server.command(&["KEYS", "sale:{_*"]).await.texts()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_no_longer_counts_expires_and_a_clock_that_is_set_back_locks_nobody_out() {
    if RedisFixture::<false>::skipped() {
        return;
    }
    let server = private_redis();
    let h = RedisFixture::<false>::at(server.url()).await;
    let attempts = attempts(&h).await;
    let (one, two, limit) = (user("one"), user("two"), address("192.0.2.1", 2, 1));
    let take = async || {
        [
            attempts.count_user(&one, 1).await.is_none(),
            attempts.count_user(&two, 2).await.is_none(),
            attempts.count_address(&limit).await.is_none(),
        ]
    };
    assert_eq!(take().await, [true; 3]);
    let keys = keys(&server).await;
    assert_eq!(keys.len(), 3, "{keys:?}");
    for key in &keys {
        let rest = server.command(&["PTTL", key]).await.integer();
        assert!((0..=7_000).contains(&rest), "{key} stays for {rest} ms");
    }
    // As if the clock had been an hour ahead.
    for key in &keys {
        server.command(&["PEXPIRE", key, "3600000"]).await;
    }
    h.clock().set_back(Duration::from_secs(3_600));
    assert_eq!(take().await, [true; 3]);
    for key in &keys {
        let rest = server.command(&["PTTL", key]).await.integer();
        assert!((0..=7_000).contains(&rest), "{key} stays for {rest} ms");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_redis_is_late_or_away_the_own_memory_decides() {
    if RedisFixture::<false>::skipped() {
        return;
    }
    let server = private_redis();
    let proxy = Proxy::start(server.address()).await;
    let target: RedisTarget = server.url_via(proxy.addr()).parse().expect("a Redis URL");
    let redis = Redis::start(target.with_call_timeout(Duration::from_millis(500)));
    redis.connected().await;
    let (attempts, user) = (RedisAttempts::new(redis, None), user("u"));
    // With a call that is counted in time, whatever the machine is doing.
    wait::until("an attempt is counted", ENGINE_TIMEOUT, async || {
        attempts.count_user(&user, 1).await;
        attempts.count_user(&user, 1).await.is_some()
    })
    .await;
    proxy.black_hole();
    for _ in 0..5 {
        assert_eq!(attempts.count_user(&user, 1).await, None);
        assert_eq!(attempts.count_address(&address("192.0.2.1", 1, 1)).await, None);
    }
    proxy.pass();
    wait::until("attempts are counted again", ENGINE_TIMEOUT, async || {
        attempts.count_user(&user, 1).await;
        attempts.count_user(&user, 1).await.is_some()
    })
    .await;
}
