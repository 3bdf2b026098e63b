//! Notifies callers in this process of changes of the requests they wait for.
//!
//! Code that changes a request calls [`StatusHub::publish`], which costs next to nothing without subscribers. Memory is used
//! only for subscriptions, and their number is bounded. Changes on other servers are not published here: where there may be
//! any, subscribers also poll the store.
//!
//! A tenant may have as many subscriptions as are left over: one tenant gets half of all, a second one a third, and so on. So
//! there are always some left for another tenant.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio::sync::watch;
use weir_core::request::state::RequestStatus;
use weir_core::{RequestId, TenantId};

/// The most subscriptions at once.
pub(crate) const SUBSCRIPTIONS_MAX: usize = 20_000;

/// Publishes changes of requests to subscribers.
#[derive(Debug, Default)]
pub struct StatusHub {
    subscribers: Mutex<Subscribers>,
    subscriptions: AtomicUsize,
}

#[derive(Debug, Default)]
struct Subscribers {
    /// The channels of requests with subscribers.
    requests: HashMap<RequestId, watch::Sender<Option<RequestStatus>>>,
    /// How many subscriptions each tenant has, never 0.
    tenants: HashMap<TenantId, usize>,
}

/// Why a caller may not subscribe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubscribeError {
    #[error(
        "{SUBSCRIPTIONS_MAX} callers already wait for changes, which is the most; ask without waiting, or again later"
    )]
    HubFull,
    #[error(
        "{subscriptions} callers of your tenant already wait for changes, which is its share of the server's \
         {SUBSCRIPTIONS_MAX}; ask without waiting, or end some of them"
    )]
    TenantShareUsed { subscriptions: usize },
}

/// A caller's subscription to one request. Ends when it is dropped.
#[derive(Debug)]
pub struct StatusSubscription {
    hub: Arc<StatusHub>,
    id: RequestId,
    tenant: TenantId,
    receiver: watch::Receiver<Option<RequestStatus>>,
}

impl StatusHub {
    /// Subscribes a caller of a tenant to a request.
    /// Fails when there are too many subscriptions, of all tenants or of this one.
    pub fn subscribe(
        self: &Arc<Self>,
        id: RequestId,
        tenant: &TenantId,
    ) -> Result<StatusSubscription, SubscribeError> {
        let mut subscribers = self.subscribers.lock();
        let left = SUBSCRIPTIONS_MAX.saturating_sub(self.subscriptions.load(Ordering::Relaxed));
        if left == 0 {
            return Err(SubscribeError::HubFull);
        }
        let of_tenant = subscribers.tenants.get(tenant).copied().unwrap_or_default();
        if of_tenant >= left {
            return Err(SubscribeError::TenantShareUsed { subscriptions: of_tenant });
        }
        subscribers.tenants.insert(tenant.clone(), of_tenant + 1);
        self.subscriptions.fetch_add(1, Ordering::Relaxed);
        let receiver = subscribers.requests.entry(id).or_insert_with(|| watch::Sender::new(None)).subscribe();
        drop(subscribers);
        Ok(StatusSubscription { hub: Arc::clone(self), id, tenant: tenant.clone(), receiver })
    }

    /// Publishes the new status of a request.
    pub fn publish(&self, id: RequestId, status: RequestStatus) {
        // A caller that subscribes at this moment reads the store after that.
        if self.subscriptions.load(Ordering::Relaxed) == 0 {
            return;
        }
        if let Some(sender) = self.subscribers.lock().requests.get(&id) {
            sender.send_replace(Some(status));
        }
    }
}

impl StatusSubscription {
    #[must_use]
    pub const fn id(&self) -> RequestId {
        self.id
    }

    /// Waits until this process changes the request, and returns its status.
    pub async fn next_status(&mut self) -> RequestStatus {
        loop {
            if self.receiver.changed().await.is_err() {
                // Unreachable: the hub keeps the sender for as long as there is a receiver.
                std::future::pending::<()>().await;
            }
            if let Some(status) = *self.receiver.borrow_and_update() {
                return status;
            }
        }
    }

    /// Makes [`StatusSubscription::next_status`] return the last status once more.
    pub fn mark_unread(&mut self) {
        self.receiver.mark_changed();
    }
}

impl Drop for StatusSubscription {
    fn drop(&mut self) {
        let mut subscribers = self.hub.subscribers.lock();
        self.hub.subscriptions.fetch_sub(1, Ordering::Relaxed);
        // The receiver of this subscription is still counted.
        if subscribers.requests.get(&self.id).is_some_and(|sender| sender.receiver_count() <= 1) {
            subscribers.requests.remove(&self.id);
        }
        if let Some(of_tenant) = subscribers.tenants.get_mut(&self.tenant) {
            *of_tenant -= 1;
            if *of_tenant == 0 {
                subscribers.tenants.remove(&self.tenant);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use weir_core::Timestamp;

    use super::*;

    fn id(n: u8) -> RequestId {
        RequestId::new(Timestamp::from_seconds(1), [n; 10])
    }

    fn tenant(n: usize) -> TenantId {
        TenantId::parse(format!("tenant-{n}")).unwrap()
    }

    #[tokio::test]
    async fn a_subscriber_gets_the_last_change_of_its_request() {
        let hub = Arc::new(StatusHub::default());
        let subscribe = || hub.subscribe(id(1), &tenant(1)).unwrap();
        let (mut one, mut other) = (subscribe(), subscribe());
        hub.publish(id(2), RequestStatus::Completed);
        assert!(one.next_status().now_or_never().is_none());
        hub.publish(id(1), RequestStatus::InProgress);
        hub.publish(id(1), RequestStatus::Completed);
        assert_eq!(one.next_status().await, RequestStatus::Completed);
        assert_eq!(other.next_status().await, RequestStatus::Completed);
        assert!(one.next_status().now_or_never().is_none(), "each change is returned once");
        one.mark_unread();
        assert_eq!(
            one.next_status().await,
            RequestStatus::Completed,
            "and once more after it was marked unread"
        );
    }

    #[test]
    fn dropped_subscriptions_leave_nothing_behind() {
        let hub = Arc::new(StatusHub::default());
        hub.publish(id(1), RequestStatus::Completed);
        assert!(hub.subscribers.lock().requests.is_empty(), "nobody has subscribed");
        let (one, other) = (hub.subscribe(id(1), &tenant(1)), hub.subscribe(id(1), &tenant(1)));
        drop(one);
        let sizes = || {
            let subscribers = hub.subscribers.lock();
            (subscribers.requests.len(), subscribers.tenants.len())
        };
        assert_eq!(sizes(), (1, 1));
        drop(other);
        assert_eq!(sizes(), (0, 0));
        assert_eq!(hub.subscriptions.load(Ordering::Relaxed), 0);
    }

    /// Subscribes for a tenant until it is refused.
    fn subscribe_all(hub: &Arc<StatusHub>, tenant: &TenantId) -> (Vec<StatusSubscription>, SubscribeError) {
        let mut subscriptions = Vec::new();
        loop {
            match hub.subscribe(id(1), tenant) {
                Ok(subscription) => subscriptions.push(subscription),
                Err(error) => return (subscriptions, error),
            }
        }
    }

    #[test]
    fn one_tenant_leaves_subscriptions_for_others() {
        let hub = Arc::new(StatusHub::default());
        let (first, refused) = subscribe_all(&hub, &tenant(1));
        assert_eq!(first.len(), SUBSCRIPTIONS_MAX / 2);
        assert_eq!(refused, SubscribeError::TenantShareUsed { subscriptions: SUBSCRIPTIONS_MAX / 2 });
        assert!(refused.to_string().contains("10000 callers of your tenant"), "{refused}");
        let (second, _) = subscribe_all(&hub, &tenant(2));
        assert_eq!(second.len(), SUBSCRIPTIONS_MAX / 4);
        drop(first);
        assert!(hub.subscribe(id(2), &tenant(1)).is_ok());
    }

    #[test]
    fn there_are_no_more_subscriptions_than_the_bound() {
        let hub = Arc::new(StatusHub::default());
        let mut all = Vec::new();
        // Each tenant takes half of what is left, the last tenant the last one.
        for n in 0..SUBSCRIPTIONS_MAX {
            let (taken, refused) = subscribe_all(&hub, &tenant(n));
            all.extend(taken);
            if refused == SubscribeError::HubFull {
                break;
            }
        }
        assert_eq!(all.len(), SUBSCRIPTIONS_MAX);
        assert_eq!(hub.subscribe(id(2), &tenant(0)).unwrap_err(), SubscribeError::HubFull);
        drop(all);
        assert!(hub.subscribe(id(2), &tenant(0)).is_ok());
    }
}
