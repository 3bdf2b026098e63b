//! Packs: which messages are in `queue_pack` and which in `queue_message`. The conformance suite checks what claims and settlements
//! return.

use std::time::Duration;

use weir_queue::{MessageClaim, Settlement, pack};
use weir_store::quota::SendMessage;
use weir_store_conformance::{EngineFixture, HasQueue, fixtures};

use crate::fixtures::PostgresFixture;

/// Returns the packs by their counts, in order of id, and the rows by their keys.
async fn stored_messages(h: &PostgresFixture) -> (Vec<String>, Vec<String>) {
    let texts = async |sql: &str| {
        let rows = h.database.query_strings(sql).await;
        rows.into_iter().map(|row| row[0].clone().unwrap_or_default()).collect::<Vec<_>>()
    };
    let packs = texts("SELECT count FROM queue_pack ORDER BY first_id").await;
    (packs, texts("SELECT key FROM queue_message ORDER BY id").await)
}

async fn open_fixture() -> PostgresFixture {
    let h = PostgresFixture::open().await;
    for user in ["alice", "bob"] {
        fixtures::configure(&h, user, 1_000_000, 60).await;
    }
    h
}

/// Returns the texts of a claim, such as `alice 1`.
fn texts(claim: &MessageClaim) -> Vec<String> {
    claim.messages.iter().map(fixtures::text).collect()
}

async fn send(h: &PostgresFixture, user: &str, texts: &[&str]) {
    let batch: Vec<SendMessage> = texts.iter().map(|text| fixtures::send(user, text)).collect();
    fixtures::accept_batch(h, batch).await;
}

#[tokio::test]
async fn messages_that_are_sent_together_are_a_pack_and_a_single_one_is_a_row() {
    if PostgresFixture::skipped() {
        return;
    }
    let h = open_fixture().await;
    send(&h, "alice", &["1"]).await;
    send(&h, "alice", &["2", "3", "4"]).await;
    send(&h, "alice", &["5"]).await;
    let (packs, rows) = stored_messages(&h).await;
    assert_eq!((packs, rows), (vec!["3".to_owned()], vec!["alice".to_owned(); 2]));
    assert_eq!(texts(&fixtures::claim(&h, 100).await), ["1", "2", "3", "4", "5"], "in the order they came");
}

#[tokio::test]
async fn a_pack_is_deleted_when_done_and_unpacked_when_partly_done() {
    if PostgresFixture::skipped() {
        return;
    }
    let h = open_fixture().await;
    send(&h, "alice", &["1", "2"]).await;
    send(&h, "alice", &["3", "4", "5"]).await;
    let claim = fixtures::claim(&h, 4).await;
    assert_eq!(texts(&claim), ["1", "2", "3", "4"]);
    let done = claim.messages.iter().map(|message| message.position).collect();
    h.queue().settle(&claim.receipt, Settlement { done, ..Settlement::default() }).await.expect("it settles");
    assert_eq!(stored_messages(&h).await, (Vec::new(), vec!["alice".to_owned()]));
    let books = fixtures::queue_audit(&h).await;
    assert_eq!((books.accepted, books.done, books.in_flight), (5, 4, 1));
    assert_eq!(texts(&fixtures::claim(&h, 4).await), ["5"]);
}

#[tokio::test]
async fn only_messages_of_the_same_key_wait_for_a_delayed_one() {
    if PostgresFixture::skipped() {
        return;
    }
    let h = open_fixture().await;
    let [alice, other] = users_of_one_shard(&h).await;
    send(&h, &alice, &["1", "2"]).await;
    let claim = fixtures::claim(&h, 1).await;
    let retry = vec![(claim.messages[0].position, Duration::from_secs(60))];
    let settlement = Settlement { retry, ..Settlement::default() };
    h.queue().settle(&claim.receipt, settlement).await.expect("it settles");
    let batch = vec![fixtures::send(&alice, "3"), fixtures::send(&other, "4"), fixtures::send(&alice, "5")];
    fixtures::accept_batch(&h, batch).await;
    assert_eq!(stored_messages(&h).await, (vec!["3".to_owned()], vec![alice.clone(); 2]));
    let claim = fixtures::claim(&h, 100).await;
    assert_eq!(texts(&claim), ["4"]);
    let done = vec![claim.messages[0].position];
    h.queue().settle(&claim.receipt, Settlement { done, ..Settlement::default() }).await.expect("it settles");
    h.clock().advance(Duration::from_secs(61));
    assert_eq!(texts(&fixtures::claim(&h, 100).await), ["1", "2", "3", "5"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_and_packs_are_read_from_one_snapshot() {
    if PostgresFixture::skipped() {
        return;
    }
    let h = open_fixture().await;
    // Makes reading rows slow, so that messages are sent between the reads of rows and packs.
    let slow = format!(
        "INSERT INTO queue_message (topic, shard, key, payload, delayed_until)
         SELECT 'sms-outbound', {}, 'late-' || n, '', 'infinity' FROM generate_series(1, 20000) AS n",
        weir_store::shard::of("alice", 16)
    );
    h.database.execute(&slow).await;
    let texts_sent: Vec<String> = (0..300).map(|n| n.to_string()).collect();
    let sending = async {
        // One message, then two together, and so on.
        for three in texts_sent.chunks(3) {
            send(&h, "alice", &[&three[0]]).await;
            send(&h, "alice", &[&three[1], &three[2]]).await;
        }
    };
    let claiming = async {
        let mut came = Vec::new();
        while came.len() < texts_sent.len() {
            let claim = fixtures::claim(&h, 100).await;
            came.extend(texts(&claim));
            let done = claim.messages.iter().map(|message| message.position).collect();
            let settlement = Settlement { done, ..Settlement::default() };
            h.queue().settle(&claim.receipt, settlement).await.expect("it settles");
        }
        came
    };
    let ((), came) = tokio::join!(sending, claiming);
    assert_eq!(came, texts_sent);
}

#[tokio::test]
async fn packs_fit_on_a_page_and_share_no_ids() {
    if PostgresFixture::skipped() {
        return;
    }
    let h = open_fixture().await;
    let text = "x".repeat(500);
    send(&h, "alice", &vec![text.as_str(); 100]).await;
    let longest = "SELECT max(octet_length(messages)) <= 7000 AND count(*) > 5 FROM queue_pack";
    assert_eq!(h.database.query_strings(longest).await, [[Some("t".to_owned())]]);
    let step = "SELECT seqincrement FROM pg_sequence WHERE seqrelid = 'queue_message_id_seq'::regclass";
    assert_eq!(h.database.query_strings(step).await, [[Some(pack::MESSAGES_MAX.to_string())]]);
    assert_eq!(fixtures::claim(&h, 1_000).await.messages.len(), 100);
}

/// Returns two users whose messages are in the same shard.
async fn users_of_one_shard(h: &PostgresFixture) -> [String; 2] {
    let shard = |user: &str| weir_store::shard::of(user, 16);
    let mut others = (0..).map(|n| format!("user-{n}")).filter(|user| shard(user) == shard("alice"));
    let other = others.next().expect("there are many");
    fixtures::configure(h, &other, 1_000_000, 60).await;
    ["alice".to_owned(), other]
}
