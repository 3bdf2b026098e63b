//! Sends with an idempotency key. The store decides them, so that count, message and key are one commit; Redis takes no part,
//! and what it holds stays counted there.
//!
//! Units that Redis holds and has not handed out are counted in the store, which may deny for lack of them. Then they are
//! taken out of Redis, given back, and the store decides again. A denial of the store is thus final only if no unit was left
//! in Redis, nor on its way there or back.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;
use weir_core::UserId;
use weir_store::Result;
use weir_store::quota::{EnqueueOutcome, SendMessage, SendOutcome};

use super::SharedQuota;
use super::give_back::give_back;
use super::reply::ReleaseReply;
use super::spend::{INSTALL_PAUSE, INSTALL_PAUSE_MAX};

/// How often units are taken out of Redis for a batch. Sends without keys may reserve them again meanwhile.
const ROUNDS_MAX: usize = 3;

pub(super) async fn send_batch(shared: &SharedQuota, batch: Vec<SendMessage>) -> Result<Vec<SendOutcome>> {
    let mut outcomes = shared.store.send_batch(batch.clone().into()).await?;
    let mut seen = HashMap::new();
    for _round in 0..ROUNDS_MAX {
        let is_denied = |outcome: &SendOutcome| matches!(outcome, SendOutcome::Denied { .. });
        let denied: Vec<usize> = (0..outcomes.len()).filter(|&n| is_denied(&outcomes[n])).collect();
        let users = denied.iter().map(|&n| &batch[n].user);
        if denied.is_empty() || !find_and_give_back(shared, users, &mut seen).await {
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

/// Gives back the unused units of users, and waits for those that are on their way to Redis, or from there to the store. Returns
/// whether there were any that the store has not decided with: `seen` says how often units of each user's window had been given
/// back when it was asked, as far as this batch knows.
async fn find_and_give_back(
    shared: &SharedQuota,
    users: impl Iterator<Item = &UserId>,
    seen: &mut HashMap<UserId, u32>,
) -> bool {
    let mut users: Vec<&UserId> = users.collect();
    users.sort_unstable();
    users.dedup();
    let (until, mut pause) = (Instant::now() + shared.install_wait, INSTALL_PAUSE);
    loop {
        // However recently somebody has used them.
        let released = give_back(shared, &users, Duration::ZERO).await;
        let (mut has_more, mut are_pending) = (false, false);
        for (user, reply) in users.iter().zip(&released) {
            let Some(ReleaseReply { units, pending, returns, .. }) = *reply else { continue };
            let before = seen.insert((*user).clone(), returns + u32::from(units > 0));
            has_more |= units > 0 || before.unwrap_or(0) != returns;
            are_pending |= pending > 0;
        }
        if has_more || !are_pending || Instant::now() + pause >= until {
            return has_more;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(INSTALL_PAUSE_MAX);
    }
}
