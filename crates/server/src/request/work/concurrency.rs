//! Bounds concurrent calls: one worker has `request.concurrency` permits. A few are reserved for each downstream, so that a
//! slow one cannot take all of them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use weir_store::request::DownstreamCapacity;

/// The permits of one worker.
#[derive(Debug)]
pub(super) struct ConcurrencyPermits {
    total: usize,
    used: Mutex<Used>,
    released: Notify,
}

#[derive(Debug, Default)]
struct Used {
    all: usize,
    by_downstream: HashMap<String, usize>,
}

/// A permit in use. Released when dropped.
#[derive(Debug)]
pub(super) struct ConcurrencyPermit {
    permits: Arc<ConcurrencyPermits>,
    downstream: String,
}

impl ConcurrencyPermits {
    pub(super) fn new(total: usize) -> Arc<Self> {
        Arc::new(Self { total, used: Mutex::default(), released: Notify::new() })
    }

    /// How many permits are not in use.
    pub(super) fn available(&self) -> usize {
        self.total.saturating_sub(self.used.lock().all)
    }

    /// How many permits the calls to a downstream have.
    pub(super) fn used_by(&self, downstream: &str) -> usize {
        self.used.lock().by_downstream.get(downstream).copied().unwrap_or_default()
    }

    /// Takes a permit, without a check: jobs are claimed only within [`ConcurrencyPermits::capacity`], but a broker may name
    /// more jobs of one downstream than its share.
    pub(super) fn take(self: &Arc<Self>, downstream: &str) -> ConcurrencyPermit {
        let mut used = self.used.lock();
        used.all += 1;
        *used.by_downstream.entry(downstream.to_owned()).or_default() += 1;
        ConcurrencyPermit { permits: Arc::clone(self), downstream: downstream.to_owned() }
    }

    /// Waits until a permit was released since the last call.
    pub(super) async fn wait_for_release(&self) {
        self.released.notified().await;
    }

    /// Waits until a quarter of all permits is available, so that one claim uses many, but at most for this time.
    pub(super) async fn wait_for_several(&self, at_most: Duration) {
        let enough = async {
            while self.available() < self.total / 4 {
                self.wait_for_release().await;
            }
        };
        let _ = tokio::time::timeout(at_most, enough).await;
    }

    /// How many jobs to claim for each downstream. `downstreams` has the number of calls that each breaker allows. The first
    /// downstream to be served changes with `turn`.
    pub(super) fn capacity(&self, downstreams: &[(&str, usize)], turn: usize) -> Vec<DownstreamCapacity> {
        let used = self.used.lock();
        let mut free = self.total.saturating_sub(used.all);
        let most = max_of_one(self.total, downstreams.len());
        let first = turn % downstreams.len().max(1);
        let in_turn = downstreams[first..].iter().chain(&downstreams[..first]);
        let mut capacity = Vec::with_capacity(downstreams.len());
        for (place, (name, admitted)) in in_turn.enumerate() {
            let taken = used.by_downstream.get(*name).copied().unwrap_or_default();
            let share = free.div_ceil(downstreams.len() - place);
            let jobs = share.min(*admitted).min(most.saturating_sub(taken));
            if jobs > 0 {
                free -= jobs;
                capacity.push(DownstreamCapacity { downstream: (*name).to_owned(), jobs });
            }
        }
        capacity
    }
}

/// The most permits of one downstream: half of all permits is reserved, in equal parts, for the others.
fn max_of_one(total: usize, downstreams: usize) -> usize {
    let others = downstreams.saturating_sub(1);
    let sure = (total / (2 * downstreams.max(1))).max(1);
    total.saturating_sub(others.saturating_mul(sure)).max(1)
}

impl Drop for ConcurrencyPermit {
    fn drop(&mut self) {
        let mut used = self.permits.used.lock();
        used.all = used.all.saturating_sub(1);
        if let Some(count) = used.by_downstream.get_mut(&self.downstream) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                used.by_downstream.remove(&self.downstream);
            }
        }
        drop(used);
        self.permits.released.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn jobs(capacity: &[DownstreamCapacity]) -> Vec<(&str, usize)> {
        capacity.iter().map(|capacity| (capacity.downstream.as_str(), capacity.jobs)).collect()
    }

    #[test]
    fn a_single_downstream_may_use_every_permit() {
        let permits = ConcurrencyPermits::new(8);
        assert_eq!(jobs(&permits.capacity(&[("a", usize::MAX)], 0)), [("a", 8)]);
        let taken: Vec<_> = (0..8).map(|_| permits.take("a")).collect();
        assert_eq!((permits.available(), jobs(&permits.capacity(&[("a", usize::MAX)], 1))), (0, vec![]));
        drop(taken);
        assert_eq!(permits.available(), 8);
    }

    #[test]
    fn a_slow_downstream_leaves_permits_for_others() {
        let permits = ConcurrencyPermits::new(8);
        let both = [("a", usize::MAX), ("b", usize::MAX)];
        let _taken: Vec<_> = (0..6).map(|_| permits.take("a")).collect();
        assert_eq!(jobs(&permits.capacity(&both, 0)), [("b", 2)], "a has its maximum");
    }

    #[test]
    fn capacity_never_exceeds_the_permits_or_what_a_breaker_allows() {
        let permits = ConcurrencyPermits::new(10);
        for turn in 0..3 {
            let capacity = permits.capacity(&[("a", usize::MAX), ("b", 0), ("c", 3)], turn);
            assert!(capacity.iter().map(|capacity| capacity.jobs).sum::<usize>() <= 10);
            assert!(capacity.iter().all(|capacity| capacity.downstream != "b"));
            assert!(capacity.iter().all(|capacity| capacity.downstream != "c" || capacity.jobs <= 3));
        }
        let many: Vec<String> = (0..50).map(|n| n.to_string()).collect();
        let many: Vec<(&str, usize)> = many.iter().map(|name| (name.as_str(), 5)).collect();
        assert_eq!(permits.capacity(&many, 7).iter().map(|capacity| capacity.jobs).sum::<usize>(), 10);
    }
}
