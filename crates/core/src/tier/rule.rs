//! The operations of every limit, and how several limits are spent at once.

use std::time::Duration;

use crate::Timestamp;

/// How much a key may spend: one limit, or several that are spent together (an array of limits).
///
/// What a key has spent is the rule's `Usage`: small, `Copy`, and meaningful only to the rule that created it. Time is
/// passed as `now`. A `now` before an earlier one never gives anything back.
pub trait Rule: PartialEq {
    /// What one key has spent.
    type Usage: Copy + std::fmt::Debug + PartialEq;

    /// Returns the usage of a key that was never used.
    fn unspent(&self) -> Self::Usage;

    /// Whether the usage is, at `now`, equivalent to that of a key that was never used. Once true, it stays true until
    /// something is spent.
    fn is_unspent(&self, spent: &Self::Usage, now: Timestamp) -> bool;

    /// Whether `cost` more fits at `now`. Zero always fits.
    fn has_room(&self, spent: &Self::Usage, cost: u32, now: Timestamp) -> bool;

    /// Spends `cost` even if there is no room. What exceeds the limit is a debt, which must be regained before there
    /// is room again.
    fn charge(&self, spent: &mut Self::Usage, cost: u32, now: Timestamp);

    /// Gives back `cost`, but never more than was spent. If `taken_at` is known and what was spent then no longer
    /// counts, nothing is given back.
    fn give_back(&self, spent: &mut Self::Usage, cost: u32, taken_at: Option<Timestamp>, now: Timestamp);

    /// Returns why `cost` does not fit and when it will. Only called when it does not fit.
    fn denial(&self, spent: &Self::Usage, cost: u32, now: Timestamp) -> LimitDenial;

    /// Converts usage under the previous rule to this one. What was spent stays spent: fractions are rounded up.
    fn carry_over(&self, old: &Self, spent: Self::Usage, now: Timestamp) -> Self::Usage;

    /// Moves usage to an earlier time because the clock has stepped back by that much since it was written: it then
    /// counts at `now` as it counted when it was written.
    fn move_back(&self, spent: &mut Self::Usage, by: Duration);

    /// Spends `cost` if it fits. A denial changes nothing.
    fn take(&self, spent: &mut Self::Usage, cost: u32, now: Timestamp) -> Decision {
        if !self.has_room(spent, cost, now) {
            return Decision::Denied(self.denial(spent, cost, now));
        }
        if cost > 0 {
            self.charge(spent, cost, now);
        }
        Decision::Allowed
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Decision {
    /// The cost was spent.
    Allowed,
    /// Nothing was spent.
    Denied(LimitDenial),
}

impl Decision {
    #[must_use]
    pub const fn is_allowed(&self) -> bool {
        matches!(self, Self::Allowed)
    }
}

/// Why a cost was denied, and when it can be spent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitDenial {
    /// The index of the first limit without room.
    pub denied_by: usize,
    /// The wait after which the same request succeeds if nothing else is spent, exact to the microsecond. `None` if it
    /// never will, because the cost exceeds a limit.
    pub retry_after: Option<Duration>,
}

impl LimitDenial {
    /// Creates the denial of a single limit.
    #[must_use]
    pub const fn single(retry_after: Option<Duration>) -> Self {
        Self { denied_by: 0, retry_after }
    }

    /// Combines the denials of limits that are spent together: the index of the first and the longest wait.
    fn combine(denials: impl Iterator<Item = (usize, Self)>) -> Option<Self> {
        denials.map(|(denied_by, denial)| Self { denied_by, ..denial }).reduce(|first, next| Self {
            denied_by: first.denied_by,
            retry_after: first.retry_after.zip(next.retry_after).map(|(a, b)| a.max(b)),
        })
    }
}

/// The state of a key under one limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitState {
    pub limit: u32,
    /// What the key can spend now.
    pub remaining: u32,
    /// When the key can spend one more than that; zero if it can spend the limit already.
    pub next_after: Duration,
    /// When nothing that was spent counts any more.
    pub reset_after: Duration,
}

/// Several limits that are spent together: all or none.
impl<R: Rule, const N: usize> Rule for [R; N] {
    type Usage = [R::Usage; N];

    fn unspent(&self) -> Self::Usage {
        self.each_ref().map(Rule::unspent)
    }

    fn is_unspent(&self, spent: &Self::Usage, now: Timestamp) -> bool {
        self.iter().zip(spent).all(|(rule, spent)| rule.is_unspent(spent, now))
    }

    fn has_room(&self, spent: &Self::Usage, cost: u32, now: Timestamp) -> bool {
        self.iter().zip(spent).all(|(rule, spent)| rule.has_room(spent, cost, now))
    }

    fn charge(&self, spent: &mut Self::Usage, cost: u32, now: Timestamp) {
        for (rule, spent) in self.iter().zip(spent) {
            rule.charge(spent, cost, now);
        }
    }

    fn give_back(&self, spent: &mut Self::Usage, cost: u32, taken_at: Option<Timestamp>, now: Timestamp) {
        for (rule, spent) in self.iter().zip(spent) {
            rule.give_back(spent, cost, taken_at, now);
        }
    }

    fn denial(&self, spent: &Self::Usage, cost: u32, now: Timestamp) -> LimitDenial {
        let exhausted =
            self.iter().zip(spent).enumerate().filter(|(_, (rule, s))| !rule.has_room(s, cost, now));
        let denials = exhausted.map(|(at, (rule, spent))| (at, rule.denial(spent, cost, now)));
        LimitDenial::combine(denials).unwrap_or(LimitDenial::single(Some(Duration::ZERO)))
    }

    fn carry_over(&self, old: &Self, mut spent: Self::Usage, now: Timestamp) -> Self::Usage {
        for ((rule, old), spent) in self.iter().zip(old).zip(&mut spent) {
            *spent = rule.carry_over(old, *spent, now);
        }
        spent
    }

    fn move_back(&self, spent: &mut Self::Usage, by: Duration) {
        for (rule, spent) in self.iter().zip(spent) {
            rule.move_back(spent, by);
        }
    }
}

/// A rule, and the scope of its keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScopedRule<R> {
    /// A number chosen by the owner of the rule, which stays the same when the rule changes. The same text in another
    /// scope is another key. All tiers share one scope, so that a user who changes plans remains the same user.
    pub scope: u32,
    pub rule: R,
}

/// One key in a decision about several keys.
#[derive(Debug)]
pub struct KeyCharge<'a, R: Rule> {
    pub rule: &'a R,
    /// What the key has spent. A key occurs once per decision; the caller adds up the costs of the same key.
    pub spent: &'a mut R::Usage,
    pub cost: u32,
}

/// Spends for all keys or for none. A denial names the first key without room and changes nothing.
pub fn take_all<R: Rule>(claims: &mut [KeyCharge<'_, R>], now: Timestamp) -> Decision {
    let exhausted = claims.iter().enumerate().filter(|(_, c)| !c.rule.has_room(c.spent, c.cost, now));
    let denials = exhausted.map(|(at, c)| (at, c.rule.denial(c.spent, c.cost, now)));
    if let Some(denial) = LimitDenial::combine(denials) {
        return Decision::Denied(denial);
    }
    for claim in claims.iter_mut().filter(|claim| claim.cost > 0) {
        claim.rule.charge(claim.spent, claim.cost, now);
    }
    Decision::Allowed
}
