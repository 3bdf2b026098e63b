//! Processing of requests: workers that call downstreams, outgoing webhooks, and maintenance of stored requests.
//!
//! A [`Worker`] claims jobs in batches, calls downstreams concurrently, and reports in batches. A job's lease decides who may
//! work on a request: the store ignores the report of a worker that lost its lease. Whatever happens to a worker, its requests
//! are claimed again when their leases end.

pub(super) mod call;
mod concurrency;
mod downstream;
mod limits;
pub(crate) mod maintenance;
mod reports;
pub(crate) mod webhooks;
mod worker;

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use weir_core::request::state::RequestStatus;
use weir_core::{Clock, RequestId};
use weir_queue::MessageSource;
use weir_store::request::RequestStore;

pub(crate) use self::worker::Worker;
use super::encryption::Keyring;
use super::settings::RequestSettings;
use super::stored_form::StoredForm;
use crate::auth::webhook::WebhookSecret;
use crate::request::metrics::WorkMetrics;

/// Called with every change of a request that workers make, after it is on disk. Must not block.
pub(crate) type OnChange = Arc<dyn Fn(RequestId, RequestStatus) + Send + Sync>;

/// Returns whether something is enabled now.
pub(crate) type EnabledCheck = Arc<dyn Fn() -> BoxFuture<'static, bool> + Send + Sync>;

/// What a [`Worker`] needs.
#[derive(Clone)]
pub(crate) struct WorkerDependencies {
    pub store: Arc<dyn RequestStore>,
    /// Ids of new requests from a broker; `None` if workers only poll the store.
    pub source: Option<Arc<dyn MessageSource>>,
    pub keyring: Arc<Keyring>,
    pub form: Arc<StoredForm>,
    /// The clock of the breakers. It must not step.
    pub clock: Arc<dyn Clock>,
    /// Signs calls to downstreams that want that, at the time of `wall_clock`.
    pub secret: WebhookSecret,
    pub wall_clock: Arc<dyn Clock>,
    pub settings: RequestSettings,
    pub metrics: WorkMetrics,
    /// `request.processing.enabled`, as it is now.
    pub is_enabled: EnabledCheck,
    pub on_change: OnChange,
    /// How long running calls may take to finish when the server stops.
    pub grace: Duration,
}

#[cfg(test)]
mod tests;
