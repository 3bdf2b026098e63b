//! The books. Every capability adds its own; they balance when everything accepted is in exactly one place.

use std::time::Duration;

use weir_store::{Result, quota, request, slot};

use super::within;
use crate::engine::Engines;

/// The books of every capability.
#[derive(Clone, Debug)]
pub struct Books {
    /// Quota rows.
    pub quota: quota::Books,
    /// The messages quota accepted.
    pub quota_messages: weir_queue::Books,
    /// Slots and their windows.
    pub slot: slot::Books,
    /// Requests and their jobs.
    pub request: request::Books,
}

impl Books {
    /// Reads the books.
    ///
    /// # Errors
    /// When the store cannot say.
    pub async fn read(engines: &Engines, timeout: Duration) -> Result<Self> {
        let (quota_store, queue) = (engines.quota(), engines.store.queue());
        Ok(Self {
            quota: within(timeout, quota_store.audit()).await?,
            quota_messages: within(timeout, queue.audit(quota::TOPIC)).await?,
            slot: within(timeout, engines.store.slots().audit_slots()).await?,
            request: within(timeout, engines.store.requests().audit_requests()).await?,
        })
    }

    /// Whether they balance.
    #[must_use]
    pub fn balance(&self) -> bool {
        let slots_are_counted = self.slot.slots == self.slot.counted && self.slot.different.is_empty();
        let requests_are_there =
            self.request.difference() == 0 && self.request.jobs == self.request.in_flight;
        self.quota.over_limit.is_empty()
            && self.quota_messages.difference() == 0
            && slots_are_counted
            && requests_are_there
    }
}
