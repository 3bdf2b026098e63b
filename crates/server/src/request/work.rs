//! The work on requests: workers that call downstreams, webhooks that tell of what came of it, and the upkeep of what is
//! kept.
//!
//! A [`Worker`] claims jobs in batches, calls downstreams side by side, and reports in batches. The store has the last
//! word: a lease says who may work on a request, and a report of somebody who lost it changes nothing. Whatever happens
//! to a worker, its requests are claimed again when their leases end.

mod breakers;
mod call;
mod concurrency;
mod downstream;
mod reports;
pub(crate) mod upkeep;
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
use crate::request::metrics::WorkMetrics;

/// Is told of every change of a request that the work brings about, after it is on disk. It must not block.
pub(crate) type OnChange = Arc<dyn Fn(RequestId, RequestStatus) + Send + Sync>;

/// Says whether something is switched on at present.
pub(crate) type Switch = Arc<dyn Fn() -> BoxFuture<'static, bool> + Send + Sync>;

/// What a [`Worker`] works with.
#[derive(Clone)]
pub(crate) struct Parts {
    /// Where requests live.
    pub store: Arc<dyn RequestStore>,
    /// Where a broker says which of them to do; none when the store alone does.
    pub source: Option<Arc<dyn MessageSource>>,
    /// What payloads are opened and results are sealed with.
    pub keyring: Arc<Keyring>,
    /// By which breakers tell how long they have been open. It must not step.
    pub clock: Arc<dyn Clock>,
    /// How requests are worked on.
    pub settings: RequestSettings,
    /// How the work goes.
    pub metrics: WorkMetrics,
    /// Whether requests are worked on: `request.processing.enabled`, as it is now.
    pub is_enabled: Switch,
    /// Who is told of changes.
    pub on_change: OnChange,
    /// How long calls that are under way may go on when the server stops.
    pub grace: Duration,
}

#[cfg(test)]
mod tests;
