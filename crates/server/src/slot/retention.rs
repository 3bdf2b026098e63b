//! Deletes slots, counters and versions of configs that are older than `slot.retention`.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use weir_store::slot::SlotStore;

use super::events::{PurgeFailed, SlotsPurged};
use crate::purge;

/// Purges until `closing` is cancelled.
pub(crate) async fn purge_until(closing: CancellationToken, store: Arc<dyn SlotStore>, keep: Duration) {
    let purge = purge::run(
        keep,
        |rows| store.purge_slots(keep, rows),
        |count| SlotsPurged { count }.emit(),
        |error| PurgeFailed { error }.emit(),
    );
    closing.run_until_cancelled(purge).await;
}
