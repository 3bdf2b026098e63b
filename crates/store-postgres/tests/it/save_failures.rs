//! A batch that was published but whose counts could not be saved.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use weir_core::ManualClock;
use weir_queue::publish::{OutgoingEvent, PublishOutcome, Publisher};
use weir_store::Result;
use weir_store::quota::{QuotaStore, SendOutcome};
use weir_store_conformance::{START, fixtures};
use weir_store_postgres::{Postgres, PostgresTarget};
use weir_testkit::postgres::Server;

const REFUSE: &str = "
    CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no writes'; END $$;
    CREATE TRIGGER refuse BEFORE UPDATE ON rate_limit_store FOR EACH STATEMENT EXECUTE FUNCTION refuse()";
const REFUSE_PROBES: &str = "
    CREATE TRIGGER refuse BEFORE UPDATE ON quota_cache FOR EACH STATEMENT EXECUTE FUNCTION refuse()";
const ALLOW: &str = "DROP FUNCTION refuse CASCADE";

/// A broker that confirms and counts every message.
#[derive(Default)]
struct ConfirmingPublisher(AtomicUsize);

#[async_trait::async_trait]
impl Publisher for ConfirmingPublisher {
    async fn publish(&self, _topic: &str, events: Vec<OutgoingEvent>) -> Vec<PublishOutcome> {
        self.0.fetch_add(events.len(), Ordering::Relaxed);
        vec![PublishOutcome::Confirmed; events.len()]
    }

    async fn ping(&self) -> Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn after_a_failed_save_a_batch_needs_no_second_connection() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let database = Server::shared().database("uncommitted").await;
    let target: PostgresTarget = database.url().parse().expect("a Postgres URL");
    let clock = Some(Arc::new(ManualClock::at(START)) as Arc<dyn weir_core::Clock>);
    let broker = Arc::new(ConfirmingPublisher::default());
    let publisher: Arc<dyn Publisher> = Arc::<ConfirmingPublisher>::clone(&broker);
    let engine = Postgres::open_with_clock(target, 1, clock).await.expect("it opens").publishing(publisher);
    engine.configure(&fixtures::user("alice"), fixtures::limits(1_000, 60)).await.expect("alice has limits");
    let other = database.connect().await.expect("a connection");
    let published = || broker.0.load(Ordering::Relaxed);

    other.batch_execute(REFUSE).await.expect("a trigger");
    engine.send_batch(fixtures::sends("alice", 2).into()).await.expect_err("it cannot be saved");
    assert_eq!(published(), 2);
    other.batch_execute(REFUSE_PROBES).await.expect("a trigger");
    engine.send_batch(fixtures::sends("alice", 2).into()).await.expect_err("nothing can be saved");
    assert_eq!(published(), 2, "so nothing is published");

    other.batch_execute(ALLOW).await.expect("no triggers");
    let sent = engine.send_batch(fixtures::sends("alice", 3).into()).await.expect("they are sent");
    assert!(sent.iter().all(|outcome| matches!(outcome, SendOutcome::Accepted { .. })), "{sent:?}");
    assert_eq!(published(), 5);
}
