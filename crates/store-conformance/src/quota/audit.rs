//! Audits: after every step, each accepted message has exactly one state.

use std::time::Duration;

use weir_queue::QueueAudit;
use weir_store::quota::{QuotaAudit, TOPIC};

use crate::HasQuota;
use crate::claims::{Claims, Disposition};
use crate::fixtures::{accept_batch, configure, queue_audit, send_batch, send_numbered, sends, text, user};
use crate::quota::queue_dead::dead_letters;

pub async fn the_quota_books_count_users_and_nobody_is_over_the_limit<H: HasQuota>() {
    let h = H::open().await;
    let audit = async || h.quota().audit().await.expect("audit must succeed");
    let users = |users| QuotaAudit { users, over_limit: Vec::new() };
    configure(&h, "alice", 9, 1).await;
    configure(&h, "bob", 2, 1).await;
    send_batch(&h, [sends("alice", 9), sends("bob", 5), sends("nobody", 1)].concat()).await;
    assert_eq!(audit().await, users(2), "an exhausted limit is not exceeded");
    configure(&h, "alice", 3, 1).await;
    assert_eq!(audit().await, users(2), "a lowered limit counts from 0");
    h.quota().remove(&user("bob")).await.expect("remove must succeed");
    assert_eq!(audit().await, users(1), "a removed user is not counted");
}

pub async fn the_queue_books_are_right_after_every_step<H: HasQuota>() {
    let h = H::open().await;
    let must_be = async |step: &str, [accepted, done, discarded, dead, in_flight]: [u64; 5]| {
        let expected = QueueAudit { accepted, done, discarded, dead, in_flight };
        assert_eq!(queue_audit(&h).await, expected, "after {step}");
    };
    send_numbered(&h, "alice", 6).await;
    must_be("sending", [6, 0, 0, 0, 6]).await;
    let claims = Claims::claim(&h, 6).await;
    must_be("claiming", [6, 0, 0, 0, 6]).await;
    let disposition = |message: &_| match text(message).as_str() {
        "alice 1" => Disposition::Done,
        "alice 2" | "alice 3" => Disposition::Dead("given up"),
        "alice 4" => Disposition::Retry(Duration::from_secs(1)),
        _ => Disposition::Leave,
    };
    claims.must_settle(&h, disposition).await;
    must_be("settling", [6, 1, 0, 2, 3]).await;
    let dead = dead_letters(&h, None, 10).await;
    h.queue().discard(&dead[0].id).await.expect("discard must succeed");
    must_be("discarding", [6, 1, 1, 1, 3]).await;
    h.queue().replay(&dead[1].id).await.expect("replay must succeed");
    must_be("replaying", [6, 1, 1, 0, 4]).await;
    accept_batch(&h, sends("alice", 1)).await;
    must_be("sending again", [7, 1, 1, 0, 5]).await;
    h.clock().advance(Duration::from_secs(1));
    Claims::drain(&h).await;
    must_be("delivering the rest", [7, 6, 1, 0, 0]).await;
}

pub async fn denied_and_unknown_sends_are_not_in_the_books<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 2, 1).await;
    send_batch(&h, [sends("alice", 5), sends("nobody", 3)].concat()).await;
    assert_eq!(
        queue_audit(&h).await,
        QueueAudit { accepted: 2, in_flight: 2, ..QueueAudit::default() },
        "only what was accepted counts"
    );
}

pub async fn the_books_of_an_unknown_topic_are_empty<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 2).await;
    for topic in ["nothing-here", "", "SMS-OUTBOUND", "sms%"] {
        let books = h.queue().audit(topic).await.expect("audit must succeed");
        assert_eq!(books, QueueAudit::default(), "no message was ever on {topic:?}");
    }
    assert_eq!(queue_audit(&h).await.accepted, 2, "the messages are on {TOPIC}");
}
