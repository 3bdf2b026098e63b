//! Sends with an idempotency key. The store decides them, so that count, message and key are one commit; Redis takes no part,
//! and what it holds stays counted there.
//!
//! Units that Redis holds and has not handed out are counted in the store, which may deny for lack of them. Then they are
//! taken out of Redis, given back, and the store decides again. A denial of the store is thus final only if no unit was left
//! in Redis.

use weir_core::UserId;
use weir_store::Result;
use weir_store::quota::{EnqueueOutcome, SendMessage, SendOutcome, UnusedReservation};

use super::reply::parse_release;
use super::{SharedQuota, key};
use crate::client::KeyCall;
use crate::script::Script;

/// How often units are taken out of Redis for a batch. Sends without keys may reserve them again meanwhile.
const ROUNDS_MAX: usize = 3;

pub(super) async fn send_batch(shared: &SharedQuota, batch: Vec<SendMessage>) -> Result<Vec<SendOutcome>> {
    let mut outcomes = shared.store.send_batch(batch.clone().into()).await?;
    for _round in 0..ROUNDS_MAX {
        let is_denied = |outcome: &SendOutcome| matches!(outcome, SendOutcome::Denied { .. });
        let denied: Vec<usize> = (0..outcomes.len()).filter(|&n| is_denied(&outcomes[n])).collect();
        if denied.is_empty() || !give_back(shared, denied.iter().map(|&n| &batch[n].user)).await {
            break;
        }
        let again: Vec<SendMessage> = denied.iter().map(|&n| batch[n].clone()).collect();
        // An error must not fail the commands that are decided already.
        let decided = shared.store.send_batch(again.into()).await.unwrap_or_else(|error| {
            tracing::warn!(error = %error.with_causes(), "the store cannot decide sends with idempotency keys again");
            vec![SendOutcome::NotQueued(EnqueueOutcome::of_error(&error)); denied.len()]
        });
        denied.into_iter().zip(decided).for_each(|(n, outcome)| outcomes[n] = outcome);
    }
    Ok(outcomes)
}

/// Takes the unused units of users out of Redis and gives them back to the store. Returns whether there were any.
async fn give_back(shared: &SharedQuota, users: impl Iterator<Item = &UserId>) -> bool {
    let mut users: Vec<&UserId> = users.collect();
    users.sort_unstable();
    users.dedup();
    let calls: Vec<_> = users.iter().map(|user| KeyCall { key: key(user), arguments: Vec::new() }).collect();
    let replies = shared.redis.call_each(Script::QuotaRelease, &[&shared.epoch()], &calls).await;
    let unused: Vec<_> = users
        .into_iter()
        .zip(replies)
        .filter_map(|(user, reply)| {
            let (window, units) = parse_release(&reply.ok()?)?;
            Some(UnusedReservation { user: user.clone(), window, units })
        })
        .collect();
    if unused.is_empty() {
        return false;
    }
    shared.store.return_unused(unused).await.inspect_err(|error| {
        tracing::warn!(error = %error.with_causes(), "cannot give back unused quota; it stays counted until its windows end");
    }).is_ok()
}
