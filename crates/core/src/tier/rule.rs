//! What every limit can do, and what it means to spend several at once.

use std::time::Duration;

use crate::Timestamp;

/// How much a key may spend: one limit, or several that are spent together (an array of them).
///
/// What a key has spent is the rule's `Spent`: small, copied freely, and meaningful only to the rule that made it.
/// Time enters as `now`. A `now` that lies before an earlier one never gives anything back.
pub trait Rule: PartialEq {
    /// What one key has spent.
    type Usage: Copy + std::fmt::Debug + PartialEq;

    /// What a key that was never seen has spent.
    fn unspent(&self) -> Self::Usage;

    /// Whether a key that has spent so much is, at `now`, as good as one that was never seen. Once true, it stays true
    /// until something is spent.
    fn is_unspent(&self, spent: &Self::Usage, now: Timestamp) -> bool;

    /// Whether `cost` more fits at `now`. Nothing always fits.
    fn has_room(&self, spent: &Self::Usage, cost: u32, now: Timestamp) -> bool;

    /// Spends `cost`, whether there is room or not. What is spent past the limit is a debt: it has to be made up for
    /// before there is room again.
    fn charge(&self, spent: &mut Self::Usage, cost: u32, now: Timestamp);

    /// Gives back `cost`, never past having spent nothing. Where it was spent at a known time, `taken_at`, and that time
    /// no longer counts, there is nothing to give back.
    fn give_back(&self, spent: &mut Self::Usage, cost: u32, taken_at: Option<Timestamp>, now: Timestamp);

    /// Why `cost` does not fit, and when it will. Asked only when it does not.
    fn denial(&self, spent: &Self::Usage, cost: u32, now: Timestamp) -> LimitDenial;

    /// What was spent under the rule that stood here before, as this one sees it. What was spent stays spent: fractions
    /// are rounded up.
    fn carry_over(&self, old: &Self, spent: Self::Usage, now: Timestamp) -> Self::Usage;

    /// Moves what was spent to an earlier time, because the clock has stepped back by so much since it was written: it then
    /// counts at `now` as it counted when it was written.
    fn move_back(&self, spent: &mut Self::Usage, by: Duration);

    /// Spends `cost` if it fits. A refusal changes nothing.
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

/// The answer to "may I spend this?".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Decision {
    /// Yes, and it is spent.
    Allowed,
    /// No, and nothing was spent.
    Denied(LimitDenial),
}

impl Decision {
    /// Whether the answer is yes.
    #[must_use]
    pub const fn is_allowed(&self) -> bool {
        matches!(self, Self::Allowed)
    }
}

/// Why there was no room, and when there will be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitDenial {
    /// The first limit that had no room, counted from 0 in the order they were given.
    pub denied_by: usize,
    /// The wait after which the same question is answered with yes, if nothing else is spent: to the microsecond, not
    /// one less. None when it never will be, because it asks for more than a limit ever holds.
    pub retry_after: Option<Duration>,
}

impl LimitDenial {
    /// The refusal of a single limit.
    #[must_use]
    pub const fn single(retry_after: Option<Duration>) -> Self {
        Self { denied_by: 0, retry_after }
    }

    /// The refusal of several limits that are spent together: named after the first, as long as the longest.
    fn combine(denials: impl Iterator<Item = (usize, Self)>) -> Option<Self> {
        denials.map(|(denied_by, denial)| Self { denied_by, ..denial }).reduce(|first, next| Self {
            denied_by: first.denied_by,
            retry_after: first.retry_after.zip(next.retry_after).map(|(a, b)| a.max(b)),
        })
    }
}

/// Where a key stands with one limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitState {
    /// The most it can have.
    pub limit: u32,
    /// What it can still spend at once.
    pub remaining: u32,
    /// When it can spend one more than that; zero when it can spend the most already.
    pub next_after: Duration,
    /// When nothing it has spent counts any more.
    pub reset_after: Duration,
}

/// Several limits spent together: all of them or none.
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
        let lacking =
            self.iter().zip(spent).enumerate().filter(|(_, (rule, s))| !rule.has_room(s, cost, now));
        let denials = lacking.map(|(at, (rule, spent))| (at, rule.denial(spent, cost, now)));
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

/// A rule, and the number under which its keys are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScopedRule<R> {
    /// A number that its owner gives it, and that stays the same when the rule changes. The same text is another key
    /// under another number; all tiers share one, so that a user who changes plans stays the same user.
    pub scope: u32,
    /// What each key may spend.
    pub rule: R,
}

/// One key's part in a decision about several keys.
#[derive(Debug)]
pub struct KeyCharge<'a, R: Rule> {
    /// What it may spend.
    pub rule: &'a R,
    /// What it has spent. Each key stands in a decision once; costs of the same key are added up before.
    pub spent: &'a mut R::Usage,
    /// What it asks for.
    pub cost: u32,
}

/// Spends for every key or for none. A refusal names the first claim without room and changes nothing.
pub fn take_all<R: Rule>(claims: &mut [KeyCharge<'_, R>], now: Timestamp) -> Decision {
    let lacking = claims.iter().enumerate().filter(|(_, c)| !c.rule.has_room(c.spent, c.cost, now));
    let denials = lacking.map(|(at, c)| (at, c.rule.denial(c.spent, c.cost, now)));
    if let Some(denial) = LimitDenial::combine(denials) {
        return Decision::Denied(denial);
    }
    for claim in claims.iter_mut().filter(|claim| claim.cost > 0) {
        claim.rule.charge(claim.spent, claim.cost, now);
    }
    Decision::Allowed
}
