//! The audit: counts of every capability, which balance when everything accepted is in exactly one place.

use weir_store::{Result, quota, request, sale, slot, tier};

use crate::engines::{Engines, within};
use crate::settings::Settings;

/// The counts of every capability.
#[derive(Clone, Debug)]
pub(crate) struct Audit {
    pub quota: quota::QuotaAudit,
    /// Messages that quota accepted.
    pub quota_messages: weir_queue::QueueAudit,
    pub slot: slot::SlotAudit,
    /// Slots published on the store's own queue; `None` if they are not dispatched or are on Kafka.
    pub slot_messages: Option<weir_queue::QueueAudit>,
    pub request: request::RequestAudit,
    pub request_webhooks: weir_queue::QueueAudit,
    pub tier: tier::HoldAudit,
    /// Keys with spending in this server's memory, and how many of them are not saved yet.
    pub tier_keys: [usize; 2],
    pub sale: sale::SaleAudit,
}

impl Audit {
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

    /// Whether all counts balance and nobody is over a limit.
    #[must_use]
    pub(crate) fn is_balanced(&self) -> bool {
        let slots_match = self.slot.slots == self.slot.counted && self.slot.different.is_empty();
        let requests_match = self.request.difference() == 0 && self.request.jobs == self.request.in_flight;
        let queues = [Some(self.quota_messages), self.slot_messages, Some(self.request_webhooks)];
        let messages_match = queues.iter().flatten().all(|books| books.difference() == 0);
        let sales_match = self.sale.sold == self.sale.persisted && self.sale.different.is_empty();
        let tier::HoldAudit { holds, open, settled, expired, .. } = self.tier;
        let holds_match = holds == open + settled + expired;
        self.quota.over_limit.is_empty()
            && holds_match
            && messages_match
            && slots_match
            && requests_match
            && sales_match
    }
}
