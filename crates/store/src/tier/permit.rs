//! Concurrency policies, permits, and the plan of a batch of decisions about them.
//!
//! Permits are rows, decided and written in one commit: nobody gets one that a crash forgets, and all servers of a store count
//! together.

use std::collections::BTreeMap;
use std::time::Duration;

use weir_core::tier::{
    Concurrency, ConcurrencyError, Decision, LimitDenial, LimitState, OpenPermit, Permit, PermitRelease,
};
use weir_core::{PermitId, PolicyName, Timestamp};

use super::policy::OnOutage;

/// What an operator defines of a concurrency policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConcurrencySpec {
    pub rule: Concurrency,
    /// Whether the policy only observes and never denies.
    pub shadow: bool,
    /// What a check gets while the store does not answer. Without the store nobody can count permits, so `Local` denies.
    pub on_outage: OnOutage,
}

impl ConcurrencySpec {
    /// A limit with the default options.
    #[must_use]
    pub const fn plain(rule: Concurrency) -> Self {
        Self { rule, shadow: false, on_outage: OnOutage::Local }
    }

    /// Reads the limit and the milliseconds of a table.
    pub fn rule_from_columns(limit: u32, ttl_ms: i64) -> Result<Concurrency, ConcurrencyError> {
        Concurrency::new(limit, Duration::from_millis(u64::try_from(ttl_ms).unwrap_or(0)))
    }

    /// The milliseconds of a permit, as a table stores them.
    #[must_use]
    pub fn ttl_ms(&self) -> i64 {
        i64::try_from(self.rule.ttl().as_millis()).unwrap_or(i64::MAX)
    }
}

/// A stored concurrency policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConcurrencyPolicy {
    pub name: PolicyName,
    /// A number that is never reused. Its permits have it, too.
    pub scope: u32,
    pub spec: ConcurrencySpec,
}

/// A permit that is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PermitAsk {
    /// The id of the permit, if it is given.
    pub id: PermitId,
    pub policy: PolicyName,
    pub scope: u32,
    pub spec: ConcurrencySpec,
    pub key: String,
    /// The costs of asks with the same policy and key add up. With 0 nothing is taken.
    pub cost: u32,
}

/// Permits that are wanted together: all or none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TakePermits {
    pub asks: Vec<PermitAsk>,
    /// Whether to decide without taking anything.
    pub peek: bool,
}

/// The decision about one [`TakePermits`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PermitsOutcome {
    /// The decision for all. Its `denied_by` is an index into the asks.
    pub decision: Decision,
    /// For each ask: the decision that its key would have had alone, its state after the decision, and whether the permit was
    /// given.
    pub each: Vec<(Decision, LimitState, bool)>,
}

/// A permit that a decision gave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewPermit {
    pub id: PermitId,
    pub policy: PolicyName,
    pub scope: u32,
    pub key: String,
    pub cost: u32,
    pub expires_at: Timestamp,
}

/// The result of giving back a permit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReleasedPermit {
    pub policy: PolicyName,
    pub key: String,
    /// The permit after the call.
    pub permit: Permit,
    pub release: PermitRelease,
}

/// The open permits of the keys of a batch, by scope and key.
pub type OpenPermits = BTreeMap<(u32, String), Vec<OpenPermit>>;

/// Returns the keys of a batch, in order.
#[must_use]
pub fn permit_keys(batch: &[TakePermits]) -> OpenPermits {
    let asks = batch.iter().flat_map(|take| &take.asks);
    asks.map(|ask| ((ask.scope, ask.key.clone()), Vec::new())).collect()
}

/// Decides a batch in order at `now`. Returns the outcomes, and the permits that must be saved.
#[must_use]
pub fn plan_permits(
    mut open: OpenPermits,
    batch: &[TakePermits],
    now: Timestamp,
) -> (Vec<PermitsOutcome>, Vec<NewPermit>) {
    let mut new = Vec::new();
    let outcomes = batch.iter().map(|take| decide(&mut open, take, &mut new, now));
    (outcomes.collect(), new)
}

fn decide(
    open: &mut OpenPermits,
    take: &TakePermits,
    new: &mut Vec<NewPermit>,
    now: Timestamp,
) -> PermitsOutcome {
    let alone: Vec<Decision> = take.asks.iter().map(|ask| decide_alone(open, take, ask, now)).collect();
    let binding = take.asks.iter().zip(&alone).enumerate().filter(|(_, (ask, _))| !ask.spec.shadow);
    let denials = binding.filter_map(|(at, (_, decision))| match decision {
        Decision::Denied(denial) => Some(LimitDenial { denied_by: at, ..*denial }),
        Decision::Allowed => None,
    });
    let denial = denials.reduce(|first, next| LimitDenial {
        denied_by: first.denied_by,
        retry_after: first.retry_after.zip(next.retry_after).map(|(a, b)| a.max(b)),
    });
    let decision = denial.map_or(Decision::Allowed, Decision::Denied);
    let takes = decision.is_allowed() && !take.peek;
    let mut is_taken = Vec::with_capacity(take.asks.len());
    for (ask, alone) in take.asks.iter().zip(&alone) {
        // A shadow policy gives no permit beyond its limit either: there would be no bound for them.
        let taken = takes && alone.is_allowed() && ask.cost > 0;
        is_taken.push(taken);
        if taken {
            let expires_at = now.plus(ask.spec.rule.ttl());
            let permit = OpenPermit { expires_at, cost: ask.cost };
            open.entry((ask.scope, ask.key.clone())).or_default().push(permit);
            let (policy, key) = (ask.policy.clone(), ask.key.clone());
            new.push(NewPermit { id: ask.id, policy, scope: ask.scope, key, cost: ask.cost, expires_at });
        }
    }
    let states = take.asks.iter().map(|ask| ask.spec.rule.limit_state(open_of(open, ask), now));
    let each = alone.iter().zip(states).zip(is_taken).map(|((alone, state), taken)| (*alone, state, taken));
    PermitsOutcome { decision, each: each.collect() }
}

fn decide_alone(open: &OpenPermits, take: &TakePermits, ask: &PermitAsk, now: Timestamp) -> Decision {
    let same = take.asks.iter().filter(|other| (other.scope, &other.key) == (ask.scope, &ask.key));
    let cost = same.map(|same| same.cost).fold(0, u32::saturating_add);
    ask.spec.rule.decide(open_of(open, ask), cost, now)
}

fn open_of<'a>(open: &'a OpenPermits, ask: &PermitAsk) -> &'a [OpenPermit] {
    open.get(&(ask.scope, ask.key.clone())).map_or(&[], Vec::as_slice)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp::from_seconds(1_700_000_000);
    const TTL: Duration = Duration::from_secs(30);

    fn ask(scope: u32, limit: u32, key: &str, cost: u32) -> PermitAsk {
        PermitAsk {
            id: PermitId::new(NOW, [7; 10]),
            policy: PolicyName::parse("p").unwrap(),
            scope,
            spec: ConcurrencySpec::plain(Concurrency::new(limit, TTL).unwrap()),
            key: key.to_owned(),
            cost,
        }
    }

    fn take(asks: Vec<PermitAsk>) -> TakePermits {
        TakePermits { asks, peek: false }
    }

    #[test]
    fn a_batch_is_decided_in_order_all_or_nothing() {
        let batch = [
            take(vec![ask(1, 2, "a", 1), ask(2, 1, "b", 1)]),
            take(vec![ask(1, 2, "a", 1), ask(2, 1, "b", 1)]),
            TakePermits { peek: true, ..take(vec![ask(1, 2, "a", 1)]) },
            take(vec![ask(1, 2, "a", 1)]),
            take(vec![ask(1, 2, "a", 1)]),
        ];
        let (outcomes, new) = plan_permits(permit_keys(&batch), &batch, NOW);
        let allowed: Vec<_> = outcomes.iter().map(|outcome| outcome.decision.is_allowed()).collect();
        assert_eq!(allowed, [true, false, true, true, false]);
        let denied = LimitDenial { denied_by: 1, retry_after: Some(TTL) };
        assert_eq!(outcomes[1].decision, Decision::Denied(denied));
        assert_eq!(outcomes[1].each[0].1.remaining, 1, "nothing was taken of the other one");
        let given: Vec<_> = new.iter().map(|permit| (permit.scope, permit.cost, permit.expires_at)).collect();
        assert_eq!(given, [(1, 1, NOW.plus(TTL)), (2, 1, NOW.plus(TTL)), (1, 1, NOW.plus(TTL))]);
    }

    #[test]
    fn the_same_key_twice_adds_up_and_nothing_takes_nothing() {
        let batch = [
            take(vec![ask(1, 3, "a", 2), ask(1, 3, "a", 2)]),
            take(vec![ask(1, 3, "a", 2), ask(1, 3, "a", 1), ask(1, 3, "a", 0)]),
        ];
        let (outcomes, new) = plan_permits(permit_keys(&batch), &batch, NOW);
        let never = LimitDenial { denied_by: 0, retry_after: None };
        assert_eq!(outcomes[0].decision, Decision::Denied(never));
        assert_eq!(new.iter().map(|permit| permit.cost).collect::<Vec<_>>(), [2, 1]);
        assert_eq!(outcomes[1].each.iter().map(|each| each.2).collect::<Vec<_>>(), [true, true, false]);
    }

    #[test]
    fn a_shadow_denies_nothing_and_gives_no_permit_beyond_its_limit() {
        let mut watching = ask(1, 1, "a", 1);
        watching.spec.shadow = true;
        let batch = [take(vec![watching.clone()]), take(vec![watching, ask(2, 1, "b", 1)])];
        let (outcomes, new) = plan_permits(permit_keys(&batch), &batch, NOW);
        assert!(outcomes.iter().all(|outcome| outcome.decision.is_allowed()));
        assert!(!outcomes[1].each[0].0.is_allowed(), "it shows what it would have denied");
        assert_eq!(new.iter().map(|permit| permit.scope).collect::<Vec<_>>(), [1, 2]);
    }
}
