//! Who waits for which request in this process, and how they are told that it has changed.
//!
//! Whoever changes a request says so with [`StatusHub::changed`], which costs next to nothing while nobody waits for it.
//! Only those who wait take up room, and only so many may. Changes on other servers are not heard here: whoever waits
//! also asks the store from time to time.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;
use weir_core::RequestId;
use weir_core::request::state::Status;

/// How many may wait at once.
const SUBSCRIPTIONS_MAX: usize = 20_000;

/// Tells those who wait for a request that it has changed.
#[derive(Debug, Default)]
pub struct StatusHub {
    /// The channels of requests that somebody waits for.
    waited_for: Mutex<HashMap<RequestId, watch::Sender<Option<Status>>>>,
    subscriptions: AtomicUsize,
}

/// One who waits for a request. Dropped, it leaves nothing behind.
#[derive(Debug)]
pub struct Subscription {
    hub: Arc<StatusHub>,
    id: RequestId,
    receiver: watch::Receiver<Option<Status>>,
}

impl StatusHub {
    /// Listens to a request from now on. None when too many wait already.
    #[must_use]
    pub fn subscribe(self: &Arc<Self>, id: RequestId) -> Option<Subscription> {
        let mut waited_for = self.waited_for();
        if self.subscriptions.load(Ordering::Relaxed) >= SUBSCRIPTIONS_MAX {
            return None;
        }
        self.subscriptions.fetch_add(1, Ordering::Relaxed);
        let receiver = waited_for.entry(id).or_insert_with(|| watch::Sender::new(None)).subscribe();
        drop(waited_for);
        Some(Subscription { hub: Arc::clone(self), id, receiver })
    }

    /// A request has changed and stands like this now.
    pub fn changed(&self, id: RequestId, status: Status) {
        // Whoever subscribes at this very moment reads the store afterwards.
        if self.subscriptions.load(Ordering::Relaxed) == 0 {
            return;
        }
        if let Some(sender) = self.waited_for().get(&id) {
            sender.send_replace(Some(status));
        }
    }

    fn waited_for(&self) -> MutexGuard<'_, HashMap<RequestId, watch::Sender<Option<Status>>>> {
        self.waited_for.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Subscription {
    /// The request this listens to.
    #[must_use]
    pub const fn id(&self) -> RequestId {
        self.id
    }

    /// Returns when this process has changed the request since the last call, and says how it stands.
    pub async fn changed(&mut self) -> Status {
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
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let mut waited_for = self.hub.waited_for();
        self.hub.subscriptions.fetch_sub(1, Ordering::Relaxed);
        // This one's own receiver is still counted.
        if waited_for.get(&self.id).is_some_and(|sender| sender.receiver_count() <= 1) {
            waited_for.remove(&self.id);
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

    #[tokio::test]
    async fn whoever_waits_hears_of_the_last_change_of_that_request() {
        let hub = Arc::new(StatusHub::default());
        let (mut one, mut other) = (hub.subscribe(id(1)).unwrap(), hub.subscribe(id(1)).unwrap());
        hub.changed(id(2), Status::Completed);
        assert!(one.changed().now_or_never().is_none());
        hub.changed(id(1), Status::InProgress);
        hub.changed(id(1), Status::Completed);
        assert_eq!(one.changed().await, Status::Completed);
        assert_eq!(other.changed().await, Status::Completed);
        assert!(one.changed().now_or_never().is_none(), "told once");
    }

    #[test]
    fn nothing_is_left_of_those_who_have_gone() {
        let hub = Arc::new(StatusHub::default());
        hub.changed(id(1), Status::Completed);
        assert!(hub.waited_for().is_empty(), "nobody waits");
        let (one, other) = (hub.subscribe(id(1)), hub.subscribe(id(1)));
        drop(one);
        assert_eq!(hub.waited_for().len(), 1);
        drop(other);
        assert!(hub.waited_for().is_empty());
        assert_eq!(hub.subscriptions.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn only_so_many_may_wait() {
        let hub = Arc::new(StatusHub::default());
        let all: Vec<_> = (0..SUBSCRIPTIONS_MAX).map(|_| hub.subscribe(id(1)).unwrap()).collect();
        assert!(hub.subscribe(id(2)).is_none());
        drop(all);
        assert!(hub.subscribe(id(2)).is_some());
    }
}
