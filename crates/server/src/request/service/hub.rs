//! Who waits for which request in this process, and how they are told that it has changed.
//!
//! Whoever changes a request says so with [`StatusHub::changed`], which costs next to nothing while nobody waits for it.
//! Only those who wait take up room, and only so many may. Changes on other servers are not heard here: where there may be
//! any, whoever waits also asks the store from time to time.
//!
//! A tenant may have as many places as are left over: alone it gets half of them, with another a third, and so on. So
//! however many one takes, the next finds some.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio::sync::watch;
use weir_core::request::state::RequestStatus;
use weir_core::{RequestId, TenantId};

/// How many may wait at once.
pub(crate) const SUBSCRIPTIONS_MAX: usize = 20_000;

/// Tells those who wait for a request that it has changed.
#[derive(Debug, Default)]
pub struct StatusHub {
    waiting: Mutex<Waiting>,
    subscriptions: AtomicUsize,
}

#[derive(Debug, Default)]
struct Waiting {
    /// The channels of requests that somebody waits for.
    requests: HashMap<RequestId, watch::Sender<Option<RequestStatus>>>,
    /// How many callers of each tenant wait. No tenant has none.
    tenants: HashMap<TenantId, usize>,
}

/// Why somebody may not wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoPlace {
    /// All places are taken.
    #[error(
        "All {SUBSCRIPTIONS_MAX} places for callers that wait for changes are taken; ask without waiting, or again later"
    )]
    AllTaken,
    /// The tenant has its share of them.
    #[error(
        "{waiting} callers of your tenant wait for changes already, which is its share of the server's {SUBSCRIPTIONS_MAX} \
         places; ask without waiting, or end some of them"
    )]
    ShareTaken {
        /// How many of its callers wait.
        waiting: usize,
    },
}

/// One who waits for a request. Dropped, it leaves nothing behind.
#[derive(Debug)]
pub struct Subscription {
    hub: Arc<StatusHub>,
    id: RequestId,
    tenant: TenantId,
    receiver: watch::Receiver<Option<RequestStatus>>,
}

impl StatusHub {
    /// Listens to a request from now on, on behalf of a tenant.
    /// Fails when too many wait already, of all tenants or of this one.
    pub fn subscribe(self: &Arc<Self>, id: RequestId, tenant: &TenantId) -> Result<Subscription, NoPlace> {
        let mut waiting = self.waiting.lock();
        let left = SUBSCRIPTIONS_MAX.saturating_sub(self.subscriptions.load(Ordering::Relaxed));
        if left == 0 {
            return Err(NoPlace::AllTaken);
        }
        let of_tenant = waiting.tenants.get(tenant).copied().unwrap_or_default();
        if of_tenant >= left {
            return Err(NoPlace::ShareTaken { waiting: of_tenant });
        }
        waiting.tenants.insert(tenant.clone(), of_tenant + 1);
        self.subscriptions.fetch_add(1, Ordering::Relaxed);
        let receiver = waiting.requests.entry(id).or_insert_with(|| watch::Sender::new(None)).subscribe();
        drop(waiting);
        Ok(Subscription { hub: Arc::clone(self), id, tenant: tenant.clone(), receiver })
    }

    /// A request has changed and stands like this now.
    pub fn changed(&self, id: RequestId, status: RequestStatus) {
        // Whoever subscribes at this very moment reads the store afterwards.
        if self.subscriptions.load(Ordering::Relaxed) == 0 {
            return;
        }
        if let Some(sender) = self.waiting.lock().requests.get(&id) {
            sender.send_replace(Some(status));
        }
    }
}

impl Subscription {
    /// The request this listens to.
    #[must_use]
    pub const fn id(&self) -> RequestId {
        self.id
    }

    /// Returns when this process has changed the request since the last call, and says how it stands.
    pub async fn changed(&mut self) -> RequestStatus {
        loop {
            if self.receiver.changed().await.is_err() {
                // The sender stays for as long as this is there.
                std::future::pending::<()>().await;
            }
            if let Some(status) = *self.receiver.borrow_and_update() {
                return status;
            }
        }
    }

    /// Lets [`Subscription::changed`] return once more with what was told last: it could not be looked up.
    pub fn tell_again(&mut self) {
        self.receiver.mark_changed();
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let mut waiting = self.hub.waiting.lock();
        self.hub.subscriptions.fetch_sub(1, Ordering::Relaxed);
        // This one's own receiver is still counted.
        if waiting.requests.get(&self.id).is_some_and(|sender| sender.receiver_count() <= 1) {
            waiting.requests.remove(&self.id);
        }
        if let Some(of_tenant) = waiting.tenants.get_mut(&self.tenant) {
            *of_tenant -= 1;
            if *of_tenant == 0 {
                waiting.tenants.remove(&self.tenant);
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
    async fn whoever_waits_hears_of_the_last_change_of_that_request() {
        let hub = Arc::new(StatusHub::default());
        let subscribe = || hub.subscribe(id(1), &tenant(1)).unwrap();
        let (mut one, mut other) = (subscribe(), subscribe());
        hub.changed(id(2), RequestStatus::Completed);
        assert!(one.changed().now_or_never().is_none());
        hub.changed(id(1), RequestStatus::InProgress);
        hub.changed(id(1), RequestStatus::Completed);
        assert_eq!(one.changed().await, RequestStatus::Completed);
        assert_eq!(other.changed().await, RequestStatus::Completed);
        assert!(one.changed().now_or_never().is_none(), "told once");
        one.tell_again();
        assert_eq!(one.changed().await, RequestStatus::Completed, "and again when that is asked for");
    }

    #[test]
    fn nothing_is_left_of_those_who_have_gone() {
        let hub = Arc::new(StatusHub::default());
        hub.changed(id(1), RequestStatus::Completed);
        assert!(hub.waiting.lock().requests.is_empty(), "nobody waits");
        let (one, other) = (hub.subscribe(id(1), &tenant(1)), hub.subscribe(id(1), &tenant(1)));
        drop(one);
        let sizes = || {
            let waiting = hub.waiting.lock();
            (waiting.requests.len(), waiting.tenants.len())
        };
        assert_eq!(sizes(), (1, 1));
        drop(other);
        assert_eq!(sizes(), (0, 0));
        assert_eq!(hub.subscriptions.load(Ordering::Relaxed), 0);
    }

    /// Takes places for a tenant until it is refused.
    fn take_all(hub: &Arc<StatusHub>, tenant: &TenantId) -> (Vec<Subscription>, NoPlace) {
        let mut taken = Vec::new();
        loop {
            match hub.subscribe(id(1), tenant) {
                Ok(subscription) => taken.push(subscription),
                Err(refused) => return (taken, refused),
            }
        }
    }

    #[test]
    fn a_tenant_leaves_places_to_the_others_however_many_it_wants() {
        let hub = Arc::new(StatusHub::default());
        let (first, refused) = take_all(&hub, &tenant(1));
        assert_eq!(first.len(), SUBSCRIPTIONS_MAX / 2);
        assert_eq!(refused, NoPlace::ShareTaken { waiting: SUBSCRIPTIONS_MAX / 2 });
        assert!(refused.to_string().contains("10000 callers of your tenant"), "{refused}");
        let (second, _) = take_all(&hub, &tenant(2));
        assert_eq!(second.len(), SUBSCRIPTIONS_MAX / 4);
        drop(first);
        assert!(hub.subscribe(id(2), &tenant(1)).is_ok());
    }

    #[test]
    fn only_so_many_may_wait() {
        let hub = Arc::new(StatusHub::default());
        let mut all = Vec::new();
        // Each tenant takes half of what is left; the last place goes to the last.
        for n in 0..SUBSCRIPTIONS_MAX {
            let (taken, refused) = take_all(&hub, &tenant(n));
            all.extend(taken);
            if refused == NoPlace::AllTaken {
                break;
            }
        }
        assert_eq!(all.len(), SUBSCRIPTIONS_MAX);
        assert_eq!(hub.subscribe(id(2), &tenant(0)).unwrap_err(), NoPlace::AllTaken);
        drop(all);
        assert!(hub.subscribe(id(2), &tenant(0)).is_ok());
    }
}
