//! The books. Every capability adds its own; they balance when everything accepted is in exactly one place.

use weir_store::{Result, quota, request, sale, slot, tier};

use crate::engines::{Engines, within};
use crate::settings::Settings;

/// The books of every capability.
#[derive(Clone, Debug)]
pub(crate) struct Audit {
    /// Quota rows.
    pub quota: quota::QuotaAudit,
    /// The messages quota accepted.
    pub quota_messages: weir_queue::QueueAudit,
    /// Slots and their windows.
    pub slot: slot::SlotAudit,
    /// The slots that were dispatched on the store's own queue, if they are.
    pub slot_messages: Option<weir_queue::QueueAudit>,
    /// Requests and their jobs.
    pub request: request::RequestAudit,
    /// The webhooks that tell of their ends.
    pub request_webhooks: weir_queue::QueueAudit,
    /// Holds of tier.
    pub tier: tier::HoldAudit,
    /// Keys that have spent something, and those of them whose last change is not kept yet, as this server knows them.
    pub tier_keys: [usize; 2],
    /// Products and their purchases.
    pub sale: sale::SaleAudit,
}

impl Audit {
    /// Reads the books.
    pub(crate) async fn read(
        engines: &Engines,
        settings: &Settings,
        limits: tier::LimitStatus,
    ) -> Result<Self> {
        let (quota_store, queue) = (&engines.store.quota, &engines.store.queue);
        let timeout = settings.http.timeout;
        let dispatched = settings.slot.dispatch_topic.as_deref().filter(|_| engines.kafka.is_none());
        let slot_messages = match dispatched {
            Some(topic) => Some(within(timeout, queue.audit(topic)).await?),
            None => None,
        };
        Ok(Self {
            quota: within(timeout, quota_store.audit()).await?,
            quota_messages: within(timeout, queue.audit(quota::TOPIC)).await?,
            slot: within(timeout, engines.store.slots.audit_slots()).await?,
            slot_messages,
            request: within(timeout, engines.store.requests.audit_requests()).await?,
            request_webhooks: within(timeout, queue.audit(request::WEBHOOKS_TOPIC)).await?,
            tier: within(timeout, engines.store.tiers.audit_holds()).await?,
            tier_keys: [limits.keys, limits.unsaved],
            sale: within(timeout, engines.sales().audit_sales()).await?,
        })
    }

    /// Whether they balance.
    #[must_use]
    pub(crate) fn balance(&self) -> bool {
        let slots_are_counted = self.slot.slots == self.slot.counted && self.slot.different.is_empty();
        let requests_are_there =
            self.request.difference() == 0 && self.request.jobs == self.request.in_flight;
        let queues = [Some(self.quota_messages), self.slot_messages, Some(self.request_webhooks)];
        let messages_are_there = queues.iter().flatten().all(|books| books.difference() == 0);
        let sales_are_written = self.sale.sold == self.sale.persisted && self.sale.different.is_empty();
        let tier::HoldAudit { holds, open, settled, expired, .. } = self.tier;
        let holds_are_there = holds == open + settled + expired;
        self.quota.over_limit.is_empty()
            && holds_are_there
            && messages_are_there
            && slots_are_counted
            && requests_are_there
            && sales_are_written
    }
}
