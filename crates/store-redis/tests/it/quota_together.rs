//! Limits that change within a window, and sends that the store decides, while Redis holds places in advance.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Semaphore;
use weir_core::quota::{Quota, QuotaLimits};
use weir_core::{Clock, UserId};
use weir_store::limit_changes::LimitChangeFeed;
use weir_store::quota::{
    AcceptedMessage, CacheMetrics, EnqueueOutcome, QuotaAudit, QuotaStore, ReservableStore, Reservation,
    ReservationRequest, ReservedUnits, SendMessage, SendOutcome,
};
use weir_store::{Batch, Result};
use weir_store_conformance::fixtures::{
    accept_batch, configure, find_quota, is_accepted, keyed, limits, outcome_letters, queue_audit,
    run_concurrently, send_batch, sends, user,
};
use weir_store_conformance::{ENGINE_TIMEOUT, EngineFixture, HasQuota};
use weir_store_postgres::Postgres;
use weir_store_redis::{QuotaTimes, RedisQuota};
use weir_testkit::proxy::Proxy;
use weir_testkit::wait;

use crate::fixtures::{RedisFixture, private_redis};
use crate::quota::{send_as_before, sent_and_reserved, wait_for_row};

type Fixture = RedisFixture<false>;

/// More calls than a test makes.
const MANY: usize = 1_000;

async fn change(h: &Fixture, name: &str, limit: u32, minutes: u32) -> Quota {
    h.quota().change_limits(&user(name), limits(limit, minutes)).await.expect("an answer")
}

fn accepted(outcomes: &[SendOutcome]) -> usize {
    outcomes.iter().filter(|outcome| is_accepted(outcome)).count()
}

async fn over_limit(h: &Fixture) -> Vec<String> {
    h.quota().audit().await.expect("an audit").over_limit
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_that_keep_the_count_take_back_what_redis_holds() {
    if Fixture::skipped() {
        return;
    }
    let h = Fixture::open().await;
    for (name, limit, more) in [("lower", 5, 4), ("lowest", 1, 0), ("same", 100, 99), ("higher", 200, 199)] {
        configure(&h, name, 100, 60).await;
        accept_batch(&h, sends(name, 1)).await;
        assert_eq!(sent_and_reserved(&h, name).await, (1, 10), "Redis holds ten");
        assert_eq!(change(&h, name, limit, 60).await.current_count, 1, "{name}");
        assert_eq!(sent_and_reserved(&h, name).await, (1, 0), "{name}: all ten are back");
        assert_eq!(accepted(&send_batch(&h, sends(name, 210)).await), more, "{name}");
        assert_eq!(find_quota(&h, name).await.expect("a row").current_count, limit);
    }
    assert_eq!(over_limit(&h).await, [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_cache_holds_stays_counted_under_lower_limits_until_it_is_given_back() {
    if Fixture::skipped() {
        return;
    }
    let h = Fixture::open().await;
    for separates in [true, false] {
        if !separates {
            h.database.execute("UPDATE weir_schema_state SET created_version = 14, oldest_version = 9").await;
        }
        // Redis takes no part: this is what stands in the table while nothing has been given back.
        let store = h.store.clone().behind_cache(false).await.expect("it knows its schema");
        let (name, id) = if separates { ("apart", user("apart")) } else { ("together", user("together")) };
        store.configure(&id, limits(100, 60)).await.expect("an answer");
        let request = |units| vec![ReservationRequest { user: id.clone(), units }];
        let reserved = store.reserve(request(1)).await.expect("an answer").remove(0).expect("a user");
        assert_eq!(reserved.units, 11);
        let apart = |sent| if separates { (sent, 11 - sent) } else { (11, 0) };
        assert_eq!(sent_and_reserved(&h, name).await, apart(1));
        for limit in [200, 11] {
            let row = store.change_limits(&id, limits(limit, 60)).await.expect("an answer");
            assert_eq!((row.current_count, row.reserved_count), apart(1), "there is room for both");
        }
        let row = store.change_limits(&id, limits(5, 60)).await.expect("the table takes it");
        assert_eq!((row.current_count, row.reserved_count), (11, 0), "above the limit all is shown as sent");
        assert_eq!(sent_and_reserved(&h, name).await, (11, 0));
        let none = store.reserve(request(1)).await.expect("an answer").remove(0).expect("a user");
        assert_eq!(none.units, 0);
        let denied = store.send_batch(vec![keyed(name, "k", "hello")].into()).await.expect("an answer");
        assert_eq!(outcome_letters(&denied), "D");
        assert!(!send_as_before(&h.database, name).await.expect("an answer"), "so do servers of before");
        let units = |units| vec![ReservedUnits { user: id.clone(), window: row.last_refresh, units }];
        store.record_sent(units(2)).await.expect("an answer");
        assert_eq!(
            sent_and_reserved(&h, name).await,
            (11, 0),
            "two of them were sent, which it shows already"
        );
        store.return_unused(units(8)).await.expect("an answer");
        assert_eq!(sent_and_reserved(&h, name).await, (3, 0));
        let outcomes = store.send_batch(sends(name, 4).into()).await.expect("an answer");
        assert_eq!(outcome_letters(&outcomes), "AADD");
    }
    assert_eq!(over_limit(&h).await, [""; 0]);
}

/// A store that answers reservations and sends, which are committed, only when it may, and takes units back only when it may.
struct SlowAnswers {
    store: Postgres,
    may_answer: Semaphore,
    /// Reservations and sends that were committed.
    committed: AtomicUsize,
    may_return: Semaphore,
    /// Calls that give units back.
    returning: AtomicUsize,
}

impl SlowAnswers {
    /// A server on the Redis of `h` with such a store.
    async fn server(h: &Fixture, may_answer: usize, may_return: usize) -> (Arc<Self>, Arc<RedisQuota>) {
        let slow = Arc::new(Self {
            store: h.store.clone().behind_cache(false).await.expect("it knows its schema"),
            may_answer: Semaphore::new(may_answer),
            committed: AtomicUsize::new(0),
            may_return: Semaphore::new(may_return),
            returning: AtomicUsize::new(0),
        });
        let times = QuotaTimes { install_wait: ENGINE_TIMEOUT, ..QuotaTimes::default() };
        let clock: Arc<dyn Clock> = Arc::new(h.clock().clone());
        let (store, metrics) = (Arc::clone(&slow) as Arc<dyn ReservableStore>, CacheMetrics::default());
        (slow, Arc::new(RedisQuota::new(h.redis.clone(), store, Some(clock), metrics, times)))
    }

    /// Counts a commit, and waits until its answer may be given.
    async fn answer(&self) {
        self.committed.fetch_add(1, Ordering::SeqCst);
        self.may_answer.acquire().await.expect("it stays open").forget();
    }

    /// Waits until so many reservations and sends are committed.
    async fn wait_for_commits(&self, count: usize) {
        let what = format!("{count} commits");
        wait::until(&what, ENGINE_TIMEOUT, async || self.committed.load(Ordering::SeqCst) >= count).await;
    }

    /// Waits until units have left Redis that the store does not have yet.
    async fn wait_for_return(&self) {
        wait::until("units are on their way back", ENGINE_TIMEOUT, async || {
            self.returning.load(Ordering::SeqCst) > 0
        })
        .await;
    }
}

#[async_trait::async_trait]
impl QuotaStore for SlowAnswers {
    async fn configure(&self, user: &UserId, limits: QuotaLimits) -> Result<Quota> {
        self.store.configure(user, limits).await
    }

    async fn change_limits(&self, user: &UserId, limits: QuotaLimits) -> Result<Quota> {
        self.store.change_limits(user, limits).await
    }

    async fn list(&self, after: Option<&UserId>, limit: usize) -> Result<Vec<(UserId, Quota)>> {
        self.store.list(after, limit).await
    }

    async fn find(&self, user: &UserId) -> Result<Option<Quota>> {
        self.store.find(user).await
    }

    async fn remove(&self, user: &UserId) -> Result<bool> {
        self.store.remove(user).await
    }

    async fn send_batch(&self, batch: Batch<SendMessage>) -> Result<Vec<SendOutcome>> {
        let outcomes = self.store.send_batch(batch).await;
        self.answer().await;
        outcomes
    }

    async fn purge_keys(&self, limit: usize) -> Result<usize> {
        self.store.purge_keys(limit).await
    }

    async fn audit(&self) -> Result<QuotaAudit> {
        QuotaStore::audit(&self.store).await
    }
}

#[async_trait::async_trait]
impl ReservableStore for SlowAnswers {
    async fn reserve(&self, requests: Vec<ReservationRequest>) -> Result<Vec<Option<Reservation>>> {
        let reserved = self.store.reserve(requests).await;
        self.answer().await;
        reserved
    }

    async fn record_sent(&self, sent: Vec<ReservedUnits>) -> Result<()> {
        self.store.record_sent(sent).await
    }

    async fn return_unused(&self, unused: Vec<ReservedUnits>) -> Result<()> {
        self.returning.fetch_add(1, Ordering::SeqCst);
        self.may_return.acquire().await.expect("it stays open").forget();
        self.store.return_unused(unused).await
    }

    async fn enqueue(&self, accepted: &[AcceptedMessage<'_>]) -> Result<Vec<EnqueueOutcome>> {
        self.store.enqueue(accepted).await
    }

    async fn raise_cache_epoch(&self) -> Result<()> {
        self.store.raise_cache_epoch().await
    }

    async fn confirm_invalidated(&self, users: &[UserId]) -> Result<()> {
        self.store.confirm_invalidated(users).await
    }

    fn limit_changes(&self) -> Arc<LimitChangeFeed> {
        self.store.limit_changes()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn units_that_were_reserved_before_a_change_within_the_window_are_not_installed_after_it() {
    if Fixture::skipped() {
        return;
    }
    let redis = Arc::new(private_redis());
    let h = Fixture::at(redis.url()).await;
    configure(&h, "u", 100, 60).await;
    let (slow, far) = SlowAnswers::server(&h, 0, MANY).await;
    let sending = tokio::spawn({
        let far = Arc::clone(&far);
        async move { far.send_batch(sends("u", 1).into()).await.expect("an answer") }
    });
    wait_for_row(&h, "u", (1, 10)).await;
    assert_eq!(change(&h, "u", 5, 1).await.current_count, 11, "eleven may be sent under the limit of before");
    wait::until("the other server knows it", ENGINE_TIMEOUT, async || !far.has_pending_invalidations()).await;
    assert_eq!(outcome_letters(&send_batch(&h, sends("u", 1)).await), "D", "it has made a hash");
    assert_eq!(redis.command(&["HGET", "RateLimiterCache:u", "window"]).await.text().len(), 16);
    slow.may_answer.add_permits(MANY);
    assert_eq!(outcome_letters(&sending.await.expect("it ends")), "A", "after the eleven were given back");
    let hash = redis.command(&["HMGET", "RateLimiterCache:u", "rateLimit", "timeWindow"]).await;
    assert_eq!(hash.texts(), ["5", "1"], "the limits of the change");
    assert_eq!(accepted(&send_batch(&h, sends("u", 20)).await), 4);
    assert_eq!(over_limit(&h).await, [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_that_change_under_load_never_let_more_pass_than_the_highest_and_lose_nothing() {
    if Fixture::skipped() {
        return;
    }
    let h = Arc::new(Fixture::open().await);
    let far = Arc::new(h.second_server().await.expect("a second server"));
    configure(&*h, "u", 40, 60).await;
    let sender = |n: usize| {
        let server = Arc::clone(if n.is_multiple_of(2) { &h } else { &far });
        async move {
            let mut sent = 0;
            for k in 0..15 {
                let batch = [sends("u", n % 3), vec![keyed("u", &format!("{n} {k}"), "hello")]].concat();
                sent += accepted(&send_batch(&*server, batch).await);
            }
            sent
        }
    };
    let senders: Vec<_> = (0..8).map(sender).collect();
    let sending = tokio::spawn(run_concurrently(senders));
    for limit in [30, 60, 20, 50].repeat(3) {
        change(&h, "u", limit, 60).await;
    }
    let mut sent: usize = sending.await.expect("it ends").into_iter().sum();
    assert!(sent <= 60, "{sent} sends");
    change(&far, "u", 70, 60).await;
    // The servers may still be giving back what they have found in Redis.
    for n in 0.. {
        let keys = (0..10).map(|k| keyed("u", &format!("last {n} {k}"), "hello")).collect();
        sent += accepted(&send_batch(&*h, keys).await);
        if sent >= 70 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(sent, 70, "every place is used, and once");
    wait_for_row(&h, "u", (70, 0)).await;
    assert_eq!(queue_audit(&*h).await.accepted, 70);
    assert_eq!(over_limit(&h).await, [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sends_with_keys_beside_reservations_of_two_servers_use_every_place_once() {
    if Fixture::skipped() {
        return;
    }
    let h = Arc::new(Fixture::open().await);
    let far = Arc::new(h.second_server().await.expect("a second server"));
    for (round, limit) in [5, 150].into_iter().enumerate() {
        let name = format!("u{round}");
        configure(&*h, &name, limit, 60).await;
        let sender = |n: usize| {
            let (server, name) = (Arc::clone(if n.is_multiple_of(2) { &h } else { &far }), name.clone());
            async move {
                let mut sent = 0;
                for k in 0..10 {
                    let key = || keyed(&name, &format!("{n} {k}"), "x");
                    let batch = if n % 4 < 2 { sends(&name, 1) } else { vec![key()] };
                    sent += accepted(&send_batch(&*server, batch).await);
                }
                sent
            }
        };
        let sent: usize = run_concurrently((0..12).map(sender)).await.into_iter().sum();
        // A send with a key is denied only when nothing is held anywhere.
        let keys = (0..limit).map(|n| keyed(&name, &format!("last {n}"), "x")).collect();
        let sent = sent + accepted(&send_batch(&*h, keys).await);
        assert_eq!(sent, usize::try_from(limit).unwrap(), "every place is used, and once");
        assert_eq!(outcome_letters(&send_batch(&*far, sends(&name, 2)).await), "DD");
        wait_for_row(&h, &name, (limit, 0)).await;
    }
    assert_eq!(over_limit(&h).await, [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_send_with_a_key_waits_for_units_that_are_on_their_way_to_redis() {
    if Fixture::skipped() {
        return;
    }
    let redis = Arc::new(private_redis());
    let h = Fixture::at(redis.url()).await;
    configure(&h, "u", 3, 60).await;
    let proxy = Proxy::start(redis.address()).await;
    let far = h.via(&redis.url_via(proxy.addr()), ENGINE_TIMEOUT).await;
    let quota = far.quota();
    proxy.delay(Duration::from_millis(300));
    let slow = sends("u", 1);
    let sending = tokio::spawn(async move { quota.send_batch(slow.into()).await.expect("an answer") });
    // The far server has reserved two places, and its call that installs them is on its way.
    wait_for_row(&h, "u", (1, 1)).await;
    let keys = (0..3).map(|n| keyed("u", &n.to_string(), "hello")).collect();
    assert_eq!(outcome_letters(&send_batch(&h, keys).await), "AAD", "the third place was ahead");
    assert_eq!(outcome_letters(&sending.await.expect("it ends")), "A");
}

/// A window of 22 of which nothing is left in the store: 16 were sent, Redis holds two, and the store has sent four with keys.
/// Returns a server that waits when it gives units back.
async fn full_window(h: &Fixture) -> (Arc<SlowAnswers>, Arc<RedisQuota>) {
    configure(h, "u", 22, 60).await;
    let (slow, server) = SlowAnswers::server(h, MANY, 0).await;
    let sent = accepted(&server.send_batch(sends("u", 16).into()).await.expect("an answer"));
    let keys: Vec<_> = (0..4).map(|n| keyed("u", &n.to_string(), "hello")).collect();
    let sent = sent + accepted(&h.store.send_batch(keys.into()).await.expect("an answer"));
    assert_eq!(sent, 20);
    (slow, server)
}

/// Sends, on a server, and returns the outcome once there is one.
fn start_sending(server: &Arc<RedisQuota>, batch: Vec<SendMessage>) -> tokio::task::JoinHandle<String> {
    let server = Arc::clone(server);
    tokio::spawn(async move { outcome_letters(&server.send_batch(batch.into()).await.expect("an answer")) })
}

/// Every place of the window was used, and once.
async fn expect_all_used(h: &Fixture) {
    assert_eq!(outcome_letters(&send_batch(h, sends("u", 1)).await), "D");
    wait_for_row(h, "u", (22, 0)).await;
    assert_eq!((queue_audit(h).await.accepted, over_limit(h).await), (22, Vec::new()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_is_denied_while_units_are_on_their_way_back_for_a_send_with_a_key() {
    if Fixture::skipped() {
        return;
    }
    let h = Fixture::open().await;
    let (slow, far) = full_window(&h).await;
    let with_key = start_sending(&far, vec![keyed("u", "last", "hello")]);
    slow.wait_for_return().await;
    let (near_store, near) = SlowAnswers::server(&h, MANY, MANY).await;
    let without = start_sending(&near, sends("u", 1));
    near_store.wait_for_commits(1).await;
    slow.may_return.add_permits(MANY);
    assert_eq!(without.await.expect("it ends"), "A");
    assert_eq!(with_key.await.expect("it ends"), "A");
    expect_all_used(&h).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn units_that_came_back_after_the_store_was_asked_and_before_redis_was_are_found() {
    if Fixture::skipped() {
        return;
    }
    let h = Fixture::open().await;
    let (slow, far) = full_window(&h).await;
    let with_key = start_sending(&far, vec![keyed("u", "last", "hello")]);
    slow.wait_for_return().await;
    // The other has found the window full in the store, and does not know it yet.
    let (near_store, near) = SlowAnswers::server(&h, 0, MANY).await;
    let without = start_sending(&near, sends("u", 1));
    near_store.wait_for_commits(1).await;
    slow.may_return.add_permits(MANY);
    assert_eq!(with_key.await.expect("it ends"), "A", "it is over before the other looks at Redis");
    near_store.may_answer.add_permits(MANY);
    assert_eq!(without.await.expect("it ends"), "A");
    expect_all_used(&h).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_stops_denies_nobody_the_units_that_it_gives_back() {
    if Fixture::skipped() {
        return;
    }
    let h = Fixture::open().await;
    let (slow, far) = full_window(&h).await;
    let stopping = tokio::spawn(async move { far.close().await });
    slow.wait_for_return().await;
    let (near_store, near) = SlowAnswers::server(&h, MANY, MANY).await;
    let first = start_sending(&near, sends("u", 1));
    near_store.wait_for_commits(1).await;
    slow.may_return.add_permits(MANY);
    stopping.await.expect("it stops");
    assert_eq!(first.await.expect("it ends"), "A");
    assert_eq!(outcome_letters(&send_batch(&h, sends("u", 1)).await), "A");
    expect_all_used(&h).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sends_with_keys_on_two_servers_find_the_units_that_either_gives_back() {
    if Fixture::skipped() {
        return;
    }
    for asks_before in [false, true] {
        let h = Fixture::open().await;
        let (slow, far) = full_window(&h).await;
        let first = start_sending(&far, vec![keyed("u", "first", "hello")]);
        slow.wait_for_return().await;
        // The other is denied meanwhile, and looks for units while they are on their way back, or when they are there.
        let (near_store, near) = SlowAnswers::server(&h, if asks_before { 0 } else { MANY }, MANY).await;
        let second = start_sending(&near, vec![keyed("u", "second", "hello")]);
        near_store.wait_for_commits(1).await;
        slow.may_return.add_permits(MANY);
        assert_eq!(first.await.expect("it ends"), "A");
        near_store.may_answer.add_permits(MANY);
        assert_eq!(second.await.expect("it ends"), "A", "asks before: {asks_before}");
        expect_all_used(&h).await;
    }
}
