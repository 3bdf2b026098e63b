//! Bounds concurrent calls: one worker has `request.concurrency` permits. A few are reserved for each downstream, so that a
//! slow one cannot take all of them, and a sixteenth for express jobs, so that the calls of tenants with much work cannot.
//! Tenants may have a limit of their own.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use weir_core::TenantId;
use weir_store::request::{DownstreamCapacity, TenantCapacity, TenantRules};

/// The part of the permits that only express jobs get.
const EXPRESS_PART: usize = 16;

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
    by_downstream: HashMap<String, DownstreamUse>,
    by_tenant: TenantCapacity,
}

/// The permits of one downstream in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DownstreamUse {
    /// Those of its calls.
    pub(super) calls: usize,
    /// Those of claims that run.
    pub(super) claimed: usize,
}

impl DownstreamUse {
    const fn all(self) -> usize {
        self.calls + self.claimed
    }
}

/// Which jobs a claim is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClaimKind {
    /// The jobs of all tenants, by turns.
    Turns,
    Express,
}

/// A permit in use. Released when dropped.
#[derive(Debug)]
pub(super) struct ConcurrencyPermit {
    permits: Arc<ConcurrencyPermits>,
    downstream: String,
    tenant: TenantId,
}

/// The capacity of a claim that runs. No other claim gets it until this is dropped.
#[derive(Debug)]
pub(super) struct ClaimPermit<'a> {
    permits: &'a ConcurrencyPermits,
    kind: ClaimKind,
    pub(super) room: Vec<DownstreamCapacity>,
}

impl ConcurrencyPermits {
    pub(super) fn new(total: usize, rules: Arc<TenantRules>) -> Arc<Self> {
        let used = Used { by_tenant: TenantCapacity::new(rules), ..Used::default() };
        Arc::new(Self { total, used: Mutex::new(used), released: Notify::new() })
    }

    /// How many jobs a claim may take.
    pub(super) fn available(&self, kind: ClaimKind) -> usize {
        self.available_beside(&self.used.lock(), kind)
    }

    fn available_beside(&self, used: &Used, kind: ClaimKind) -> usize {
        let (free, reserved) = (self.total.saturating_sub(used.all), self.total / EXPRESS_PART);
        match kind {
            ClaimKind::Turns => free.saturating_sub(reserved),
            ClaimKind::Express => free.min(reserved.max(1)),
        }
    }

    /// What each tenant may still have.
    pub(super) fn tenants(&self) -> TenantCapacity {
        self.used.lock().by_tenant.clone()
    }

    /// What the downstreams with these names use together.
    pub(super) fn used_by(&self, is_asked: impl Fn(&str) -> bool) -> DownstreamUse {
        let used = self.used.lock();
        let asked = used.by_downstream.iter().filter(|(name, _)| is_asked(name)).map(|(_, used)| used);
        asked.fold(DownstreamUse::default(), |sum, used| DownstreamUse {
            calls: sum.calls + used.calls,
            claimed: sum.claimed + used.claimed,
        })
    }

    /// Takes a permit, without a check: jobs are claimed only within [`ConcurrencyPermits::capacity`], but a broker may name
    /// more jobs of one downstream than its share. Returns whether the call keeps the limit of its tenant: two claims at once may
    /// both have had room for it.
    pub(super) fn take(self: &Arc<Self>, downstream: &str, tenant: &TenantId) -> (ConcurrencyPermit, bool) {
        let mut used = self.used.lock();
        used.all += 1;
        used.by_downstream.entry(downstream.to_owned()).or_default().calls += 1;
        let is_within = used.by_tenant.free(tenant.as_str()) > 0;
        used.by_tenant.start(tenant.as_str(), 1);
        let (downstream, tenant) = (downstream.to_owned(), tenant.clone());
        (ConcurrencyPermit { permits: Arc::clone(self), downstream, tenant }, is_within)
    }

    /// Waits until a permit was released since the last call: that of a call, or those that a claim of express jobs held and that
    /// claims by turns lacked.
    pub(super) async fn wait_for_release(&self) {
        self.released.notified().await;
    }

    /// Waits until a quarter of all permits is available, so that one claim uses many, but at most for this time.
    pub(super) async fn wait_for_several(&self, at_most: Duration) {
        let enough = async {
            while self.available(ClaimKind::Turns) < self.total / 4 {
                self.wait_for_release().await;
            }
        };
        let _ = tokio::time::timeout(at_most, enough).await;
    }

    /// How many jobs to claim for each downstream. `downstreams` has the number of calls that each breaker allows. The first
    /// downstream to be served changes with `turn`.
    pub(super) fn capacity(
        &self,
        downstreams: &[(&str, usize)],
        kind: ClaimKind,
        turn: usize,
    ) -> ClaimPermit<'_> {
        let mut used = self.used.lock();
        let mut free = self.available_beside(&used, kind);
        let most = max_of_one(self.total, downstreams.len());
        let first = turn % downstreams.len().max(1);
        let in_turn = downstreams[first..].iter().chain(&downstreams[..first]);
        let mut room = Vec::with_capacity(downstreams.len());
        for (place, (name, admitted)) in in_turn.enumerate() {
            let taken = used.by_downstream.get(*name).copied().unwrap_or_default().all();
            let share = free.div_ceil(downstreams.len() - place);
            let jobs = share.min(*admitted).min(most.saturating_sub(taken));
            if jobs > 0 {
                free -= jobs;
                room.push(DownstreamCapacity { downstream: (*name).to_owned(), jobs });
            }
        }
        for DownstreamCapacity { downstream, jobs } in &room {
            used.all += jobs;
            used.by_downstream.entry(downstream.clone()).or_default().claimed += jobs;
        }
        ClaimPermit { permits: self, kind, room }
    }
}

impl Used {
    fn release(&mut self, downstream: &str, released: DownstreamUse) {
        self.all = self.all.saturating_sub(released.all());
        if let Some(used) = self.by_downstream.get_mut(downstream) {
            used.calls = used.calls.saturating_sub(released.calls);
            used.claimed = used.claimed.saturating_sub(released.claimed);
            if used.all() == 0 {
                self.by_downstream.remove(downstream);
            }
        }
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
        used.release(&self.downstream, DownstreamUse { calls: 1, claimed: 0 });
        used.by_tenant.end(self.tenant.as_str(), 1);
        drop(used);
        self.permits.released.notify_one();
    }
}

impl Drop for ClaimPermit<'_> {
    fn drop(&mut self) {
        let permits = self.permits;
        let mut used = permits.used.lock();
        let was_full = permits.available_beside(&used, ClaimKind::Turns) == 0;
        for DownstreamCapacity { downstream, jobs } in &self.room {
            used.release(downstream, DownstreamUse { calls: 0, claimed: *jobs });
        }
        let is_free = permits.available_beside(&used, ClaimKind::Turns) > 0;
        drop(used);
        // Claims by turns that found nothing free meanwhile wait for a release, and the calls that run may take long.
        if self.kind == ClaimKind::Express && was_full && is_free {
            permits.released.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use futures_util::FutureExt as _;
    use weir_store::request::TenantRule;

    use super::*;

    fn permits(total: usize) -> Arc<ConcurrencyPermits> {
        ConcurrencyPermits::new(total, Arc::default())
    }

    fn tenant() -> TenantId {
        TenantId::parse("acme").unwrap()
    }

    fn take(permits: &Arc<ConcurrencyPermits>, downstream: &str, count: usize) -> Vec<ConcurrencyPermit> {
        (0..count).map(|_| permits.take(downstream, &tenant()).0).collect()
    }

    /// The capacity of a claim that ends at once.
    fn jobs(
        permits: &ConcurrencyPermits,
        downstreams: &[(&str, usize)],
        turn: usize,
    ) -> Vec<(String, usize)> {
        let claim = permits.capacity(downstreams, ClaimKind::Turns, turn);
        claim.room.iter().map(|room| (room.downstream.clone(), room.jobs)).collect()
    }

    #[test]
    fn a_single_downstream_may_use_every_permit() {
        let permits = permits(8);
        assert_eq!(jobs(&permits, &[("a", usize::MAX)], 0), [("a".to_owned(), 8)]);
        let taken = take(&permits, "a", 8);
        assert_eq!(permits.available(ClaimKind::Turns), 0);
        assert!(jobs(&permits, &[("a", usize::MAX)], 1).is_empty());
        drop(taken);
        assert_eq!(permits.available(ClaimKind::Turns), 8);
    }

    #[test]
    fn a_slow_downstream_leaves_permits_for_others() {
        let permits = permits(8);
        let both = [("a", usize::MAX), ("b", usize::MAX)];
        let _taken = take(&permits, "a", 6);
        assert_eq!(jobs(&permits, &both, 0), [("b".to_owned(), 2)], "a has its maximum");
    }

    #[test]
    fn capacity_never_exceeds_the_permits_or_what_a_breaker_allows() {
        let permits = permits(10);
        for turn in 0..3 {
            let capacity = jobs(&permits, &[("a", usize::MAX), ("b", 0), ("c", 3)], turn);
            assert!(capacity.iter().map(|(_, jobs)| jobs).sum::<usize>() <= 10);
            assert!(capacity.iter().all(|(name, jobs)| name != "b" && (name != "c" || *jobs <= 3)));
        }
        let many: Vec<String> = (0..50).map(|n| n.to_string()).collect();
        let many: Vec<(&str, usize)> = many.iter().map(|name| (name.as_str(), 5)).collect();
        assert_eq!(jobs(&permits, &many, 7).iter().map(|(_, jobs)| jobs).sum::<usize>(), 10);
    }

    #[test]
    fn much_work_leaves_permits_for_express_jobs_and_claims_at_once_share_the_rest() {
        let permits = permits(64);
        let turns = permits.capacity(&[("a", usize::MAX)], ClaimKind::Turns, 0);
        let express = permits.capacity(&[("a", usize::MAX)], ClaimKind::Express, 0);
        assert_eq!((turns.room[0].jobs, express.room[0].jobs), (60, 4));
        assert!(permits.capacity(&[("a", usize::MAX)], ClaimKind::Express, 0).room.is_empty());
        drop((turns, express));
        let _taken = take(&permits, "a", 62);
        assert_eq!([ClaimKind::Turns, ClaimKind::Express].map(|kind| permits.available(kind)), [0, 2]);
    }

    #[tokio::test]
    async fn a_claim_of_express_jobs_that_ends_wakes_one_by_turns_that_found_no_permit() {
        let permits = permits(64);
        let is_woken = || permits.wait_for_release().now_or_never().is_some();
        let _taken = take(&permits, "a", 58);
        let express = permits.capacity(&[("a", usize::MAX)], ClaimKind::Express, 0);
        assert_eq!(permits.available(ClaimKind::Turns), 0, "it holds what is free");
        assert!(!is_woken());
        drop(express);
        assert_eq!(permits.available(ClaimKind::Turns), 2);
        assert!(is_woken());
        drop(permits.capacity(&[("a", usize::MAX)], ClaimKind::Turns, 0));
        assert!(!is_woken(), "claims by turns do not wake themselves");
        let _taken = take(&permits, "a", 2);
        drop(permits.capacity(&[("a", usize::MAX)], ClaimKind::Express, 0));
        assert!(!is_woken(), "nothing is free for it");
    }

    #[test]
    fn what_claims_and_calls_use_is_told_apart() {
        let permits = permits(64);
        let claim = permits.capacity(&[("a", 3), ("b", 2)], ClaimKind::Turns, 0);
        let calls = take(&permits, "a", 4);
        assert_eq!(permits.used_by(|name| name == "a"), DownstreamUse { calls: 4, claimed: 3 });
        assert_eq!(permits.used_by(|_| true), DownstreamUse { calls: 4, claimed: 5 });
        drop(claim);
        assert_eq!(permits.used_by(|_| true), DownstreamUse { calls: 4, claimed: 0 });
        drop(calls);
        assert_eq!(permits.used_by(|_| true), DownstreamUse::default());
        assert!(
            permits.used.lock().by_downstream.is_empty(),
            "nothing is kept of a downstream without calls"
        );
    }

    #[test]
    fn a_call_beyond_the_limit_of_its_tenant_is_noticed() {
        let rule = TenantRule { weight: NonZeroU32::MIN, concurrency: Some(1) };
        let rules = TenantRules { default: rule, ..TenantRules::default() };
        let permits = ConcurrencyPermits::new(8, Arc::new(rules));
        let (first, is_within) = permits.take("a", &tenant());
        assert!(is_within);
        assert!(!permits.take("a", &tenant()).1);
        drop(first);
        assert!(permits.take("a", &tenant()).1);
    }
}
