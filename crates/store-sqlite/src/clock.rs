//! What the engine does when the clock of this machine has been set back.

use async_trait::async_trait;
use rusqlite::{Connection, params};
use weir_core::Timestamp;
use weir_store::clock::StepDetector;
use weir_store::{Result, StoreClock};

use crate::Sqlite;

/// Messages that were put off while the clock was ahead of `?1`.
const BRING_BACK_MESSAGES: &str = "
    UPDATE queue_message SET delayed_until = max(delayed_until - (delayed_at - ?1), ?1), delayed_at = ?1
    WHERE delayed_at > ?1";
/// Requests that were accepted, leased or put off then.
const BRING_BACK_REQUESTS: &str = "
    UPDATE request_record SET claimable_at = max(claimable_at - (updated_at - ?1), ?1), updated_at = ?1
    WHERE claimable_at > ?1 AND updated_at > ?1";

#[async_trait]
impl StoreClock for Sqlite {
    async fn time(&self) -> Result<Timestamp> {
        Ok(self.inner.clock.now())
    }

    async fn bring_back_waiting(&self) -> Result<u64> {
        let clock = self.clock();
        let bring_back = move |connection: &Connection| {
            let now = clock.now().as_micros();
            let messages = connection.execute(BRING_BACK_MESSAGES, params![now])?;
            let requests = connection.execute(BRING_BACK_REQUESTS, params![now])?;
            Ok(messages.saturating_add(requests) as u64)
        };
        self.inner.writer.run(bring_back).await
    }

    fn steps(&self) -> Option<&StepDetector> {
        None
    }
}
