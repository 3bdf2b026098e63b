//! The audit: counts of every capability, which balance when everything accepted is in exactly one place.
//!
//! A small store is read whole. A large one is not: its own counts of its rows are compared with the ledgers, and what only the
//! rows can tell is that of the last recount.

use weir_queue::QueueAudit;
use weir_store::book::{Books, Recount};
use weir_store::{Result, quota, request, sale, slot, tier};

use crate::engines::{Engines, within};
use crate::settings::Settings;

/// The counts of every capability.
#[derive(Clone, Debug)]
pub(crate) struct Audit {
    pub quota: quota::QuotaAudit,
    /// Messages that quota accepted.
    pub quota_messages: QueueAudit,
    pub slot: slot::SlotAudit,
    /// Slots published on the store's own queue; `None` if they are not dispatched or are on Kafka.
    pub slot_messages: Option<QueueAudit>,
    pub request: request::RequestAudit,
    pub request_webhooks: QueueAudit,
    pub tier: tier::HoldAudit,
    /// Keys with spending in this server's memory, and how many of them are not saved yet.
    pub tier_keys: [usize; 2],
    pub sale: sale::SaleAudit,
    /// Whether all rows were read for this audit.
    pub is_of_rows: bool,
    pub recount: Option<Recount>,
}

impl Audit {
    /// Reads the books, from rows if there are few.
    pub(crate) async fn read(
        engines: &Engines,
        settings: &Settings,
        limits: tier::LimitStatus,
    ) -> Result<Self> {
        let timeout = settings.http.timeout;
        let recount = within(timeout, engines.store.books.last_recount()).await?;
        match within(timeout, engines.store.books.books()).await? {
            Some(books) if books.rows() > settings.audit.rows_max => {
                Self::of_counts(engines, settings, limits, &books, recount).await
            }
            _ => Self::of_rows(engines, settings, limits, recount).await,
        }
    }

    async fn of_counts(
        engines: &Engines,
        settings: &Settings,
        limits: tier::LimitStatus,
        books: &Books,
        recount: Option<Recount>,
    ) -> Result<Self> {
        let timeout = settings.http.timeout;
        let over_limit = recount.as_ref().map(|recount| recount.named("quota")).unwrap_or_default();
        Ok(Self {
            quota: quota::QuotaAudit { users: books.total("rate_limit_store"), over_limit },
            quota_messages: QueueAudit::from_books(books, quota::TOPIC),
            slot: books.slots(recount.as_ref()),
            slot_messages: dispatch_topic(engines, settings)
                .map(|topic| QueueAudit::from_books(books, topic)),
            request: books.requests(),
            request_webhooks: QueueAudit::from_books(books, request::WEBHOOKS_TOPIC),
            tier: within(timeout, engines.store.tiers.audit_holds()).await?,
            tier_keys: [limits.keys, limits.unsaved],
            sale: within(timeout, engines.sales().complete_books(books.sales())).await?,
            is_of_rows: false,
            recount,
        })
    }

    async fn of_rows(
        engines: &Engines,
        settings: &Settings,
        limits: tier::LimitStatus,
        recount: Option<Recount>,
    ) -> Result<Self> {
        let (quota_store, queue) = (&engines.store.quota, &engines.store.queue);
        let timeout = settings.http.timeout;
        let slot_messages = match dispatch_topic(engines, settings) {
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
            is_of_rows: true,
            recount,
        })
    }

    /// Whether all counts balance and nobody is over a limit, and the last recount found nothing that was not read again.
    #[must_use]
    pub(crate) fn is_balanced(&self) -> bool {
        let slots_match = self.slot.slots == self.slot.counted && self.slot.different.is_empty();
        let requests_match = self.request.difference() == 0 && self.request.jobs == self.request.in_flight;
        let queues = [Some(self.quota_messages), self.slot_messages, Some(self.request_webhooks)];
        let messages_match = queues.iter().flatten().all(|books| books.difference() == 0);
        let sales_match = self.sale.sold == self.sale.persisted && self.sale.different.is_empty();
        let tier::HoldAudit { holds, open, settled, expired, .. } = self.tier;
        let holds_match = holds == open + settled + expired;
        let recount_matches =
            self.is_of_rows || self.recount.as_ref().is_none_or(|recount| recount.differences.is_empty());
        self.quota.over_limit.is_empty()
            && holds_match
            && messages_match
            && slots_match
            && requests_match
            && sales_match
            && recount_matches
    }
}

/// The topic of the store's own queue on which slots are published.
fn dispatch_topic<'a>(engines: &Engines, settings: &'a Settings) -> Option<&'a str> {
    settings.slot.dispatch_topic.as_deref().filter(|_| engines.kafka.is_none())
}
