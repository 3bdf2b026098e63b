//! What the server does, apart from how it is asked: HTTP and gRPC call the same functions.

pub mod audit;
pub mod edge;
pub mod health;
pub mod quota;
pub mod request;
pub mod sale;
pub mod slot;
pub mod tier;

use std::time::Duration;

use weir_store::{Error, Result};

/// Waits for `call` no longer than the API's timeout; after that the caller gets an answer and the call goes on.
pub(crate) async fn within<T>(timeout: Duration, call: impl Future<Output = Result<T>>) -> Result<T> {
    match tokio::time::timeout(timeout, call).await {
        Ok(outcome) => outcome,
        Err(elapsed) => Err(Error::unavailable("store", elapsed)),
    }
}
