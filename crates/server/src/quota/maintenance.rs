//! Deletes idempotency keys of sends that have expired, in small batches, beside all other work.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use weir_store::quota::QuotaStore;

use super::events::{KeysPurgeFailed, KeysPurged};
use super::metrics::QuotaMetrics;

/// Keys of one commit.
const BATCH: usize = 1_000;
/// The pause after a full batch, in which sends get at the store.
const PAUSE: Duration = Duration::from_millis(50);
const PAUSE_WHEN_CLEAN: Duration = Duration::from_secs(60);
const PAUSE_AFTER_ERROR: Duration = Duration::from_secs(5);

pub(crate) struct KeyPurge {
    pub(crate) store: Arc<dyn QuotaStore>,
    pub(crate) metrics: QuotaMetrics,
}

impl KeyPurge {
    /// Runs until `closing` is cancelled, which drops a call: what it has deleted stays deleted.
    pub(crate) async fn run(self, closing: CancellationToken) {
        closing.run_until_cancelled(self.purge()).await;
    }

    async fn purge(&self) {
        let mut is_working = true;
        loop {
            let outcome = self.store.purge_keys(BATCH).await;
            if let Err(error) = &outcome
                && is_working
            {
                KeysPurgeFailed { error }.emit();
            }
            is_working = outcome.is_ok();
            let pause = match outcome {
                Ok(purged) => {
                    KeysPurged { count: purged }.emit(&self.metrics);
                    if purged >= BATCH { PAUSE } else { PAUSE_WHEN_CLEAN }
                }
                Err(_) => PAUSE_AFTER_ERROR,
            };
            tokio::time::sleep(pause).await;
        }
    }
}
