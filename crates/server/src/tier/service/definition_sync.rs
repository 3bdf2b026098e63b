//! What becomes of tier in the background: changes on other servers are heard of, and old holds forgotten.

use std::sync::Arc;
use std::time::{Duration, Instant};

use weir_store::Result;
use weir_store::tier::{ChangedDefinition, DefinitionChanges, TierStore};

use super::Shared;
use crate::telemetry::log_throttle::LogThrottle;

/// How often other servers' changes are asked for: they hold here within five seconds, also when one answer is lost.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// How often old holds are looked for, and how many are forgotten at a time.
const PURGE_EVERY: Duration = Duration::from_secs(60);
const PURGED: usize = 1_000;
/// How long a hold is remembered after it has expired: as long can its settlement be asked for again.
pub(crate) const HOLD_KEPT: Duration = Duration::from_secs(24 * 3_600);

/// Runs for as long as the service does.
pub(super) async fn run(shared: Arc<Shared>, since: i64) {
    let (mut since, mut purged) = (since, Instant::now());
    loop {
        tokio::time::sleep(ASK_EVERY).await;
        if shared.store.is_shared() {
            match hear(&shared, since).await {
                Ok(version) => since = version,
                Err(error) => tell(&error),
            }
        }
        if purged.elapsed() >= PURGE_EVERY {
            purged = Instant::now();
            if let Err(error) = purge(&*shared.store).await {
                tell(&error);
            }
        }
    }
}

/// Forgets what was changed. Answers up to where that is so.
async fn hear(shared: &Shared, since: i64) -> Result<i64> {
    let DefinitionChanges { version, changed } = shared.store.changes_since(Some(since)).await?;
    match changed {
        None => {
            // Of the versions in between nobody knows; what is present is read with the next ones.
            let present = shared.store.changes_since(None).await?.version;
            shared.subscriptions.forget_all();
            shared.definitions.load(shared.timeout).await?;
            return Ok(present.max(version));
        }
        Some(changed) => {
            if changed.contains(&ChangedDefinition::Definitions) {
                shared.definitions.load(shared.timeout).await?;
            }
            for change in &changed {
                if let ChangedDefinition::Subscription(user) = change {
                    shared.subscriptions.forget(user.as_str());
                }
            }
        }
    }
    Ok(version)
}

async fn purge(store: &dyn TierStore) -> Result<()> {
    while store.purge_holds(HOLD_KEPT, PURGED).await? >= PURGED as u64 {}
    Ok(())
}

fn tell(error: &weir_store::Error) {
    static FAILED: LogThrottle = LogThrottle::new();
    if let Some(also) = FAILED.permit() {
        tracing::warn!(error = %error.with_causes(), also, "changes of limits on other servers cannot be read");
    }
}
