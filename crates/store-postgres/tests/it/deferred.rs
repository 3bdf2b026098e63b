//! Settlement of deferred messages while others work on them.

use std::time::Duration;

use weir_queue::{Message, Position, QueueAudit, Settlement};
use weir_store::quota::TOPIC;
use weir_store_conformance::claims::{Claims, Disposition};
use weir_store_conformance::{EngineFixture, HasQueue, fixtures};

use crate::fixtures::PostgresFixture;

const LONG: Duration = Duration::from_secs(3_600);

/// Opens an engine with one deferred message of each user.
async fn defer_messages(users: &[&str]) -> (PostgresFixture, Vec<Message>) {
    let h = PostgresFixture::open().await;
    for user in users {
        fixtures::send_numbered(&h, user, 1).await;
    }
    let held = Claims::claim(&h, users.len()).await;
    let messages: Vec<Message> = held.messages().cloned().collect();
    held.must_settle(&h, |_| Disposition::Defer(LONG)).await;
    (h, messages)
}

fn row(position: Position) -> String {
    format!("topic = '{TOPIC}' AND shard = {} AND id = {}", position.shard, position.id)
}

async fn settle(h: &PostgresFixture, settlement: Settlement) {
    let queue = h.queue();
    let settled = queue.settle_deferred(TOPIC, settlement);
    let settled = tokio::time::timeout(Duration::from_secs(20), settled).await;
    settled.expect("it does not wait").expect("settle_deferred must succeed");
}

#[tokio::test]
async fn two_servers_that_settle_the_same_messages_do_not_deadlock() {
    if PostgresFixture::skipped() {
        return;
    }
    let (h, messages) = defer_messages(&["alice", "bob"]).await;
    let [first, second] = [0, 1].map(|n| messages[n].position);
    let other = h.database.connect().await.unwrap();
    other.batch_execute("BEGIN").await.unwrap();
    other.batch_execute(&format!("SELECT FROM queue_message WHERE {} FOR UPDATE", row(first))).await.unwrap();
    // In either order, and with different settlements.
    let retry = vec![(second, LONG), (first, LONG)];
    settle(&h, Settlement { retry, ..Settlement::default() }).await;
    settle(&h, Settlement { done: vec![first, second], ..Settlement::default() }).await;
    other.batch_execute("COMMIT").await.unwrap();
    assert_eq!(
        fixtures::queue_audit(&h).await,
        QueueAudit { accepted: 2, done: 1, in_flight: 1, ..QueueAudit::default() }
    );
    h.clock().advance(LONG);
    let left = Claims::drain(&h).await;
    assert_eq!(
        left.iter().map(|message| (message.position, message.attempts)).collect::<Vec<_>>(),
        [(first, 0)]
    );
}

#[tokio::test]
async fn a_settlement_waits_for_one_by_lease_in_the_same_shard() {
    if PostgresFixture::skipped() {
        return;
    }
    let (h, messages) = defer_messages(&["alice"]).await;
    let position = messages[0].position;
    let holder = h.database.connect().await.unwrap();
    let shard = format!("topic = '{TOPIC}' AND shard = {}", position.shard);
    // Like a settlement by lease before its commit.
    let delay = format!(
        "BEGIN;
         SELECT FROM queue_shard WHERE {shard} FOR UPDATE;
         UPDATE queue_message SET delayed_until = delayed_until + interval '1 hour' WHERE {}",
        row(position)
    );
    holder.batch_execute(&delay).await.unwrap();
    let queue = h.queue();
    let done = Settlement { done: vec![position], ..Settlement::default() };
    let late = tokio::spawn(async move { queue.settle_deferred(TOPIC, done).await });
    let waiting = "SELECT count(*) FROM pg_stat_activity
                   WHERE datname = current_database() AND wait_event_type = 'Lock'";
    while h.database.query_strings(waiting).await[0][0].as_deref() != Some("1") {
        assert!(!late.is_finished(), "it waits for the other settlement");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    holder.batch_execute("COMMIT").await.unwrap();
    late.await.unwrap().expect("settle_deferred must succeed");
    assert_eq!(
        fixtures::queue_audit(&h).await,
        QueueAudit { accepted: 1, done: 1, ..QueueAudit::default() },
        "it is not lost"
    );
}

#[tokio::test]
async fn shards_are_claimed_while_deferred_messages_are_settled() {
    if PostgresFixture::skipped() {
        return;
    }
    let (h, messages) = defer_messages(&["alice"]).await;
    let other = h.database.connect().await.unwrap();
    let lock = format!(
        "BEGIN; SELECT FROM queue_shard FOR KEY SHARE; SELECT FROM queue_message WHERE {} FOR UPDATE",
        row(messages[0].position)
    );
    other.batch_execute(&lock).await.unwrap();
    fixtures::send_numbered(&h, "bob", 1).await;
    assert_eq!(Claims::claim(&h, 1).await.texts(), ["bob 1"]);
    other.batch_execute("COMMIT").await.unwrap();
}
