//! Messages a case has claimed and not settled yet, however many claims it took to get them.
//!
//! Engines may lease whole shards and hand out less than was asked for, so a case asks for messages, not for a claim.

use std::time::Duration;

use weir_queue::{ClaimReceipt, Message, MessageClaim, Settlement};
use weir_store::quota::TOPIC;

use crate::{HasQuota, fixtures};

const ROUNDS: usize = 64;

/// What a case wants to become of a message.
#[derive(Clone, Debug)]
pub enum Disposition {
    /// Done for good.
    Done,
    /// Put back for a while.
    Retry(Duration),
    /// A dead letter, and why.
    Dead(&'static str),
    /// Put back for a while without losing an attempt.
    Defer(Duration),
    /// Not named in the settlement.
    Leave,
}

/// Claims that are out.
#[derive(Debug, Default)]
pub struct Claims {
    claims: Vec<MessageClaim>,
}

impl Claims {
    /// Claims exactly `wanted` messages for [`fixtures::VISIBILITY`].
    pub async fn claim<H: HasQuota>(h: &H, wanted: usize) -> Self {
        Self::claim_for(h, wanted, fixtures::VISIBILITY).await
    }

    /// Claims exactly `wanted` messages for `visibility`.
    pub async fn claim_for<H: HasQuota>(h: &H, wanted: usize, visibility: Duration) -> Self {
        let mut held = Self::default();
        for _ in 0..ROUNDS {
            let missing = wanted - held.messages().count();
            if missing == 0 {
                return held;
            }
            let claim = h.queue().claim(TOPIC, missing, visibility).await.expect("claim must succeed");
            assert!(claim.messages.len() <= missing, "a claim must not hand out more than was asked for");
            if claim.messages.is_empty() {
                // The rest may stand behind what is already held: give it up and begin again.
                held.settle(h, |_| Disposition::Leave).await;
                held = Self::default();
            } else {
                held.claims.push(claim);
            }
        }
        panic!(
            "{wanted} messages must come within {ROUNDS} claims, but there are only {}",
            held.messages().count()
        );
    }

    /// Everything that can be claimed now, settled as done at once, in the order it came.
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
            Self { claims: vec![claim] }.settled(h, |_| Disposition::Done).await;
        }
        drained
    }

    /// The messages, in order for each key.
    pub fn messages(&self) -> impl Iterator<Item = &Message> {
        self.claims.iter().flat_map(|claim| &claim.messages)
    }

    /// Their texts.
    pub fn texts(&self) -> Vec<String> {
        fixtures::texts(self.messages())
    }

    /// The only message.
    pub fn only(&self) -> &Message {
        let mut messages = self.messages();
        let only = messages.next().expect("a message is held");
        assert!(messages.next().is_none(), "only one message is held");
        only
    }

    /// The receipts of the claims.
    pub fn receipts(&self) -> impl Iterator<Item = &ClaimReceipt> {
        self.claims.iter().map(|claim| &claim.receipt)
    }

    /// Settles every claim, and what each answered.
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

    /// Settles every claim; the leases must still hold.
    pub async fn settled<H: HasQuota>(&self, h: &H, disposition: impl Fn(&Message) -> Disposition) {
        let answers = self.settle(h, disposition).await;
        assert!(answers.iter().all(|&held| held), "a lease that has not run out must settle its claim");
    }

    /// Settles every claim; no lease must hold any more.
    pub async fn refused<H: HasQuota>(&self, h: &H, disposition: impl Fn(&Message) -> Disposition) {
        let answers = self.settle(h, disposition).await;
        assert!(answers.iter().all(|&held| !held), "a lease that has run out must settle nothing and say so");
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
