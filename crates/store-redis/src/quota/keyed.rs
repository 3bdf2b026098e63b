//! Sends with an idempotency key. The store decides them, so that count, message and key are one commit; Redis takes no part,
//! and what it holds stays counted there.
//!
//! Units that Redis holds and has not handed out are counted in the store, which may deny for lack of them. Then they are
//! taken out of Redis, given back, and the store decides again. A denial of the store is thus final only if no unit was left
//! in Redis, nor on its way there.

use tokio::time::Instant;
use weir_core::UserId;
use weir_store::Result;
use weir_store::quota::{EnqueueOutcome, ReservedUnits, SendMessage, SendOutcome};

use super::reply::{has_pending, parse_release};
use super::spend::{INSTALL_PAUSE, INSTALL_PAUSE_MAX};
use super::{SharedQuota, key};
use crate::client::KeyCall;
use crate::script::Script;

/// How often units are taken out of Redis for a batch. Sends without keys may reserve them again meanwhile.
const ROUNDS_MAX: usize = 3;

/// What there was of units that the store counts and nobody has sent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Unused {
    GivenBack,
    /// None in Redis, but another caller may be about to install some.
    OnTheirWay,
    Nothing,
}

pub(super) async fn send_batch(shared: &SharedQuota, batch: Vec<SendMessage>) -> Result<Vec<SendOutcome>> {
    let mut outcomes = shared.store.send_batch(batch.clone().into()).await?;
    for _round in 0..ROUNDS_MAX {
        let is_denied = |outcome: &SendOutcome| matches!(outcome, SendOutcome::Denied { .. });
        let denied: Vec<usize> = (0..outcomes.len()).filter(|&n| is_denied(&outcomes[n])).collect();
        if denied.is_empty() || !find_and_give_back(shared, denied.iter().map(|&n| &batch[n].user)).await {
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

/// Gives back the unused units of users, and waits for those that are on their way to Redis. Returns whether there were any.
async fn find_and_give_back(shared: &SharedQuota, users: impl Iterator<Item = &UserId>) -> bool {
    let mut users: Vec<&UserId> = users.collect();
    users.sort_unstable();
    users.dedup();
    let (until, mut pause) = (Instant::now() + shared.install_wait, INSTALL_PAUSE);
    loop {
        let unused = give_back(shared, &users).await;
        if unused != Unused::OnTheirWay || Instant::now() + pause >= until {
            return unused == Unused::GivenBack;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(INSTALL_PAUSE_MAX);
    }
}

/// Takes the unused units of users out of Redis and gives them back to the store.
async fn give_back(shared: &SharedQuota, users: &[&UserId]) -> Unused {
    let calls: Vec<_> = users.iter().map(|user| KeyCall { key: key(user), arguments: Vec::new() }).collect();
    // However recently somebody has used them.
    let common = [&*shared.epoch(), "0"];
    let replies = shared.redis.call_each(Script::QuotaRelease, &common, &calls).await;
    let (mut unused, mut are_pending) = (Vec::new(), false);
    for (user, reply) in users.iter().zip(replies) {
        let Ok(reply) = reply else { continue };
        if let Some((window, units)) = parse_release(&reply) {
            unused.push(ReservedUnits { user: (*user).clone(), window, units });
        }
        are_pending |= has_pending(&reply);
    }
    if unused.is_empty() {
        return if are_pending { Unused::OnTheirWay } else { Unused::Nothing };
    }
    match shared.store.return_unused(unused).await {
        Ok(()) => Unused::GivenBack,
        Err(error) => {
            tracing::warn!(error = %error.with_causes(), "cannot give back unused quota; it stays counted until its windows end");
            Unused::Nothing
        }
    }
}
