//! Says in a sentence why a check was decided as it was: which limit decided, how it stood, and when it would allow.

use std::fmt::Write;
use std::time::Duration;

use weir_core::PermitId;
use weir_core::tier::{Decision, Limit};
use weir_store::slot::span_text;
use weir_store::tier::{ConcurrencyPolicy, LimitCheck, LimitOutcome, OnOutage};

use super::limits::CheckResult;

/// A decision to explain.
pub(super) struct Explained<'a> {
    pub(super) asks: &'a [LimitCheck<'a>],
    pub(super) taken: &'a LimitOutcome,
    /// The results, in the order of the asks.
    pub(super) results: &'a [CheckResult],
    /// Whether nothing was to be spent.
    pub(super) peek: bool,
}

impl Explained<'_> {
    /// Explains each item, in their order.
    pub(super) fn sentences(&self) -> Vec<String> {
        (0..self.asks.len().min(self.results.len())).map(|at| self.explain(at)).collect()
    }

    fn explain(&self, at: usize) -> String {
        let (ask, result) = (&self.asks[at], &self.results[at]);
        let spec = &ask.policy.spec;
        let outage = self.taken.decided_alone.then_some(spec.on_outage);
        let name = &ask.policy.name;
        let mut text = match outage {
            Some(OnOutage::Open) => {
                return format!(
                    "Redis does not answer, and policy {name} is open then: allowed without counting."
                );
            }
            Some(OnOutage::Closed) => format!("Redis does not answer, and policy {name} is closed then"),
            Some(OnOutage::Local) | None => format!("Policy {name} allows {}", describe(&spec.limit)),
        };
        // Writing to a string cannot fail.
        let _ = match outage {
            Some(OnOutage::Closed) => {
                write!(text, ": denied, try again {}.", within(result.retry_after.unwrap_or_default()))
            }
            _ => write!(text, "; {}.", self.standing(at)),
        };
        let is_denied_alone = self.taken.each.get(at).is_some_and(|(decision, _)| !decision.is_allowed());
        if spec.shadow && is_denied_alone {
            text.push_str(" It only observes, so it denies nothing.");
        }
        if outage == Some(OnOutage::Local) {
            text.push_str(" Redis does not answer, so this server counts alone.");
        }
        text
    }

    /// How the limit of an item stood, and what that means for the item.
    fn standing(&self, at: usize) -> String {
        let (ask, result) = (&self.asks[at], &self.results[at]);
        let (state, cost) = (&result.limit_state, self.cost(ask));
        let left = format!("{} of {} left", state.remaining, state.limit);
        let reset = if state.reset_after.is_zero() {
            String::new()
        } else {
            format!(", all of it again {}", within(state.reset_after))
        };
        let is_denied_alone = self.taken.each.get(at).is_some_and(|(decision, _)| !decision.is_allowed());
        match (self.taken.decision, is_denied_alone) {
            (_, true) => {
                let decided = if self.decider() == Some(at) { " and decided" } else { "" };
                format!("with {left} it has no room for {cost}{decided}: {}", until(result.retry_after))
            }
            (_, false) if cost == 0 => format!("nothing is asked for, {left}{reset}"),
            (Decision::Allowed, false) if self.peek => {
                format!("{cost} would fit, {left}{reset}, nothing is spent")
            }
            (Decision::Allowed, false) => format!("{cost} is spent, {left}{reset}"),
            (Decision::Denied(_), false) => match self.decider().filter(|decider| *decider != at) {
                Some(decider) => {
                    let other = &self.asks[decider];
                    let (policy, key) = (&other.policy.name, other.key);
                    format!(
                        "{cost} would fit, {left}, but policy {policy} denied key {key}: nothing is spent"
                    )
                }
                // On a cluster others can have given back what they took.
                None => format!("it had no room for {cost} and decided, by now it has, {left}"),
            },
        }
    }

    /// The cost of all items with the same policy and key: they are decided as one.
    fn cost(&self, ask: &LimitCheck<'_>) -> u32 {
        let is_same =
            |other: &&LimitCheck<'_>| (other.policy.scope(), other.key) == (ask.policy.scope(), ask.key);
        self.asks.iter().filter(is_same).map(|same| same.cost).fold(0, u32::saturating_add)
    }

    /// The item whose limit denied the whole.
    fn decider(&self) -> Option<usize> {
        match self.taken.decision {
            Decision::Denied(denial) => Some(denial.denied_by),
            Decision::Allowed => None,
        }
    }
}

/// Explains an item that wants a permit. `alone` is the decision that it would have had by itself.
pub(super) fn explain_permit(
    policy: &ConcurrencyPolicy,
    cost: u32,
    result: &CheckResult,
    alone: Decision,
    permit: Option<PermitId>,
    is_outage: bool,
) -> String {
    let (name, rule, state) = (&policy.name, &policy.spec.rule, &result.limit_state);
    if is_outage {
        let outage = format!("The store does not answer, and policy {name} is");
        return match result.retry_after {
            Some(wait) if !alone.is_allowed() => {
                format!("{outage} closed then: denied, try again {}.", within(wait))
            }
            _ => format!("{outage} open then: allowed without a permit."),
        };
    }
    let left = format!("{} of {} free", state.remaining, state.limit);
    let standing = match (alone, permit) {
        (Decision::Denied(denial), _) => match denial.retry_after {
            Some(wait) => format!(
                "with {left} there is no room for {cost}: there is when others are given back, at the latest {}",
                within(wait)
            ),
            None => format!("{cost} is above the limit and never fits"),
        },
        (Decision::Allowed, Some(_)) => format!("{cost} is in use by the permit, {left}"),
        (Decision::Allowed, None) => format!("there is room for {cost}, {left}, and nothing is taken"),
    };
    let rule = format!("{} in use at once, each for {} at most", rule.limit(), span_text(rule.ttl()));
    let shadow = if policy.spec.shadow && !alone.is_allowed() {
        " It only observes, so it denies nothing."
    } else {
        ""
    };
    format!("Policy {name} allows {rule}; {standing}.{shadow}")
}

fn describe(limit: &Limit) -> String {
    match limit {
        Limit::FixedWindow(window) => {
            format!("{} in each window of {}", window.limit(), span_text(window.window()))
        }
        Limit::SlidingWindow(window) => {
            format!("{} in any span of {}", window.limit(), span_text(window.window()))
        }
        Limit::TokenBucket(bucket) => {
            let (capacity, refill, period) = (bucket.capacity(), bucket.refill(), span_text(bucket.period()));
            format!("{capacity} at once and {refill} more every {period}")
        }
    }
}

/// When a denied cost would be allowed.
fn until(retry_after: Option<Duration>) -> String {
    match retry_after {
        None => "it never has, the cost is above the limit".to_owned(),
        Some(wait) => format!("it would allow that {}, if nothing else is spent until then", within(wait)),
    }
}

/// Whole milliseconds, rounded up like those of the response.
fn within(span: Duration) -> String {
    let millis = span.as_micros().div_ceil(1_000);
    format!("in {}.{:03} s", millis / 1_000, millis % 1_000)
}
