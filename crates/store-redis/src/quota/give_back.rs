//! Takes unused units out of Redis and gives them back to the store.
//!
//! Redis releases them first, so a failure in between can only lose units, until their window ends. Meanwhile neither Redis nor
//! the store can hand them out. So that nobody takes the window for full, the hash shows them as pending until the store has
//! them, or for two seconds; and it counts the returns, for callers that have asked the store before one and look at the hash
//! afterwards.

use std::time::Duration;

use weir_core::UserId;
use weir_store::quota::ReservedUnits;

use super::reply::{ReleaseReply, parse_release};
use super::{SharedQuota, key};
use crate::client::KeyCall;
use crate::script::Script;

/// Gives back the unused units of users, of those that nobody has used for `idle_for`. Returns what each hash held, in order, and
/// the units that the store has; `None` where there is no such hash.
pub(super) async fn give_back(
    shared: &SharedQuota,
    users: &[&UserId],
    idle_for: Duration,
) -> Vec<Option<ReleaseReply>> {
    let (epoch, idle_ms) = (shared.epoch(), idle_for.as_millis().to_string());
    let calls: Vec<_> = users.iter().map(|user| KeyCall { key: key(user), arguments: Vec::new() }).collect();
    let replies = shared.redis.call_each(Script::QuotaRelease, &[&epoch, &idle_ms], &calls).await;
    let mut released: Vec<_> =
        replies.into_iter().map(|reply| reply.ok().as_ref().and_then(parse_release)).collect();
    let (mut unused, mut returned) = (Vec::new(), Vec::new());
    for (user, reply) in users.iter().zip(&released) {
        let Some(ReleaseReply { window, units: units @ 1.., .. }) = *reply else { continue };
        unused.push(ReservedUnits { user: (*user).clone(), window, units });
        returned.push(KeyCall { key: key(user), arguments: vec![window.as_micros().to_string()] });
    }
    if unused.is_empty() {
        return released;
    }
    if let Err(error) = shared.store.return_unused(unused).await {
        tracing::warn!(error = %error.with_causes(), "cannot give back unused quota; it stays counted until its windows end");
        released.iter_mut().flatten().for_each(|reply| reply.units = 0);
        return released;
    }
    // A hash that does not hear of it shows the units as pending for two seconds.
    shared.redis.call_each(Script::QuotaReturned, &[&epoch], &returned).await;
    released
}
