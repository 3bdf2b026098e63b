//! What keys have spent, as tables store it: a line of numbers that includes the rule under which they were spent.

use std::fmt::Write;
use std::time::Duration;

use weir_core::Timestamp;
use weir_core::tier::{BucketLevel, DAILY, Limit, LimitUsage, MINUTE, Rule, TierLimits, TierRule};

use super::policy::PolicySpec;

/// A row of the table of usage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpentRow {
    /// The scope of the policy or tier.
    pub scope: u32,
    pub key: String,
    /// `None` if the key has spent nothing: its row is deleted.
    pub record: Option<SpentRecord>,
    /// By the clock of the writer. `None` in rows of earlier versions.
    pub saved_at: Option<Timestamp>,
}

/// The rule and what was spent under it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpentRecord {
    Limit(Limit, LimitUsage),
    Tier(TierLimits, [BucketLevel; 2]),
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unreadable usage of a rate limit key in the database: {0:?}")]
pub struct UnreadableSpent(String);

impl SpentRecord {
    /// Returns `None` if nothing was spent.
    #[must_use]
    pub fn of_limit(limit: &Limit, spent: LimitUsage) -> Option<Self> {
        (spent != limit.unspent()).then_some(Self::Limit(*limit, spent))
    }

    /// Returns `None` if nothing was spent.
    #[must_use]
    pub fn of_tier(rule: &TierRule, spent: [BucketLevel; 2]) -> Option<Self> {
        let (daily, minute) = (&rule[DAILY], &rule[MINUTE]);
        let limits = TierLimits::new(minute.refill(), minute.capacity(), daily.capacity()).ok()?;
        (spent != rule.unspent()).then_some(Self::Tier(limits, spent))
    }

    /// Moves the record to an earlier time, by how much the clock has stepped back since it was written.
    #[must_use]
    pub fn moved_earlier(mut self, by: Duration) -> Self {
        match &mut self {
            Self::Limit(limit, spent) => limit.move_back(spent, by),
            Self::Tier(limits, spent) => limits.rule().move_back(spent, by),
        }
        self
    }

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
    fn records_read_back_as_they_were_written() {
        let minute = Duration::from_secs(60);
        for limit in [
            Limit::TokenBucket(TokenBucket::new(8, 7, minute).unwrap()),
            Limit::FixedWindow(FixedWindow::new(7, minute).unwrap()),
            Limit::SlidingWindow(SlidingWindow::new(7, minute).unwrap()),
        ] {
            let mut spent = limit.unspent();
            assert_eq!(SpentRecord::of_limit(&limit, spent), None);
            limit.charge(&mut spent, 3, NOW);
            let record = SpentRecord::of_limit(&limit, spent).unwrap();
            assert_eq!(SpentRecord::parse(&record.to_text()), Ok(record));
        }
        let rule = Tier::Free.defaults().rule();
        let mut spent = rule.unspent();
        assert_eq!(SpentRecord::of_tier(&rule, spent), None);
        rule.charge(&mut spent, 3, NOW);
        let record = SpentRecord::of_tier(&rule, spent).unwrap();
        assert_eq!(record, SpentRecord::Tier(Tier::Free.defaults(), spent));
        assert_eq!(SpentRecord::parse(&record.to_text()), Ok(record));
    }

    #[test]
    fn malformed_texts_are_refused() {
        for text in
            ["", "tier", "tier 1 2 3", "tier 1 2 3 4 5 6 7 8", "fixed_window 1 0 1000 1 1", "x 1 1 1 1 1 1"]
        {
            assert!(SpentRecord::parse(text).is_err(), "{text}");
        }
    }
}
