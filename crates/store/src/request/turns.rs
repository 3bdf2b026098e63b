//! The plan of a claim in which tenants take turns. The engine reads the due tenants of a downstream in the order of their turns,
//! claims what it is granted, and says what it got. A tenant that had fewer jobs than it was granted leaves the rest to the others,
//! in another pass.

use std::collections::HashMap;

use weir_core::request::turn::{Turn, TurnCandidate, plan_turns};

use super::{CLAIM_BYTES_MAX, ClaimOrder, ClaimedJobs, DownstreamCapacity, TenantCapacity};

/// The most jobs of a downstream that one claim takes.
const ROOM_MAX: usize = 10_000;
/// Tenants beyond the capacity that a scan looks at: some have no job that is due, or as many calls as they may have.
const SCAN_BEYOND: usize = 64;

/// A claim of jobs by turns.
#[derive(Debug)]
pub struct TurnClaim {
    rooms: Vec<Room>,
    tenants: TenantCapacity,
    bytes: usize,
    is_held_back: bool,
}

#[derive(Debug)]
struct Room {
    downstream: String,
    left: usize,
    turn: Turn,
    tenants: Vec<DueTenant>,
    /// The positions of the tenants by name.
    places: HashMap<String, usize>,
    is_circle: bool,
    /// The last tenant that the scan has read.
    last_read: String,
    /// Whether a pass has been planned.
    is_begun: bool,
}

#[derive(Debug)]
struct DueTenant {
    name: String,
    granted: usize,
    /// How many jobs the claim has got in all passes, and in the last one.
    taken: usize,
    last: usize,
}

/// Which tenants of a downstream to read: up to `limit` that follow `after` in the circle, and then that one itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TurnScan {
    pub downstream: String,
    pub after: String,
    pub limit: usize,
}

/// How many jobs of a tenant to claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TurnGrant {
    pub downstream: String,
    pub tenant: String,
    pub jobs: usize,
    /// How many of its jobs this claim has already.
    pub taken: usize,
}

impl TurnClaim {
    #[must_use]
    pub fn new(room: &[DownstreamCapacity], order: &ClaimOrder) -> Self {
        let room = room.iter().filter(|room| room.jobs > 0);
        let begin = |DownstreamCapacity { downstream, jobs }: &DownstreamCapacity| Room {
            downstream: downstream.clone(),
            left: (*jobs).min(ROOM_MAX),
            turn: order.turns.get(downstream).cloned().unwrap_or_default(),
            tenants: Vec::new(),
            places: HashMap::new(),
            is_circle: false,
            last_read: String::new(),
            is_begun: false,
        };
        let tenants = order.tenants.clone();
        Self { rooms: room.map(begin).collect(), tenants, bytes: 0, is_held_back: false }
    }

    /// What to read, for each downstream with capacity.
    #[must_use]
    pub fn scans(&self) -> Vec<TurnScan> {
        let beyond = SCAN_BEYOND + self.tenants.full().len();
        let scan = |room: &Room| TurnScan {
            downstream: room.downstream.clone(),
            after: room.turn.after.clone(),
            limit: room.left + beyond,
        };
        self.rooms.iter().map(scan).collect()
    }

    /// Takes what a scan, by its index, has read: the tenants in its order, each with whether it has a due job.
    pub fn found(&mut self, scan: usize, limit: usize, read: impl IntoIterator<Item = (String, bool)>) {
        let Some(room) = self.rooms.get_mut(scan) else { return };
        let (mut count, mut is_cut_short) = (0, room.turn.had > 0);
        room.tenants.clear();
        for (name, is_due) in read {
            count += 1;
            room.last_read.clone_from(&name);
            let tenant = DueTenant { name, granted: 0, taken: 0, last: 0 };
            if is_cut_short && tenant.name == room.turn.after {
                is_cut_short = false;
                room.tenants.splice(..0, is_due.then_some(tenant));
            } else if is_due {
                room.tenants.push(tenant);
            }
        }
        if is_cut_short && count >= limit {
            // The scan did not come as far as that tenant, which probably has more.
            let name = room.turn.after.clone();
            room.tenants.insert(0, DueTenant { name, granted: 0, taken: 0, last: 0 });
        }
        let found = room.tenants.len();
        room.tenants.retain(|tenant| self.tenants.free(&tenant.name) > 0);
        self.is_held_back |= room.tenants.len() < found;
        room.is_circle = count < limit;
    }

    /// Whether a scan has found a tenant with a job to claim.
    #[must_use]
    pub fn has_found(&self) -> bool {
        self.rooms.iter().any(|room| !room.tenants.is_empty())
    }

    /// Plans the next pass; empty at the end.
    pub fn grants(&mut self) -> Vec<TurnGrant> {
        let mut grants = Vec::new();
        if self.bytes >= CLAIM_BYTES_MAX {
            return grants;
        }
        for room in &mut self.rooms {
            if room.is_begun {
                room.leave_out_exhausted(&mut self.tenants);
            }
            self.is_held_back |= room.plan(&mut self.tenants);
            room.is_begun = true;
            grants.extend(room.tenants.iter().filter(|tenant| tenant.granted > 0).map(|tenant| TurnGrant {
                downstream: room.downstream.clone(),
                tenant: tenant.name.clone(),
                jobs: tenant.granted,
                taken: tenant.taken,
            }));
        }
        grants
    }

    /// Counts a job that the claim has got.
    pub fn claimed(&mut self, downstream: &str, tenant: &str, bytes: usize) {
        self.bytes += bytes;
        let Some(room) = self.rooms.iter_mut().find(|room| room.downstream == downstream) else { return };
        room.left = room.left.saturating_sub(1);
        if let Some(tenant) = room.places.get(tenant).and_then(|at| room.tenants.get_mut(*at)) {
            tenant.taken += 1;
            tenant.last += 1;
        }
    }

    /// How many more bytes of payloads the claim may take before it ends.
    #[must_use]
    pub fn bytes_left(&self) -> usize {
        CLAIM_BYTES_MAX.saturating_sub(self.bytes)
    }

    /// Completes the result of the claim.
    pub fn finish(self, claimed: &mut ClaimedJobs) {
        let is_full = self.bytes >= CLAIM_BYTES_MAX;
        claimed.is_partial |= is_full || self.rooms.iter().any(|room| !room.is_circle && room.left > 0);
        claimed.is_held_back |= self.is_held_back;
        let next = |room: Room| {
            // Of the tenants that were read none has more that can be claimed.
            let is_in_vain = !room.is_circle && room.left > 0;
            let turn = if is_in_vain { Turn { after: room.last_read, had: 0 } } else { room.turn };
            (room.downstream, turn)
        };
        claimed.turns = self.rooms.into_iter().map(next).collect();
    }
}

impl Room {
    /// Leaves out tenants that had fewer jobs than the last pass has granted, and puts the others in the order of their turns.
    fn leave_out_exhausted(&mut self, capacity: &mut TenantCapacity) {
        for DueTenant { name, granted, last, .. } in &self.tenants {
            capacity.end(name, granted.saturating_sub(*last));
        }
        self.tenants.retain(|tenant| self.is_circle && tenant.last >= tenant.granted);
        self.tenants.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        let Turn { after, had } = &self.turn;
        let first =
            self.tenants.partition_point(|tenant| tenant.name < *after || *had == 0 && tenant.name == *after);
        self.tenants.rotate_left(first);
    }

    /// Plans a pass. Returns whether it gives a tenant all the calls that it may have.
    fn plan(&mut self, capacity: &mut TenantCapacity) -> bool {
        let candidates = self.tenants.iter().map(|DueTenant { name, .. }| TurnCandidate {
            tenant: name,
            weight: capacity.weight(name),
            most: capacity.free(name),
        });
        let candidates: Vec<TurnCandidate<'_>> = candidates.collect();
        let plan = plan_turns(&self.turn, &candidates, self.is_circle, self.left);
        self.turn = plan.next;
        self.places.clear();
        let mut is_held_back = false;
        for (at, (tenant, jobs)) in self.tenants.iter_mut().zip(plan.jobs).enumerate() {
            (tenant.granted, tenant.last) = (jobs, 0);
            capacity.start(&tenant.name, jobs);
            is_held_back |= capacity.free(&tenant.name) == 0;
            self.places.insert(tenant.name.clone(), at);
        }
        is_held_back
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::num::NonZeroU32;
    use std::sync::Arc;

    use super::*;
    use crate::request::{TenantRule, TenantRules};

    /// Tenants and how many due jobs they have.
    type Waiting = BTreeMap<String, usize>;

    fn waiting(tenants: &[(&str, usize)]) -> Waiting {
        tenants.iter().map(|(name, jobs)| ((*name).to_owned(), *jobs)).collect()
    }

    fn order(rules: &[(&str, u32, Option<usize>)]) -> ClaimOrder {
        let rule = |weight, concurrency| TenantRule { weight: NonZeroU32::new(weight).unwrap(), concurrency };
        let named = rules.iter().map(|(name, weight, most)| ((*name).to_owned(), rule(*weight, *most)));
        let rules = TenantRules { named: named.collect(), ..TenantRules::default() };
        ClaimOrder { tenants: TenantCapacity::new(Arc::new(rules)), turns: BTreeMap::new() }
    }

    /// Claims as an engine does. Returns how many jobs each tenant got.
    fn claim(waiting: &mut Waiting, room: usize, order: &mut ClaimOrder) -> (Waiting, ClaimedJobs) {
        let capacity = [DownstreamCapacity { downstream: "d".to_owned(), jobs: room }];
        let mut claim = TurnClaim::new(&capacity, order);
        for (index, TurnScan { after, limit, .. }) in claim.scans().into_iter().enumerate() {
            let circle = waiting.iter().filter(|(name, _)| **name > after);
            let circle = circle.chain(waiting.iter().filter(|(name, _)| **name <= after));
            let read: Vec<_> = circle.take(limit).map(|(name, jobs)| (name.clone(), *jobs > 0)).collect();
            claim.found(index, limit, read);
        }
        let mut got = Waiting::new();
        loop {
            let grants = claim.grants();
            if grants.is_empty() {
                break;
            }
            for TurnGrant { downstream, tenant, jobs, taken } in grants {
                assert_eq!(taken, got.get(&tenant).copied().unwrap_or_default());
                let left = waiting.get_mut(&tenant).unwrap();
                for _ in 0..jobs.min(*left) {
                    *left -= 1;
                    *got.entry(tenant.clone()).or_default() += 1;
                    claim.claimed(&downstream, &tenant, 1);
                }
            }
        }
        let mut claimed = ClaimedJobs::default();
        claim.finish(&mut claimed);
        order.turns.extend(claimed.turns.clone());
        (got, claimed)
    }

    #[test]
    fn what_a_tenant_does_not_need_goes_to_the_others_in_the_same_claim() {
        let mut jobs = waiting(&[("a", 1), ("b", 2), ("c", 1_000)]);
        let mut order = order(&[]);
        let (got, claimed) = claim(&mut jobs, 90, &mut order);
        assert_eq!(got, waiting(&[("a", 1), ("b", 2), ("c", 87)]));
        assert_eq!((claimed.is_partial, claimed.is_held_back), (false, false));
    }

    #[test]
    fn a_tenant_with_a_million_jobs_leaves_the_others_their_share() {
        let mut jobs = waiting(&[("big", 1_000_000), ("small", 100)]);
        let (got, _) = claim(&mut jobs, 64, &mut order(&[]));
        assert_eq!(got, waiting(&[("big", 32), ("small", 32)]));
        let (got, _) = claim(&mut jobs, 64, &mut order(&[("small", 3, None)]));
        assert_eq!(got, waiting(&[("big", 16), ("small", 48)]));
    }

    #[test]
    fn every_one_of_many_tenants_has_its_turn() {
        let mut jobs: Waiting = (0..1_000).map(|n| (format!("t{n:04}"), 3)).collect();
        let mut order = order(&[]);
        for _ in 0..30 {
            let (got, claimed) = claim(&mut jobs, 100, &mut order);
            assert_eq!((got.len(), claimed.is_partial), (100, false), "a job of a hundred tenants");
        }
        assert!(jobs.values().all(|left| *left == 0), "each has had its three turns");
    }

    #[test]
    fn a_tenant_at_its_limit_is_passed_over_and_the_claim_says_so() {
        let mut jobs = waiting(&[("a", 50), ("b", 50)]);
        let mut order = order(&[("a", 1, Some(3))]);
        let (got, claimed) = claim(&mut jobs, 20, &mut order);
        assert_eq!((got, claimed.is_held_back), (waiting(&[("a", 3), ("b", 17)]), true));
        order.tenants.start("a", 3);
        let (got, claimed) = claim(&mut jobs, 20, &mut order);
        assert_eq!((got, claimed.is_held_back), (waiting(&[("b", 20)]), true));
        let (got, claimed) = claim(&mut waiting(&[("a", 5)]), 20, &mut order);
        assert_eq!((got.len(), claimed.is_held_back), (0, true));
    }

    #[test]
    fn a_claim_that_looked_at_tenants_in_vain_says_that_it_is_partial() {
        let mut jobs: Waiting = (0..500).map(|n| (format!("t{n:04}"), 0)).collect();
        jobs.insert("z".to_owned(), 5);
        let mut order = order(&[]);
        let mut claims = 0;
        loop {
            let (got, claimed) = claim(&mut jobs, 10, &mut order);
            claims += 1;
            if got.len() == 1 {
                break;
            }
            assert!(claimed.is_partial && got.is_empty() && claims < 10, "{claimed:?}");
        }
    }
}
