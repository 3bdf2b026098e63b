//! The health checks of an engine: whether it answers and accepts writes.

use async_trait::async_trait;

use crate::Result;

#[async_trait]
pub trait StoreHealth: Send + Sync {
    /// Fails if the engine does not answer.
    async fn ping(&self) -> Result<()>;

    /// Why the engine accepts no writes, if this process knows without a round trip; `None` while it accepts them.
    fn storage_problem(&self) -> Option<&'static str> {
        None
    }
}
