//! What the server does, apart from how it is asked: HTTP and gRPC call the same functions.

pub(crate) mod address_limits;
pub(crate) mod audit;
pub(crate) mod clocks;
pub(crate) mod health;
pub(crate) mod quota;
pub(crate) mod request;
pub(crate) mod sale;
pub(crate) mod slot;
pub(crate) mod tier;

use std::time::Duration;

use weir_store::{Error, Result};

/// Waits for `call` no longer than the API's timeout; after that the caller gets an answer and the call goes on.
pub(crate) async fn within<T>(timeout: Duration, call: impl Future<Output = Result<T>>) -> Result<T> {
    match tokio::time::timeout(timeout, call).await {
        Ok(outcome) => outcome,
        Err(elapsed) => Err(Error::unavailable("store", elapsed)),
    }
}
