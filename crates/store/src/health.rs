//! Whether an engine answers, and takes what is written to it.

use async_trait::async_trait;

use crate::Result;

/// What health checks ask of an engine.
#[async_trait]
pub trait StoreHealth: Send + Sync {
    /// Makes sure that the engine answers.
    async fn ping(&self) -> Result<()>;

    /// Why the engine takes no writes, where this process knows without asking; `None` while it does.
    fn storage_problem(&self) -> Option<&'static str> {
        None
    }
}
