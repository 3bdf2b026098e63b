//! Places of quota that Redis holds in advance: how often they are reserved, where they stand, and what they may cost.

use std::sync::Arc;
use std::time::Duration;

use weir_core::{Clock, ManualClock};
use weir_store::quota::{QuotaStore, SendOutcome};
use weir_store_conformance::fixtures::{
    accept_batch, configure, find_quota, is_accepted, outcome_letters, send_batch, sends,
};
use weir_store_conformance::{ENGINE_TIMEOUT, EngineFixture, HasQuota, START};
use weir_store_redis::RedisQuota;
use weir_testkit::postgres::{Database, Options, Server};
use weir_testkit::proxy::Proxy;
use weir_testkit::wait;

use crate::fixtures::{RedisFixture, private_redis, redis_quota};

type Fixture = RedisFixture<false>;

/// What a user's row shows as sent and as reserved.
pub(crate) async fn sent_and_reserved(h: &Fixture, name: &str) -> (u32, u32) {
    let sql = format!("SELECT current_count, reserved_count FROM rate_limit_store WHERE user_id = '{name}'");
    let row = h.database.query_strings(&sql).await.remove(0);
    let number = |column: usize| row[column].as_deref().expect("a count").parse().expect("a number");
    (number(0), number(1))
}

pub(crate) async fn wait_for_row(h: &Fixture, name: &str, expected: (u32, u32)) {
    let what = format!("the row of {name} shows {expected:?} as sent and reserved");
    wait::until(&what, ENGINE_TIMEOUT, async || sent_and_reserved(h, name).await == expected).await;
}

/// The same server once more, with reservations that are kept for so long.
async fn keeping(h: &Fixture, keep: Duration, has_only_new_servers: bool) -> RedisQuota {
    let clock: Arc<dyn Clock> = Arc::new(h.clock().clone());
    redis_quota(&h.redis, &h.store, clock, keep, has_only_new_servers).await
}

async fn accept_one(quota: &RedisQuota, name: &str) {
    let outcomes = quota.send_batch(sends(name, 1).into()).await.expect("an answer");
    assert!(is_accepted(&outcomes[0]), "{outcomes:?}");
}

/// How often a statement on the table of quota was executed whose text contains `part`.
async fn executions(database: &Database, part: &str) -> usize {
    let sql = format!(
        "SELECT coalesce(sum(calls), 0)::text FROM pg_stat_statements
         WHERE query LIKE '%rate_limit_store%' AND query LIKE '%{part}%' AND query NOT LIKE '%pg_stat_statements%'"
    );
    database.query_strings(&sql).await[0][0].as_deref().expect("a sum").parse().expect("a number")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_warm_user_reserves_once_in_two_sends_at_limit_5_and_once_in_ten_at_limit_100() {
    if Fixture::skipped() {
        return;
    }
    let mut options = Options { in_memory: true, ..Options::default() };
    options.settings.push(("shared_preload_libraries".to_owned(), "pg_stat_statements".to_owned()));
    let server = Server::with_options(&options);
    let database = Arc::new(server.database("counted").await);
    database.execute("CREATE EXTENSION pg_stat_statements").await;
    let redis = Arc::new(private_redis());
    let clock = ManualClock::at(START);
    let url = redis.url().to_owned();
    let h = Fixture::start(&url, ENGINE_TIMEOUT, Some(redis), Arc::clone(&database), clock).await;
    for (name, limit, count, reservations) in [("five", 5, 4, 2), ("hundred", 100, 20, 2)] {
        configure(&h, name, limit, 60).await;
        database.execute("SELECT pg_stat_statements_reset()").await;
        for sent in 1..=count {
            accept_batch(&h, sends(name, 1)).await;
            // A pause in which everything that the server does afterwards is done.
            let what = format!("{name} is shown with {sent} sends");
            wait::until(&what, ENGINE_TIMEOUT, async || sent_and_reserved(&h, name).await.0 == sent).await;
        }
        let locked = executions(&database, "FOR UPDATE").await;
        assert_eq!(locked, reservations, "reservations for {count} sends at limit {limit}");
        // Each pause has one statement more, for all users together, which shows what was sent.
        let updated = executions(&database, "UPDATE rate_limit_store").await;
        assert!(updated <= usize::try_from(count).unwrap(), "{updated} updates for {count} sends");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_held_ahead_stands_in_its_own_column_and_is_all_that_a_lost_redis_costs() {
    if Fixture::skipped() {
        return;
    }
    let redis = Arc::new(private_redis());
    let h = Fixture::at(redis.url()).await;
    for (name, limit, ahead) in [("five", 5, 1), ("hundred", 100, 10)] {
        configure(&h, name, limit, 60).await;
        accept_batch(&h, sends(name, 1)).await;
        assert_eq!(sent_and_reserved(&h, name).await, (1, ahead), "at once");
        accept_batch(&h, sends(name, 1)).await;
        assert_eq!(find_quota(&h, name).await.expect("a row").current_count, 2, "live");
        wait_for_row(&h, name, (2, ahead - 1)).await;
        accept_batch(&h, sends(name, 1)).await;
    }
    wait_for_row(&h, "five", (3, 1)).await;
    wait_for_row(&h, "hundred", (3, 8)).await;
    redis.command(&["FLUSHALL"]).await;
    for (name, limit, lost) in [("five", 5, 1), ("hundred", 100, 8)] {
        assert_eq!(find_quota(&h, name).await.expect("a row").current_count, 3, "what was sent stays shown");
        let outcomes = send_batch(&h, sends(name, 200)).await;
        let accepted = outcomes.iter().filter(|outcome| is_accepted(outcome)).count();
        assert_eq!(accepted, limit - 3 - lost, "{name} loses what Redis held ahead and nothing else");
        wait_for_row(&h, name, (u32::try_from(limit - lost).unwrap(), u32::try_from(lost).unwrap())).await;
    }
    assert_eq!(h.quota().audit().await.expect("an audit").over_limit, [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_send_without_redis_counts_what_redis_holds_ahead() {
    if Fixture::skipped() {
        return;
    }
    let redis = Arc::new(private_redis());
    let h = Fixture::at(redis.url()).await;
    configure(&h, "u", 50, 60).await;
    accept_batch(&h, sends("u", 1)).await;
    let left_to_postgres = h.store.send_batch(sends("u", 60).into()).await.expect("an answer");
    let accepted = left_to_postgres.iter().filter(|outcome| is_accepted(outcome)).count();
    assert_eq!(accepted, 50 - 1 - 5);
    // Redis still has its five, and no more.
    let outcomes = send_batch(&h, sends("u", 20)).await;
    assert_eq!(outcomes.iter().filter(|outcome| is_accepted(outcome)).count(), 5);
    wait_for_row(&h, "u", (50, 0)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reservation_is_given_back_when_nobody_uses_it_and_when_the_server_stops() {
    if Fixture::skipped() {
        return;
    }
    let h = Fixture::open().await;
    for name in ["idle", "shared", "stopped"] {
        configure(&h, name, 1_000_000, 60).await;
    }
    let short = keeping(&h, Duration::from_secs(3), false).await;
    accept_one(&short, "shared").await;
    accept_one(&short, "idle").await;
    assert_eq!(sent_and_reserved(&h, "idle").await, (1, 1_000));
    // The other server goes on using the reservation that they share.
    let mut sent = 1;
    while sent_and_reserved(&h, "idle").await.1 > 0 {
        accept_batch(&h, sends("shared", 1)).await;
        sent += 1;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(sent_and_reserved(&h, "idle").await, (1, 0));
    wait_for_row(&h, "shared", (sent, 1_001 - sent)).await;
    accept_batch(&h, sends("stopped", 1)).await;
    accept_batch(&h, sends("stopped", 1)).await;
    h.quota().close().await;
    assert_eq!(sent_and_reserved(&h, "stopped").await, (2, 0));
    assert_eq!(sent_and_reserved(&h, "shared").await, (sent, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_is_denied_while_units_of_the_window_are_on_their_way_to_redis() {
    if Fixture::skipped() {
        return;
    }
    let redis = Arc::new(private_redis());
    let h = Fixture::at(redis.url()).await;
    configure(&h, "u", 3, 60).await;
    let proxy = Proxy::start(redis.address()).await;
    let far = h.via(&redis.url_via(proxy.addr()), ENGINE_TIMEOUT).await;
    let slow = sends("u", 1);
    let quota = far.quota();
    proxy.delay(Duration::from_millis(300));
    let sending = tokio::spawn(async move { quota.send_batch(slow.into()).await.expect("an answer") });
    // The far server has reserved two places, and its call that installs them is on its way.
    wait_for_row(&h, "u", (1, 1)).await;
    assert_eq!(outcome_letters(&send_batch(&h, sends("u", 3)).await), "AAD", "the third place was ahead");
    assert_eq!(outcome_letters(&sending.await.expect("it ends")), "A");
}

/// What a server of the version before does for one send: it knows `current_count` alone.
pub(crate) async fn send_as_before(database: &Database, name: &str) -> Result<bool, String> {
    let client = database.connect().await.expect("a connection");
    let sql = format!(
        "UPDATE rate_limit_store SET current_count = current_count + 1
         WHERE user_id = '{name}' AND current_count < rate_limit RETURNING 1"
    );
    client.query(&sql, &[]).await.map(|rows| !rows.is_empty()).map_err(|error| format!("{error:?}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_of_the_version_before_see_what_is_held_ahead_until_there_are_none() {
    if Fixture::skipped() {
        return;
    }
    let h = Fixture::open().await;
    h.database.execute("UPDATE weir_schema_state SET created_version = 14, oldest_version = 9").await;
    configure(&h, "u", 5, 60).await;
    configure(&h, "v", 5, 60).await;
    let keep = Duration::from_secs(60);
    let beside_old = keeping(&h, keep, false).await;
    accept_one(&beside_old, "u").await;
    assert_eq!(sent_and_reserved(&h, "u").await, (2, 0), "it counts for those that know one column");
    let mut accepted = 1;
    while send_as_before(&h.database, "u").await.expect("an answer") {
        accepted += 1;
    }
    assert_eq!(accepted, 4);
    accept_one(&beside_old, "u").await;
    let denied = beside_old.send_batch(sends("u", 1).into()).await.expect("an answer");
    assert!(matches!(denied[0], SendOutcome::Denied { .. }), "{denied:?}");

    let only_new = keeping(&h, keep, true).await;
    let oldest = h.database.query_strings("SELECT oldest_version::text FROM weir_schema_state").await;
    assert_eq!(oldest[0][0].as_deref(), Some("15"), "servers of before do not start any more");
    accept_one(&only_new, "v").await;
    assert_eq!(sent_and_reserved(&h, "v").await, (1, 1));
    // One that was forgotten is refused by the database for the last place, which Redis holds.
    for _ in 0..3 {
        assert!(send_as_before(&h.database, "v").await.expect("an answer"));
    }
    let refused = send_as_before(&h.database, "v").await.expect_err("the fifth is in Redis");
    assert!(refused.contains("rate_limit_store_reserved"), "{refused}");
    accept_one(&only_new, "v").await;
    let denied = only_new.send_batch(sends("v", 1).into()).await.expect("an answer");
    assert!(matches!(denied[0], SendOutcome::Denied { .. }), "{denied:?}");
}
