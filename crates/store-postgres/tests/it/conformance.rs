//! Runs the conformance suites on Postgres, and checks what only its tables show.

use std::collections::BTreeSet;
use std::time::Duration;

use weir_store::quota::TOPIC;
use weir_store_conformance::sale::dead;
use weir_store_conformance::{EngineFixture, HasQueue, fixtures};

use crate::fixtures::PostgresFixture;

weir_store_conformance::suites!(crate::fixtures::PostgresFixture);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_of_one_message_holds_one_shard() {
    if PostgresFixture::skipped() {
        return;
    }
    let h = PostgresFixture::open().await;
    for user in 0..20 {
        fixtures::send_numbered(&h, &format!("user-{user}"), 1).await;
    }
    let visibility = Duration::from_secs(30);
    let one = h.queue().claim(TOPIC, 1, visibility).await.expect("a claim");
    assert_eq!((one.messages.len(), one.receipt.leases.len()), (1, 1));
    let several = h.queue().claim(TOPIC, 3, visibility).await.expect("a claim");
    let shards: BTreeSet<u16> = several.messages.iter().map(|message| message.position.shard).collect();
    assert_eq!(several.receipt.leases.len(), shards.len(), "and no more than there are messages of");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn purchases_that_could_not_be_persisted_become_dead_letters_once_and_can_be_replayed() {
    if PostgresFixture::skipped() {
        return;
    }
    let h = PostgresFixture::open().await;
    dead::purchases_that_could_not_be_persisted_become_dead_letters_once_and_can_be_replayed(&h.engine).await;
}
