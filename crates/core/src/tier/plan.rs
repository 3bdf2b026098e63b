//! Subscription plans, the tier of each, and what each tier allows.

use std::fmt;
use std::str::FromStr;

use super::bucket::TokenBucket;
use super::limit::{LimitError, checked_amount};

/// The index of the daily bucket in a [`TierRule`]. It comes first, so that an exhausted day is the reason that
/// callers see.
pub const DAILY: usize = 0;
/// The index of the minute's bucket in a [`TierRule`].
pub const MINUTE: usize = 1;

/// The two buckets of a user, which are spent together.
pub type TierRule = [TokenBucket; 2];

const MINUTE_MS: u32 = 60_000;
const DAY_MS: u32 = 86_400_000;

/// A subscription plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Plan {
    /// No subscription; also the plan of unknown users.
    #[default]
    Free,
    StarterMonthly,
    StarterYearly,
    ProMonthly,
    ProYearly,
    BusinessMonthly,
    BusinessYearly,
}

/// A text that is not the name of a plan. The message completes the sentence "plan …".
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "must be one of FREE, STARTER_MONTHLY, STARTER_YEARLY, PRO_MONTHLY, PRO_YEARLY, BUSINESS_MONTHLY, BUSINESS_YEARLY"
)]
pub struct UnknownPlan;

impl Plan {
    pub const ALL: [Self; 7] = [
        Self::Free,
        Self::StarterMonthly,
        Self::StarterYearly,
        Self::ProMonthly,
        Self::ProYearly,
        Self::BusinessMonthly,
        Self::BusinessYearly,
    ];

    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Free => "FREE",
            Self::StarterMonthly => "STARTER_MONTHLY",
            Self::StarterYearly => "STARTER_YEARLY",
            Self::ProMonthly => "PRO_MONTHLY",
            Self::ProYearly => "PRO_YEARLY",
            Self::BusinessMonthly => "BUSINESS_MONTHLY",
            Self::BusinessYearly => "BUSINESS_YEARLY",
        }
    }

    #[must_use]
    pub const fn tier(self) -> Tier {
        match self {
            Self::Free => Tier::Free,
            Self::StarterMonthly | Self::StarterYearly => Tier::Starter,
            Self::ProMonthly | Self::ProYearly => Tier::Pro,
            Self::BusinessMonthly | Self::BusinessYearly => Tier::Business,
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Plan {
    type Err = UnknownPlan;

    fn from_str(text: &str) -> Result<Self, UnknownPlan> {
        Self::ALL.into_iter().find(|plan| plan.as_str() == text).ok_or(UnknownPlan)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tier {
    Free,
    Starter,
    Pro,
    Business,
}

/// A text that is not the name of a tier. The message completes the sentence "tier …".
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be one of free, starter, pro, business")]
pub struct UnknownTier;

impl Tier {
    pub const ALL: [Self; 4] = [Self::Free, Self::Starter, Self::Pro, Self::Business];

    /// Returns the name used in settings and paths.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Starter => "starter",
            Self::Pro => "pro",
            Self::Business => "business",
        }
    }

    /// Returns the limits that apply unless settings change them.
    #[must_use]
    pub const fn defaults(self) -> TierLimits {
        let (requests_per_minute, burst_capacity, daily_limit) = match self {
            Self::Free => (5, 8, 50),
            Self::Starter => (15, 20, 200),
            Self::Pro => (30, 40, 500),
            Self::Business => (60, 80, 1_000),
        };
        TierLimits { requests_per_minute, burst_capacity, daily_limit }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Tier {
    type Err = UnknownTier;

    fn from_str(text: &str) -> Result<Self, UnknownTier> {
        Self::ALL.into_iter().find(|tier| tier.as_str() == text).ok_or(UnknownTier)
    }
}

/// The limits of a tier. All three are from 1 to [`Limit::MAX`](super::Limit::MAX).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TierLimits {
    requests_per_minute: u32,
    burst_capacity: u32,
    daily_limit: u32,
}

impl TierLimits {
    pub fn new(requests_per_minute: u32, burst_capacity: u32, daily_limit: u32) -> Result<Self, LimitError> {
        Ok(Self {
            requests_per_minute: checked_amount(requests_per_minute)?,
            burst_capacity: checked_amount(burst_capacity)?,
            daily_limit: checked_amount(daily_limit)?,
        })
    }

    /// The tokens that the minute's bucket gains per minute; the limit that users are shown.
    #[must_use]
    pub const fn requests_per_minute(&self) -> u32 {
        self.requests_per_minute
    }

    /// The capacity of the minute's bucket.
    #[must_use]
    pub const fn burst_capacity(&self) -> u32 {
        self.burst_capacity
    }

    /// The capacity of the daily bucket, and what it gains in 24 hours.
    #[must_use]
    pub const fn daily_limit(&self) -> u32 {
        self.daily_limit
    }

    #[must_use]
    pub const fn rule(&self) -> TierRule {
        [
            TokenBucket::from_checked(self.daily_limit, self.daily_limit, DAY_MS),
            TokenBucket::from_checked(self.burst_capacity, self.requests_per_minute, MINUTE_MS),
        ]
    }

    /// Returns the message for a user whose request was denied.
    #[must_use]
    pub fn message(&self, denied_by: usize) -> String {
        if denied_by == DAILY {
            format!("Daily AI request limit of {} exceeded. Limit resets in 24 hours.", self.daily_limit)
        } else {
            format!(
                "Rate limit exceeded. Maximum {} AI requests per minute. Please try again shortly.",
                self.requests_per_minute
            )
        }
    }
}

/// The current limits of all tiers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiers {
    free: TierLimits,
    starter: TierLimits,
    pro: TierLimits,
    business: TierLimits,
}

impl Default for Tiers {
    fn default() -> Self {
        Self {
            free: Tier::Free.defaults(),
            starter: Tier::Starter.defaults(),
            pro: Tier::Pro.defaults(),
            business: Tier::Business.defaults(),
        }
    }
}

impl Tiers {
    #[must_use]
    pub const fn get(&self, tier: Tier) -> &TierLimits {
        match tier {
            Tier::Free => &self.free,
            Tier::Starter => &self.starter,
            Tier::Pro => &self.pro,
            Tier::Business => &self.business,
        }
    }

    pub const fn set(&mut self, tier: Tier, limits: TierLimits) {
        let current = match tier {
            Tier::Free => &mut self.free,
            Tier::Starter => &mut self.starter,
            Tier::Pro => &mut self.pro,
            Tier::Business => &mut self.business,
        };
        *current = limits;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_and_tiers_are_parsed_by_exact_name() {
        for plan in Plan::ALL {
            assert_eq!(plan.as_str().parse(), Ok(plan));
        }
        for tier in Tier::ALL {
            assert_eq!(tier.as_str().parse(), Ok(tier));
        }
        for text in ["", "PRO", "pro_monthly", "PRO_MONTHLY ", "ENTERPRISE"] {
            assert_eq!(text.parse::<Plan>(), Err(UnknownPlan));
        }
        assert_eq!("FREE".parse::<Tier>(), Err(UnknownTier));
        assert_eq!(Plan::default().tier(), Tier::Free, "nobody is unlimited by being unknown");
    }

    #[test]
    fn monthly_and_yearly_plans_have_the_same_tier() {
        let tiers = Plan::ALL.map(Plan::tier);
        let expected =
            [Tier::Free, Tier::Starter, Tier::Starter, Tier::Pro, Tier::Pro, Tier::Business, Tier::Business];
        assert_eq!(tiers, expected);
    }

    #[test]
    fn the_defaults_are_the_recommended_numbers() {
        let numbers = Tier::ALL.map(|tier| {
            let limits = Tiers::default();
            let limits = limits.get(tier);
            (limits.requests_per_minute(), limits.burst_capacity(), limits.daily_limit())
        });
        assert_eq!(numbers, [(5, 8, 50), (15, 20, 200), (30, 40, 500), (60, 80, 1_000)]);
    }

    #[test]
    fn a_tier_is_a_bucket_for_the_day_and_one_for_the_minute() {
        let rule = Tier::Pro.defaults().rule();
        let [day, minute] = [86_400, 60].map(std::time::Duration::from_secs);
        assert_eq!(rule[DAILY], TokenBucket::new(500, 500, day).unwrap());
        assert_eq!(rule[MINUTE], TokenBucket::new(40, 30, minute).unwrap());
    }

    #[test]
    fn one_tier_changes_and_the_others_do_not() {
        let mut tiers = Tiers::default();
        let limits = TierLimits::new(1, 2, 3).unwrap();
        tiers.set(Tier::Pro, limits);
        assert_eq!(tiers.get(Tier::Pro), &limits);
        assert_eq!(tiers.get(Tier::Business), &Tier::Business.defaults());
        assert_eq!(TierLimits::new(1, 0, 3), Err(LimitError::Amount));
    }

    #[test]
    fn messages_name_the_limit_that_was_reached() {
        assert_eq!(
            Tier::Pro.defaults().message(MINUTE),
            "Rate limit exceeded. Maximum 30 AI requests per minute. Please try again shortly."
        );
        assert_eq!(
            Tier::Starter.defaults().message(DAILY),
            "Daily AI request limit of 200 exceeded. Limit resets in 24 hours."
        );
    }
}
