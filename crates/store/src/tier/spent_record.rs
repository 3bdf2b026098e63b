//! What keys have spent, as a table keeps it: one line of numbers, which says by itself under which rule they were spent.

use std::fmt::Write;
use std::time::Duration;

use weir_core::Timestamp;
use weir_core::tier::{BucketLevel, DAILY, Limit, LimitUsage, MINUTE, Rule, TierLimits, TierRule};

use super::policy::PolicySpec;

/// What one key has spent, or that it has spent nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpentRow {
    /// The number of what it was spent of.
    pub scope: u32,
    /// The key.
    pub key: String,
    /// What it has spent; none when it is as good as new, and need not be kept.
    pub record: Option<SpentRecord>,
    /// When it was written, by the clock of whoever wrote it. None in rows of earlier versions.
    pub saved_at: Option<Timestamp>,
}

/// What was spent, and under which rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpentRecord {
    /// Of a policy.
    Limit(Limit, LimitUsage),
    /// Of a tier.
    Tier(TierLimits, [BucketLevel; 2]),
}

/// A text that no Weir has written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not what a key has spent")]
pub struct UnreadableSpent(String);

impl SpentRecord {
    /// What was spent of a policy; none when that is nothing.
    #[must_use]
    pub fn of_limit(limit: &Limit, spent: LimitUsage) -> Option<Self> {
        (spent != limit.unspent()).then_some(Self::Limit(*limit, spent))
    }

    /// What was spent of a tier; none when that is nothing.
    #[must_use]
    pub fn of_tier(rule: &TierRule, spent: [BucketLevel; 2]) -> Option<Self> {
        let (daily, minute) = (&rule[DAILY], &rule[MINUTE]);
        let limits = TierLimits::new(minute.refill(), minute.capacity(), daily.capacity()).ok()?;
        (spent != rule.unspent()).then_some(Self::Tier(limits, spent))
    }

    /// The same, moved to an earlier time by as much as the clock has stepped back since it was written.
    #[must_use]
    pub fn moved_earlier(mut self, by: Duration) -> Self {
        match &mut self {
            Self::Limit(limit, spent) => limit.move_back(spent, by),
            Self::Tier(limits, spent) => limits.rule().move_back(spent, by),
        }
        self
    }

    /// As a table keeps it.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut text = String::with_capacity(64);
        // Writing to memory cannot fail.
        let _ = match self {
            Self::Limit(limit, LimitUsage(a, b, c)) => {
                let (kind, amount, refill, ms) = PolicySpec::plain(*limit).limit_columns();
                write!(text, "{kind} {amount} {refill} {ms} {a} {b} {c}")
            }
            Self::Tier(limits, [daily, minute]) => {
                let (day, minutes) = (daily.to_parts(), minute.to_parts());
                let (rpm, burst, daily) =
                    (limits.requests_per_minute(), limits.burst_capacity(), limits.daily_limit());
                write!(text, "tier {rpm} {burst} {daily} {} {} {} {}", day.0, day.1, minutes.0, minutes.1)
            }
        };
        text
    }

    /// From its text.
    /// Fails when it is none.
    pub fn parse(text: &str) -> Result<Self, UnreadableSpent> {
        Self::read(text).ok_or_else(|| UnreadableSpent(text.to_owned()))
    }

    fn read(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        let kind = words.next()?;
        let numbers: Vec<i64> = words.map(|word| word.parse().ok()).collect::<Option<_>>()?;
        let small = |at: usize| numbers.get(at).and_then(|number| u32::try_from(*number).ok());
        let large = |at: usize| numbers.get(at).copied();
        if kind == "tier" {
            let limits = TierLimits::new(small(0)?, small(1)?, small(2)?).ok()?;
            let level = |at: usize| Some(BucketLevel::from_parts(large(at)?, small(at.saturating_add(1))?));
            return (numbers.len() == 7).then_some(Self::Tier(limits, [level(3)?, level(5)?]));
        }
        let limit = PolicySpec::limit_from_columns(kind, small(0)?, small(1)?, large(2)?).ok()?;
        (numbers.len() == 6).then_some(Self::Limit(limit, LimitUsage(large(3)?, small(4)?, small(5)?)))
    }
}

#[cfg(test)]
mod tests {
    use weir_core::tier::{FixedWindow, SlidingWindow, Tier, TokenBucket};

    use super::*;

    const NOW: Timestamp = Timestamp::from_seconds(1_700_000_000);

    #[test]
    fn what_was_spent_reads_back_as_it_was_written() {
        let minute = Duration::from_secs(60);
        for limit in [
            Limit::TokenBucket(TokenBucket::new(8, 7, minute).unwrap()),
            Limit::FixedWindow(FixedWindow::new(7, minute).unwrap()),
            Limit::SlidingWindow(SlidingWindow::new(7, minute).unwrap()),
        ] {
            let mut spent = limit.unspent();
            assert_eq!(SpentRecord::of_limit(&limit, spent), None);
            limit.charge(&mut spent, 3, NOW);
            let kept = SpentRecord::of_limit(&limit, spent).unwrap();
            assert_eq!(SpentRecord::parse(&kept.to_text()), Ok(kept));
        }
        let rule = Tier::Free.defaults().rule();
        let mut spent = rule.unspent();
        assert_eq!(SpentRecord::of_tier(&rule, spent), None);
        rule.charge(&mut spent, 3, NOW);
        let kept = SpentRecord::of_tier(&rule, spent).unwrap();
        assert_eq!(kept, SpentRecord::Tier(Tier::Free.defaults(), spent));
        assert_eq!(SpentRecord::parse(&kept.to_text()), Ok(kept));
    }

    #[test]
    fn other_texts_are_refused() {
        for text in
            ["", "tier", "tier 1 2 3", "tier 1 2 3 4 5 6 7 8", "fixed_window 1 0 1000 1 1", "x 1 1 1 1 1 1"]
        {
            assert!(SpentRecord::parse(text).is_err(), "{text}");
        }
    }
}
