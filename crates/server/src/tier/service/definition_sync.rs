//! The background task of tier: applies changes made on other servers, and deletes old holds, permits and subscriptions.

use std::sync::Arc;
use std::time::{Duration, Instant};

use weir_store::Result;
use weir_store::tier::{ChangedDefinition, DefinitionChanges, TierStore};

use super::SharedState;
use crate::tier::events::{DefinitionSyncFailed, PreloadFailed, PurgeFailed, SubscriptionsPreloaded};

/// How often the store is polled for changes: they apply here within five seconds, even if one poll fails.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// How often old holds, permits and subscriptions are deleted, and how many in one call.
const PURGE_INTERVAL: Duration = Duration::from_secs(60);
const PURGE_BATCH: usize = 1_000;
/// How long a hold is stored after it has expired: until then, settling it again returns the same answer.
const HOLD_RETENTION: Duration = Duration::from_secs(24 * 3_600);

/// The same of a permit. There may be one for every call of a service, so they are not stored for long.
const PERMIT_RETENTION: Duration = Duration::from_secs(3_600);

/// Runs until the service stops. `since` is the version of the definitions that are loaded.
pub(super) async fn run(shared: Arc<SharedState>, since: i64) {
    let (mut since, mut purged_at) = (since, Instant::now());
    if shared.store.is_shared() {
        match shared.subscriptions.preload(shared.timeout).await {
            Ok(count) => SubscriptionsPreloaded { count }.emit(),
            Err(error) => PreloadFailed { error: &error }.emit(),
        }
    }
    loop {
        tokio::time::sleep(POLL_INTERVAL).await;
        if shared.store.is_shared() {
            match apply_changes(&shared, since).await {
                Ok(version) => since = version,
                Err(error) => DefinitionSyncFailed { error: &error }.emit(),
            }
        }
        if purged_at.elapsed() >= PURGE_INTERVAL {
            purged_at = Instant::now();
            if let Err(error) = purge(&*shared.store).await {
                PurgeFailed { error: &error }.emit();
            }
        }
    }
}

/// Applies changes since a version and returns the version that is applied now.
async fn apply_changes(shared: &SharedState, since: i64) -> Result<i64> {
    let DefinitionChanges { version, changed } = shared.store.changes_since(Some(since)).await?;
    match changed {
        None => {
            // The changes in between are no longer in the store, so everything is loaded again.
            let current = shared.store.changes_since(None).await?.version;
            shared.subscriptions.mark_all();
            shared.definitions.load(shared.timeout).await?;
            return Ok(current.max(version));
        }
        Some(changed) => {
            if changed.contains(&ChangedDefinition::Definitions) {
                shared.definitions.load(shared.timeout).await?;
            }
            for change in &changed {
                if let ChangedDefinition::Subscription(user) = change {
                    shared.subscriptions.mark(user.as_str());
                }
            }
        }
    }
    Ok(version)
}

async fn purge(store: &dyn TierStore) -> Result<()> {
    while store.purge_subscriptions(PURGE_BATCH).await? >= PURGE_BATCH as u64 {}
    while store.purge_holds(HOLD_RETENTION, PURGE_BATCH).await? >= PURGE_BATCH as u64 {}
    while store.purge_permits(PERMIT_RETENTION, PURGE_BATCH).await? >= PURGE_BATCH as u64 {}
    Ok(())
}
