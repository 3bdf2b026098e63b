//! Decides which webhook is called next: webhooks wait here for one of a bounded number of concurrent calls.
//!
//! Tenants take turns, and so do the receivers of a tenant. A tenant may start a call only while it has fewer calls than are
//! free, and one of its receivers while it has fewer than half of those. So a single tenant gets half of the calls and no more,
//! several share, and a new one finds a free call whatever the receivers of others do. The capacity to wait here is shared in
//! the same way, in smaller parts. A webhook without capacity stays in the store. If it blocks others there, it is deferred for
//! about as long as its tenant needs to get to it, judged by how often the tenant's calls end.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use weir_core::TenantId;

/// The shortest and the longest deferral.
const DEFERRAL: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(30));
/// After this many calls, the older half no longer counts for a tenant's pace.
const PACE_CALLS: u32 = 128;

/// Waiting webhooks and running calls.
#[derive(Debug)]
pub(super) struct FairQueue<T> {
    tenants: HashMap<TenantId, TenantQueue<T>>,
    /// Tenants with waiting webhooks, in the order of their turns.
    turns: VecDeque<TenantId>,
    running: usize,
    waiting: usize,
    limits: QueueLimits,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct QueueLimits {
    /// The most concurrent calls.
    pub(super) concurrent: usize,
    /// The most webhooks that wait for a call.
    pub(super) waiting: usize,
}

/// A webhook whose turn has come.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ReadyWebhook<T> {
    pub(super) tenant: TenantId,
    pub(super) receiver: String,
    pub(super) item: T,
}

#[derive(Debug)]
struct TenantQueue<T> {
    receivers: HashMap<String, ReceiverQueue<T>>,
    turns: VecDeque<String>,
    running: usize,
    waiting: usize,
    /// Since when webhooks have been waiting without a break, but no longer ago than `ended` calls.
    busy_since: Instant,
    /// How many calls have ended since then.
    ended: u32,
    /// When the last deferred webhook may be called.
    booked_until: Option<Instant>,
}

#[derive(Debug)]
struct ReceiverQueue<T> {
    waiting: VecDeque<Waiting<T>>,
    running: usize,
}

#[derive(Debug)]
struct Waiting<T> {
    /// It must not be started after this: the store hands it out again soon.
    start_before: Instant,
    item: T,
}

impl<T> FairQueue<T> {
    pub(super) fn new(limits: QueueLimits) -> Self {
        Self { tenants: HashMap::new(), turns: VecDeque::new(), running: 0, waiting: 0, limits }
    }

    /// Whether any webhook could wait here.
    pub(super) const fn has_capacity(&self) -> bool {
        self.waiting < self.limits.waiting
    }

    /// Queues a webhook that must be started before a certain time. Returns false if its tenant or its receiver has no capacity
    /// left.
    pub(super) fn push(
        &mut self,
        tenant: &TenantId,
        receiver: &str,
        item: T,
        start_before: Instant,
        now: Instant,
    ) -> bool {
        let room = self.limits.waiting.saturating_sub(self.waiting);
        let present = self.tenants.get(tenant);
        let of_receiver = present.and_then(|present| present.receivers.get(receiver));
        if present.map_or(0, |present| present.waiting) >= fraction(room, 4)
            || of_receiver.map_or(0, |present| present.waiting.len()) >= fraction(room, 8)
        {
            return false;
        }
        let tenant = match self.tenants.get_mut(tenant) {
            Some(present) => {
                if present.waiting == 0 {
                    self.turns.push_back(tenant.clone());
                }
                present
            }
            None => {
                self.turns.push_back(tenant.clone());
                self.tenants.entry(tenant.clone()).or_insert_with(|| TenantQueue::new(now))
            }
        };
        tenant.push(receiver, Waiting { start_before, item }, now);
        self.waiting += 1;
        true
    }

    /// How long to defer a webhook without capacity: until its tenant may have got to it.
    pub(super) fn defer(&mut self, tenant: &TenantId, now: Instant) -> Duration {
        self.tenants.get_mut(tenant).map_or(DEFERRAL.0, |present| present.defer(now))
    }

    /// Takes the next webhook that may be called.
    pub(super) fn next(&mut self, now: Instant) -> Option<ReadyWebhook<T>> {
        let free = self.limits.concurrent.saturating_sub(self.running);
        for at in 0..self.turns.len() {
            let Some(tenant) = self.turns.get(at).and_then(|id| self.tenants.get_mut(id)) else { continue };
            let before = tenant.waiting;
            let found = if tenant.running < free { tenant.next(free, now) } else { None };
            let left = tenant.waiting;
            self.waiting -= before - left;
            if let Some((receiver, item)) = found {
                self.running += 1;
                // The tenant goes to the end of the queue.
                let tenant = self.turns.remove(at)?;
                if left > 0 {
                    self.turns.push_back(tenant.clone());
                }
                return Some(ReadyWebhook { tenant, receiver, item });
            }
        }
        self.forget_idle();
        None
    }

    /// Releases the capacity of a call that has ended.
    pub(super) fn ended(&mut self, tenant: &TenantId, receiver: &str, now: Instant) {
        self.running = self.running.saturating_sub(1);
        let Some(present) = self.tenants.get_mut(tenant) else { return };
        present.ended(receiver, now);
        if present.is_idle() {
            self.tenants.remove(tenant);
        }
    }

    /// Drops waiting webhooks for which `keep` returns false.
    pub(super) fn retain(&mut self, keep: impl Fn(&T, Instant) -> bool) {
        for tenant in self.tenants.values_mut() {
            for receiver in tenant.receivers.values_mut() {
                let before = receiver.waiting.len();
                receiver.waiting.retain(|waiting| keep(&waiting.item, waiting.start_before));
                let removed = before - receiver.waiting.len();
                tenant.waiting -= removed;
                self.waiting -= removed;
            }
        }
        self.forget_idle();
    }

    /// Empties the queue. Returns webhooks that may still be started: another server may have the others by now.
    pub(super) fn drain(&mut self, now: Instant) -> Vec<T> {
        let receivers = self.tenants.values_mut().flat_map(|tenant| {
            tenant.waiting = 0;
            tenant.receivers.values_mut()
        });
        let waiting = receivers.flat_map(|receiver| receiver.waiting.drain(..));
        let items =
            waiting.filter(|waiting| waiting.start_before > now).map(|waiting| waiting.item).collect();
        self.waiting = 0;
        self.forget_idle();
        items
    }

    fn forget_idle(&mut self) {
        for tenant in self.tenants.values_mut() {
            tenant.receivers.retain(|_, receiver| !receiver.is_idle());
            let TenantQueue { receivers, turns, .. } = tenant;
            turns.retain(|id| receivers.get(id).is_some_and(|receiver| !receiver.waiting.is_empty()));
        }
        self.tenants.retain(|_, tenant| !tenant.is_idle());
        let tenants = &self.tenants;
        self.turns.retain(|id| tenants.get(id).is_some_and(|tenant| tenant.waiting > 0));
    }
}

/// One of `parts` equal parts of `free`, at least 1 while anything is free.
const fn fraction(free: usize, parts: usize) -> usize {
    free.div_ceil(parts)
}

impl<T> TenantQueue<T> {
    fn new(now: Instant) -> Self {
        Self {
            receivers: HashMap::new(),
            turns: VecDeque::new(),
            running: 0,
            waiting: 0,
            busy_since: now,
            ended: 0,
            booked_until: None,
        }
    }

    fn push(&mut self, receiver: &str, waiting: Waiting<T>, now: Instant) {
        if self.waiting == 0 {
            (self.busy_since, self.ended) = (now, 0);
        }
        let new = || ReceiverQueue { waiting: VecDeque::new(), running: 0 };
        let present = self.receivers.entry(receiver.to_owned()).or_insert_with(new);
        if present.waiting.is_empty() {
            self.turns.push_back(receiver.to_owned());
        }
        present.waiting.push_back(waiting);
        self.waiting += 1;
    }

    fn next(&mut self, free: usize, now: Instant) -> Option<(String, T)> {
        for at in 0..self.turns.len() {
            let Some(present) = self.turns.get(at).and_then(|id| self.receivers.get_mut(id)) else {
                continue;
            };
            if present.running >= fraction(free, 2) {
                continue;
            }
            let mut found = None;
            while found.is_none()
                && let Some(waiting) = present.waiting.pop_front()
            {
                self.waiting -= 1;
                found = (waiting.start_before > now).then_some(waiting.item);
            }
            let Some(item) = found else { continue };
            present.running += 1;
            self.running += 1;
            let has_more = !present.waiting.is_empty();
            let receiver = self.turns.remove(at)?;
            if has_more {
                self.turns.push_back(receiver.clone());
            }
            return Some((receiver, item));
        }
        None
    }

    fn ended(&mut self, receiver: &str, now: Instant) {
        self.running = self.running.saturating_sub(1);
        self.ended += 1;
        if self.ended >= PACE_CALLS {
            self.ended /= 2;
            self.busy_since += now.saturating_duration_since(self.busy_since) / 2;
        }
        if let Some(present) = self.receivers.get_mut(receiver) {
            present.running = present.running.saturating_sub(1);
            if present.is_idle() {
                self.receivers.remove(receiver);
            }
        }
    }

    /// How long to defer one more webhook: until all that wait here and were deferred before it have been called.
    fn defer(&mut self, now: Instant) -> Duration {
        let (shortest, longest) = DEFERRAL;
        let [running, waiting] = [self.running, self.waiting].map(|n| u32::try_from(n).unwrap_or(u32::MAX));
        // Running calls count as if they ended now: otherwise the first calls would seem endless.
        let calls = self.ended.saturating_add(running).max(1);
        // Half of the measured time: a webhook that is due too early is deferred again, one that is due too late leaves calls unused.
        let each = now.saturating_duration_since(self.busy_since) / calls / 2;
        let here = now + each.saturating_mul(waiting).min(longest);
        let booked = self.booked_until.map_or(here, |booked| booked.max(here)) + each;
        let booked = booked.clamp(now + shortest, now + longest);
        self.booked_until = Some(booked);
        booked - now
    }

    const fn is_idle(&self) -> bool {
        self.running == 0 && self.waiting == 0
    }
}

impl<T> ReceiverQueue<T> {
    fn is_idle(&self) -> bool {
        self.running == 0 && self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: QueueLimits = QueueLimits { concurrent: 64, waiting: 1_024 };

    fn tenant(name: &str) -> TenantId {
        TenantId::parse(name).unwrap()
    }

    struct QueueFixture {
        queue: FairQueue<u32>,
        now: Instant,
    }

    impl QueueFixture {
        fn new() -> Self {
            Self { queue: FairQueue::new(LIMITS), now: Instant::now() }
        }

        /// Returns the deferrals of webhooks without capacity.
        fn push(&mut self, tenant_name: &str, receiver: &str, count: u32) -> Vec<Duration> {
            let (tenant, until) = (tenant(tenant_name), self.now + Duration::from_secs(60));
            let push = |n| {
                let is_kept = self.queue.push(&tenant, receiver, n, until, self.now);
                (!is_kept).then(|| self.queue.defer(&tenant, self.now))
            };
            (0..count).filter_map(push).collect()
        }

        /// Starts all calls that may start; returns tenants and receivers.
        fn start(&mut self) -> Vec<(String, String)> {
            let now = self.now;
            std::iter::from_fn(|| self.queue.next(now))
                .map(|turn| (turn.tenant.to_string(), turn.receiver))
                .collect()
        }

        fn end(&mut self, tenant_name: &str, receiver: &str) {
            self.queue.ended(&tenant(tenant_name), receiver, self.now);
        }
    }

    #[test]
    fn a_tenant_that_is_alone_leaves_places_for_a_new_one() {
        let mut fixture = QueueFixture::new();
        fixture.push("a", "slow", 100);
        assert_eq!(fixture.start().len(), 22, "half of what is free, for one receiver");
        fixture.push("a", "other", 100);
        assert_eq!(fixture.start().len(), 10, "and as many as are free, for its tenant");
        fixture.push("b", "quick", 1);
        assert_eq!(fixture.start(), [("b".to_owned(), "quick".to_owned())]);
        for n in 0..100 {
            fixture.push(&format!("t{n}"), "slow", 2);
        }
        fixture.start();
        assert_eq!(
            fixture.queue.running, LIMITS.concurrent,
            "with more tenants than concurrent all are taken"
        );
    }

    #[test]
    fn waiting_capacity_is_reserved_for_new_tenants() {
        let mut fixture = QueueFixture::new();
        for n in 0..20 {
            fixture.push(&format!("t{n}"), "slow", 1_000);
            assert!(fixture.push(&format!("new{n}"), "quick", 1).is_empty(), "{n}");
        }
        assert!(fixture.queue.waiting <= LIMITS.waiting);
    }

    #[test]
    fn tenants_and_their_receivers_take_turns() {
        let mut fixture = QueueFixture::new();
        fixture.push("a", "x", 3);
        fixture.push("a", "y", 3);
        fixture.push("b", "z", 2);
        let order: Vec<_> =
            fixture.start().into_iter().map(|(tenant, receiver)| format!("{tenant}{receiver}")).collect();
        assert_eq!(order, ["ax", "bz", "ay", "bz", "ax", "ay", "ax", "ay"]);
    }

    #[test]
    fn a_released_place_is_taken_by_the_next() {
        let mut fixture = QueueFixture::new();
        fixture.push("a", "slow", 30);
        assert_eq!(fixture.start().len(), 22);
        assert_eq!(fixture.start().len(), 0);
        fixture.end("a", "slow");
        assert_eq!(fixture.start().len(), 1);
    }

    #[test]
    fn webhooks_without_room_are_deferred_for_growing_pauses_while_others_run() {
        let mut fixture = QueueFixture::new();
        assert!(fixture.push("a", "slow", 100).is_empty());
        fixture.start();
        fixture.now += Duration::from_secs(1);
        let defer = fixture.push("a", "slow", 5_000);
        assert!(defer.len() > 4_000, "{}", defer.len());
        assert!(defer.is_sorted() && defer.first() < defer.last(), "{defer:?}");
        assert!(defer.iter().all(|wait| (DEFERRAL.0..=DEFERRAL.1).contains(wait)));
        assert!(fixture.queue.has_capacity());
        assert!(fixture.push("b", "quick", 1).is_empty());
    }

    #[test]
    fn a_tenant_whose_calls_end_more_often_is_deferred_for_less_time() {
        let last_put_off = |interval: Duration| {
            let mut fixture = QueueFixture::new();
            fixture.push("a", "r", 100);
            fixture.start();
            for _ in 0..1_000 {
                fixture.now += interval;
                fixture.end("a", "r");
                fixture.push("a", "r", 1);
                fixture.start();
            }
            fixture.push("a", "r", 1_000).last().copied().unwrap()
        };
        let quick = last_put_off(Duration::from_millis(5));
        let expected = Duration::from_secs(2)..Duration::from_secs(3);
        assert!(expected.contains(&quick), "half of a thousand calls, one every 5 ms: {quick:?}");
        assert_eq!(last_put_off(Duration::from_secs(1)), DEFERRAL.1);
    }

    #[test]
    fn a_tenant_whose_calls_never_end_is_deferred_for_growing_pauses() {
        let mut fixture = QueueFixture::new();
        fixture.push("a", "stuck", 200);
        fixture.start();
        fixture.push("a", "stuck", 200);
        let mut last = Duration::ZERO;
        for _ in 0..5 {
            fixture.now += Duration::from_secs(1);
            let defer = fixture.push("a", "stuck", 1).pop().unwrap();
            assert!(defer > last, "{defer:?} after {last:?}");
            last = defer;
        }
    }

    #[test]
    fn webhooks_not_started_in_time_are_dropped_from_the_queue() {
        let mut fixture = QueueFixture::new();
        fixture.push("a", "r", 2);
        fixture.now += Duration::from_secs(60);
        fixture.push("a", "r", 1);
        assert_eq!(fixture.start().len(), 1, "the third");
        assert_eq!((fixture.queue.waiting, fixture.queue.running), (0, 1));
    }

    #[test]
    fn webhooks_not_started_in_time_are_not_released_again() {
        let mut fixture = QueueFixture::new();
        fixture.push("a", "r", 2);
        fixture.now += Duration::from_secs(30);
        fixture.push("b", "r", 1);
        fixture.now += Duration::from_secs(30);
        assert_eq!(fixture.queue.drain(fixture.now), [0], "only the one of the second tenant");
        assert_eq!(fixture.queue.waiting, 0);
    }

    #[test]
    fn finished_tenants_leave_nothing_behind() {
        let mut fixture = QueueFixture::new();
        for n in 0..20 {
            fixture.push(&format!("t{n}"), "r", 2);
        }
        let started = fixture.start();
        for (tenant, receiver) in &started {
            fixture.end(tenant, receiver);
        }
        fixture.push("a", "r", 3);
        fixture.queue.retain(|item, _| *item == 1);
        assert_eq!(fixture.queue.drain(fixture.now), [1]);
        let FairQueue { tenants, turns, running, waiting, .. } = &fixture.queue;
        assert!(tenants.is_empty() && turns.is_empty() && (*running, *waiting) == (0, 0), "{tenants:?}");
    }
}
