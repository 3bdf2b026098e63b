//! Idempotency keys of sends that are published before they are counted, on two servers.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Semaphore;
use weir_core::{Clock, MessageId};
use weir_queue::publish::{OutgoingEvent, PublishOutcome, Publisher};
use weir_store::quota::{EnqueueOutcome, QuotaStore, SendMessage, SendOutcome};
use weir_store::{Error, Result};
use weir_store_conformance::fixtures::{configure, keyed};
use weir_store_conformance::{ENGINE_TIMEOUT, EngineFixture};
use weir_store_postgres::{Postgres, PostgresTarget};
use weir_testkit::postgres::Database;
use weir_testkit::wait;

use crate::fixtures::PostgresFixture;

/// What a broker does not take.
const LOST: &str = "lost";

/// A broker that notes the ids of all messages and fails those that say [`LOST`] until it is repaired.
struct Broker {
    ids: Mutex<Vec<String>>,
    is_broken: Mutex<bool>,
    may_answer: Semaphore,
    /// Executed when something is published.
    on_publish: Option<(Arc<Database>, &'static str)>,
}

impl Broker {
    fn new(is_broken: bool, answers: usize, on_publish: Option<(Arc<Database>, &'static str)>) -> Arc<Self> {
        let (ids, is_broken) = (Mutex::default(), Mutex::new(is_broken));
        Arc::new(Self { ids, is_broken, may_answer: Semaphore::new(answers), on_publish })
    }
}

#[async_trait::async_trait]
impl Publisher for Broker {
    async fn publish(&self, _topic: &str, events: Vec<OutgoingEvent>) -> Vec<PublishOutcome> {
        let texts: Vec<String> =
            events.into_iter().map(|event| String::from_utf8(event.payload).expect("JSON")).collect();
        let id = |text: &String| {
            let event: serde_json::Value = serde_json::from_str(text).expect("JSON");
            event["messageId"].as_str().expect("an id").to_owned()
        };
        self.ids.lock().extend(texts.iter().map(id));
        if let Some((database, sql)) = &self.on_publish {
            database.execute(sql).await;
        }
        self.may_answer.acquire().await.expect("it stays open").forget();
        let is_broken = *self.is_broken.lock();
        let outcome = |text: &String| match is_broken && text.contains(LOST) {
            true => PublishOutcome::Failed(Error::failed("test", "as the test wants it")),
            false => PublishOutcome::Confirmed,
        };
        texts.iter().map(outcome).collect()
    }

    async fn ping(&self) -> Result<()> {
        Ok(())
    }
}

/// A server that publishes.
async fn server(h: &PostgresFixture, broker: &Arc<Broker>) -> Postgres {
    let target: PostgresTarget = h.database.url().parse().expect("a Postgres URL");
    let (target, clock) =
        (target.with_call_timeout(ENGINE_TIMEOUT), Some(Arc::new(h.clock().clone()) as Arc<dyn Clock>));
    let engine = Postgres::open_with_clock(target, 2, clock).await.expect("it opens");
    engine.publishing(Arc::<Broker>::clone(broker))
}

fn start_sending(
    server: &Postgres,
    batch: Vec<SendMessage>,
) -> tokio::task::JoinHandle<Result<Vec<SendOutcome>>> {
    let server = server.clone();
    tokio::spawn(async move { server.send_batch(batch.into()).await })
}

async fn number(h: &PostgresFixture, sql: &str) -> usize {
    h.database.query_strings(sql).await[0][0].as_deref().expect("a number").parse().expect("a number")
}

async fn wait_for(h: &PostgresFixture, what: &str, sql: &str, expected: usize) {
    wait::until(what, ENGINE_TIMEOUT, async || number(h, sql).await == expected).await;
}

/// How many statements with this text wait for a lock.
fn waiting_for_lock(text: &str) -> String {
    format!(
        "SELECT count(*)::text FROM pg_stat_activity WHERE query LIKE '%{text}%' AND wait_event_type = 'Lock'
         AND datname = current_database()"
    )
}

/// The connections that wait for a user's row.
const WAITING: &str = "
    SELECT pid::text FROM pg_stat_activity WHERE query LIKE '%FROM rate_limit_store%' AND wait_event_type = 'Lock'
    AND datname = current_database()";

/// Ends the first of some connections.
async fn terminate(h: &PostgresFixture, connections: &[Vec<Option<String>>]) {
    let pid = connections[0][0].as_deref().expect("a number");
    h.database.execute(&format!("SELECT pg_terminate_backend({pid})")).await;
}

const RECORDS: &str = "SELECT count(*)::text FROM quota_idempotency";
const LOCK_USER: &str = "BEGIN; SELECT FROM rate_limit_store FOR UPDATE";
/// Fails every change of a count while there is a row.
const REFUSALS: &str = "
    CREATE TABLE refusal (n integer);
    CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN IF EXISTS (SELECT FROM refusal) THEN RAISE 'no writes'; END IF; RETURN NULL; END $$;
    CREATE TRIGGER refuse BEFORE UPDATE ON rate_limit_store FOR EACH STATEMENT EXECUTE FUNCTION refuse()";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeated_send_is_published_under_one_id_when_the_first_fails_and_the_second_is_not_counted() {
    if PostgresFixture::skipped() {
        return;
    }
    let h = PostgresFixture::open().await;
    configure(&h, "u", 10, 60).await;
    h.database.execute(REFUSALS).await;
    let broken = Broker::new(true, 0, None);
    let confirming = Broker::new(false, 9, Some((Arc::clone(&h.database), "INSERT INTO refusal VALUES (1)")));
    let (a, b) = (server(&h, &broken).await, server(&h, &confirming).await);
    let send = || vec![keyed("u", "k", LOST)];
    let first = start_sending(&a, send());
    wait::until("the first is published", ENGINE_TIMEOUT, async || !broken.ids.lock().is_empty()).await;
    let second = start_sending(&b, send());
    wait_for(&h, "the second waits", &waiting_for_lock("FROM rate_limit_store"), 1).await;
    broken.may_answer.add_permits(9);
    let first = first.await.expect("it ends").expect("an answer");
    assert_eq!(first, [SendOutcome::NotQueued(EnqueueOutcome::Failed)]);
    second.await.expect("it ends").expect_err("it is published and cannot be counted");
    h.database.execute("DELETE FROM refusal").await;
    *broken.is_broken.lock() = false;
    let third = a.send_batch(send().into()).await.expect("an answer");
    assert!(matches!(third[..], [SendOutcome::Accepted { .. }]), "{third:?}");
    let ids = [broken.ids.lock().clone(), confirming.ids.lock().clone()].concat();
    assert_eq!((ids.len(), ids.iter().collect::<HashSet<_>>().len()), (3, 1), "{ids:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_of_which_nothing_was_published_may_be_used_for_another_message() {
    if PostgresFixture::skipped() {
        return;
    }
    let h = PostgresFixture::open().await;
    configure(&h, "u", 10, 60).await;
    let (broker, other_broker) = (Broker::new(false, 9, None), Broker::new(false, 9, None));
    let a = server(&h, &broker).await;
    let b = server(&h, &other_broker).await;
    let locks_user = waiting_for_lock("FROM rate_limit_store");
    let other = h.database.connect().await.expect("a connection");

    other.batch_execute(LOCK_USER).await.expect("a lock");
    let failing = start_sending(&a, vec![keyed("u", "k", "wrong")]);
    wait_for(&h, "it waits for the user's row", &locks_user, 1).await;
    let first = h.database.query_strings(WAITING).await;
    terminate(&h, &first).await;
    let failed = failing.await.expect("it ends");
    assert!(matches!(failed, Err(Error::NotDone { .. })), "{failed:?}");
    assert_eq!(number(&h, RECORDS).await, 0, "the key is forgotten");

    // One that another server has found meanwhile stays: it may publish under its id.
    let failing = start_sending(&a, vec![keyed("u", "k", "right")]);
    wait_for(&h, "it waits for the user's row", &locks_user, 1).await;
    let first = h.database.query_strings(WAITING).await;
    let repeated = start_sending(&b, vec![keyed("u", "k", "right")]);
    wait_for(&h, "both wait for the user's row", &locks_user, 2).await;
    terminate(&h, &first).await;
    let failed = failing.await.expect("it ends");
    assert!(matches!(failed, Err(Error::NotDone { .. })), "{failed:?}");
    let reserved = h.database.query_strings("SELECT message_id::text FROM quota_idempotency").await;
    other.batch_execute("ROLLBACK").await.expect("no lock");
    let sent = repeated.await.expect("it ends").expect("an answer");
    let [SendOutcome::Accepted { message_id, .. }] = sent[..] else { panic!("{sent:?}") };
    let reserved = MessageId::from_uuid(reserved[0][0].as_deref().expect("an id").parse().expect("a UUID"));
    assert_eq!(message_id, reserved);
    assert_eq!((broker.ids.lock().len(), other_broker.ids.lock().len()), (0, 1));
}

/// Whoever confirms a key waits until a lock is free.
const PAUSE: &str = "
    CREATE FUNCTION pause() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_advisory_xact_lock(7); RETURN NEW; END $$;
    CREATE TRIGGER pause BEFORE UPDATE ON quota_idempotency FOR EACH ROW
        WHEN (NEW.remaining IS NOT NULL) EXECUTE FUNCTION pause()";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_that_confirms_a_key_and_forgets_another_does_not_deadlock_with_its_repetition() {
    if PostgresFixture::skipped() {
        return;
    }
    let h = PostgresFixture::open().await;
    configure(&h, "u", 10, 60).await;
    h.database.execute(PAUSE).await;
    let (broken, confirming) = (Broker::new(true, 9, None), Broker::new(false, 9, None));
    let (a, b) = (server(&h, &broken).await, server(&h, &confirming).await);
    let batch = || vec![keyed("u", "1", LOST), keyed("u", "3", "hello")];
    let other = h.database.connect().await.expect("a connection");
    other.batch_execute("SELECT pg_advisory_lock(7)").await.expect("a lock");
    let first = start_sending(&a, batch());
    wait_for(
        &h,
        "the third key is being confirmed",
        "SELECT count(*)::text FROM pg_locks JOIN pg_database AS here ON here.oid = database
         WHERE here.datname = current_database() AND locktype = 'advisory' AND NOT granted",
        1,
    )
    .await;
    let second = start_sending(&b, batch());
    let reserving = waiting_for_lock("INSERT INTO quota_idempotency AS old");
    wait_for(&h, "the repetition waits for a key", &reserving, 1).await;
    other.batch_execute("SELECT pg_advisory_unlock(7)").await.expect("no lock");
    let first = first.await.expect("it ends").expect("an answer");
    assert!(
        matches!(first[..], [SendOutcome::NotQueued(EnqueueOutcome::Failed), SendOutcome::Accepted { .. }]),
        "{first:?}"
    );
    let second = second.await.expect("it ends").expect("an answer");
    assert!(matches!(second[..], [SendOutcome::Accepted { .. }, SendOutcome::Replayed { .. }]), "{second:?}");
}
