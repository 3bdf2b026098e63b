//! How many calls may be under way, and whose. There are as many slots as `request.concurrency` says. Each downstream is
//! sure of a few, whatever the others do: one that answers slowly cannot take them all.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use weir_store::request::DownstreamCapacity;

/// The slots of one worker.
#[derive(Debug)]
pub(super) struct Permits {
    total: usize,
    used: Mutex<Used>,
    freed: Notify,
}

#[derive(Debug, Default)]
struct Used {
    all: usize,
    by_downstream: HashMap<String, usize>,
}

/// A slot that is taken, until this is dropped.
#[derive(Debug)]
pub(super) struct Permit {
    slots: Arc<Permits>,
    downstream: String,
}

impl Permits {
    pub(super) fn new(total: usize) -> Arc<Self> {
        Arc::new(Self { total, used: Mutex::default(), freed: Notify::new() })
    }

    /// How many slots nobody has.
    pub(super) fn free(&self) -> usize {
        self.total.saturating_sub(self.used.lock().all)
    }

    /// Takes a slot. Jobs are claimed only where [`Permits::room`] has one for them; a broker may name more of one
    /// downstream than its share.
    pub(super) fn take(self: &Arc<Self>, downstream: &str) -> Permit {
        let mut used = self.used.lock();
        used.all += 1;
        *used.by_downstream.entry(downstream.to_owned()).or_default() += 1;
        Permit { slots: Arc::clone(self), downstream: downstream.to_owned() }
    }

    /// Returns when a slot was given back since the last call.
    pub(super) async fn freed(&self) {
        self.freed.notified().await;
    }

    /// Waits until a quarter of all slots is free, so that one claim serves many, but not for long.
    pub(super) async fn gather(&self, at_most: Duration) {
        let enough = async {
            while self.free() < self.total / 4 {
                self.freed().await;
            }
        };
        let _ = tokio::time::timeout(at_most, enough).await;
    }

    /// Room for more, shared fairly by downstreams that let so many calls through. `turn` says who is first: it differs
    /// from one claim to the next.
    pub(super) fn room(&self, downstreams: &[(&str, usize)], turn: usize) -> Vec<DownstreamCapacity> {
        let used = self.used.lock();
        let mut free = self.total.saturating_sub(used.all);
        let most = most_of_one(self.total, downstreams.len());
        let first = turn % downstreams.len().max(1);
        let in_turn = downstreams[first..].iter().chain(&downstreams[..first]);
        let mut room = Vec::with_capacity(downstreams.len());
        for (place, (name, admitted)) in in_turn.enumerate() {
            let taken = used.by_downstream.get(*name).copied().unwrap_or_default();
            let share = free.div_ceil(downstreams.len() - place);
            let jobs = share.min(*admitted).min(most.saturating_sub(taken));
            if jobs > 0 {
                free -= jobs;
                room.push(DownstreamCapacity { downstream: (*name).to_owned(), jobs });
            }
        }
        room
    }
}

/// How many slots one downstream may have, so that each of the others is sure of its part of a half.
fn most_of_one(total: usize, downstreams: usize) -> usize {
    let others = downstreams.saturating_sub(1);
    let sure = (total / (2 * downstreams.max(1))).max(1);
    total.saturating_sub(others.saturating_mul(sure)).max(1)
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut used = self.slots.used.lock();
        used.all = used.all.saturating_sub(1);
        if let Some(count) = used.by_downstream.get_mut(&self.downstream) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                used.by_downstream.remove(&self.downstream);
            }
        }
        drop(used);
        self.slots.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn jobs(room: &[DownstreamCapacity]) -> Vec<(&str, usize)> {
        room.iter().map(|room| (room.downstream.as_str(), room.jobs)).collect()
    }

    #[test]
    fn one_downstream_alone_may_have_every_slot() {
        let slots = Permits::new(8);
        assert_eq!(jobs(&slots.room(&[("a", usize::MAX)], 0)), [("a", 8)]);
        let taken: Vec<_> = (0..8).map(|_| slots.take("a")).collect();
        assert_eq!((slots.free(), jobs(&slots.room(&[("a", usize::MAX)], 1))), (0, vec![]));
        drop(taken);
        assert_eq!(slots.free(), 8);
    }

    #[test]
    fn a_slow_downstream_leaves_room_for_the_others() {
        let slots = Permits::new(8);
        let both = [("a", usize::MAX), ("b", usize::MAX)];
        let _taken: Vec<_> = (0..6).map(|_| slots.take("a")).collect();
        assert_eq!(jobs(&slots.room(&both, 0)), [("b", 2)], "a has its most");
    }

    #[test]
    fn room_is_never_more_than_there_are_slots_and_no_more_than_a_breaker_lets_through() {
        let slots = Permits::new(10);
        for turn in 0..3 {
            let room = slots.room(&[("a", usize::MAX), ("b", 0), ("c", 3)], turn);
            assert!(room.iter().map(|room| room.jobs).sum::<usize>() <= 10);
            assert!(room.iter().all(|room| room.downstream != "b"));
            assert!(room.iter().all(|room| room.downstream != "c" || room.jobs <= 3));
        }
        let many: Vec<String> = (0..50).map(|n| n.to_string()).collect();
        let many: Vec<(&str, usize)> = many.iter().map(|name| (name.as_str(), 5)).collect();
        assert_eq!(slots.room(&many, 7).iter().map(|room| room.jobs).sum::<usize>(), 10);
    }
}
