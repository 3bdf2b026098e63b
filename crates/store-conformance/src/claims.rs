//! Claims a given number of messages, in as many claims as it takes, and settles them.
//!
//! Engines may lease whole shards and return fewer messages than requested, so one claim is not enough for most cases.

use std::time::Duration;

use weir_queue::{ClaimReceipt, Message, MessageClaim, Settlement};
use weir_store::quota::TOPIC;

use crate::{HasQuota, fixtures};

const CLAIMS_MAX: usize = 64;

/// How a case settles one message.
#[derive(Clone, Debug)]
pub enum Disposition {
    Done,
    /// Retried after this time; counts an attempt.
    Retry(Duration),
    /// Becomes a dead letter with this reason.
    Dead(&'static str),
    /// Claimable again after this time; counts no attempt.
    Defer(Duration),
    /// Left out of the settlement, so its lease just ends.
    Leave,
}

/// Claims that are not settled yet.
#[derive(Debug, Default)]
pub struct Claims {
    claims: Vec<MessageClaim>,
}

impl Claims {
    /// Claims exactly `count` messages for [`fixtures::VISIBILITY`].
    pub async fn claim<H: HasQuota>(h: &H, count: usize) -> Self {
        Self::claim_for(h, count, fixtures::VISIBILITY).await
    }

    /// Claims exactly `count` messages for `visibility`.
    pub async fn claim_for<H: HasQuota>(h: &H, count: usize, visibility: Duration) -> Self {
        let mut claims = Self::default();
        for _ in 0..CLAIMS_MAX {
            let missing = count - claims.messages().count();
            if missing == 0 {
                return claims;
            }
            let claim = h.queue().claim(TOPIC, missing, visibility).await.expect("claim must succeed");
            assert!(claim.messages.len() <= missing, "a claim must not return more messages than requested");
            if claim.messages.is_empty() {
                // The rest may wait behind messages that are already claimed: release those and start over.
                claims.settle(h, |_| Disposition::Leave).await;
                claims = Self::default();
            } else {
                claims.claims.push(claim);
            }
        }
        panic!(
            "{count} messages must be claimable within {CLAIMS_MAX} claims, but only {} were",
            claims.messages().count()
        );
    }

    /// Claims everything that is claimable now, settles it as done, and returns it in the order in which it came.
    pub async fn drain<H: HasQuota>(h: &H) -> Vec<Message> {
        let mut drained = Vec::new();
        let mut empty = 0;
        while empty < fixtures::EMPTY_ROUNDS {
            let claim = fixtures::claim(h, 100).await;
            if claim.messages.is_empty() {
                empty += 1;
                continue;
            }
            empty = 0;
            drained.extend(claim.messages.iter().cloned());
            Self { claims: vec![claim] }.must_settle(h, |_| Disposition::Done).await;
        }
        drained
    }

    /// All claimed messages; those of one key are in order.
    pub fn messages(&self) -> impl Iterator<Item = &Message> {
        self.claims.iter().flat_map(|claim| &claim.messages)
    }

    /// The texts of all claimed messages.
    pub fn texts(&self) -> Vec<String> {
        fixtures::texts(self.messages())
    }

    /// The claimed message, which must be the only one.
    pub fn only(&self) -> &Message {
        let mut messages = self.messages();
        let only = messages.next().expect("a message is claimed");
        assert!(messages.next().is_none(), "only one message is claimed");
        only
    }

    pub fn receipts(&self) -> impl Iterator<Item = &ClaimReceipt> {
        self.claims.iter().map(|claim| &claim.receipt)
    }

    /// Settles every claim. Returns for each whether its lease still held.
    pub async fn settle<H: HasQuota>(
        &self,
        h: &H,
        disposition: impl Fn(&Message) -> Disposition,
    ) -> Vec<bool> {
        let mut answers = Vec::new();
        for claim in &self.claims {
            let settlement = settlement(&claim.messages, &disposition);
            answers.push(h.queue().settle(&claim.receipt, settlement).await.expect("settle must succeed"));
        }
        answers
    }

    /// Settles every claim; all leases must still be valid.
    pub async fn must_settle<H: HasQuota>(&self, h: &H, disposition: impl Fn(&Message) -> Disposition) {
        let answers = self.settle(h, disposition).await;
        assert!(answers.iter().all(|&is_valid| is_valid), "a valid lease must settle its claim");
    }

    /// Tries to settle every claim; no lease may be valid any more.
    pub async fn must_be_refused<H: HasQuota>(&self, h: &H, disposition: impl Fn(&Message) -> Disposition) {
        let answers = self.settle(h, disposition).await;
        assert!(
            answers.iter().all(|&is_valid| !is_valid),
            "an expired lease must settle nothing and return false"
        );
    }
}

fn settlement(messages: &[Message], disposition: impl Fn(&Message) -> Disposition) -> Settlement {
    let mut settlement = Settlement::default();
    for message in messages {
        match disposition(message) {
            Disposition::Done => settlement.done.push(message.position),
            Disposition::Retry(after) => settlement.retry.push((message.position, after)),
            Disposition::Dead(reason) => settlement.dead.push((message.position, reason.to_owned())),
            Disposition::Defer(after) => settlement.deferred.push((message.position, after)),
            Disposition::Leave => {}
        }
    }
    settlement
}
