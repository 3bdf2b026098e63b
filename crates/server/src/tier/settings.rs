//! Settings of tier: the limits of each tier, and policies.

mod policy;
pub(crate) mod policy_input;

use std::collections::BTreeMap;

use weir_core::PolicyName;
use weir_core::tier::{Limit, Tier, TierLimits, Tiers};

use self::policy_input::PolicyDefinition;
use crate::settings::parse::{boolean, count};
use crate::settings::source::{SettingError, SettingsReader};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TierSettings {
    /// `rate_limit.enabled`: whether AI calls are limited by plan.
    pub enabled: bool,
    /// `rate_limit.tiers.<tier>.*`: the limits of a tier until an operator changes them.
    pub tiers: Tiers,
    /// `rate_limit.keys_max`: how many keys may have spending in memory, of policies and of tiers each.
    pub keys_max: usize,
    /// `tier.plan_claim`: the claim of tokens that has the plan of users without a subscription.
    pub plan_claim: Option<String>,
    /// `[policies.<name>]`: created at the start, unless an operator has created one of the same name.
    pub policies: BTreeMap<PolicyName, PolicyDefinition>,
}

/// The setting names of a tier, in the order of [`TierLimits::new`].
const fn keys(tier: Tier) -> [&'static str; 3] {
    match tier {
        Tier::Free => [
            "rate_limit.tiers.free.requests_per_minute",
            "rate_limit.tiers.free.burst_capacity",
            "rate_limit.tiers.free.daily_limit",
        ],
        Tier::Starter => [
            "rate_limit.tiers.starter.requests_per_minute",
            "rate_limit.tiers.starter.burst_capacity",
            "rate_limit.tiers.starter.daily_limit",
        ],
        Tier::Pro => [
            "rate_limit.tiers.pro.requests_per_minute",
            "rate_limit.tiers.pro.burst_capacity",
            "rate_limit.tiers.pro.daily_limit",
        ],
        Tier::Business => [
            "rate_limit.tiers.business.requests_per_minute",
            "rate_limit.tiers.business.burst_capacity",
            "rate_limit.tiers.business.daily_limit",
        ],
    }
}

impl TierSettings {
    pub(crate) fn read(reader: &mut SettingsReader) -> Result<Self, SettingError> {
        let mut tiers = Tiers::default();
        for tier in Tier::ALL {
            tiers.set(tier, read_tier(reader, tier)?);
        }
        Ok(Self {
            enabled: reader.get("rate_limit.enabled", true, boolean, "true or false")?,
            tiers,
            keys_max: reader.get(
                "rate_limit.keys_max",
                20_000_000,
                count(1_000_000_000),
                "a number from 1 to 1000000000",
            )?,
            plan_claim: reader.get("tier.plan_claim", None, claim_name, "the name of a claim of tokens")?,
            policies: policy::read_all(&reader.tables("policies"))?,
        })
    }
}

/// Empty: no claim.
fn claim_name(text: &str) -> Option<Option<String>> {
    Some((!text.is_empty()).then(|| text.to_owned()))
}

fn read_tier(reader: &mut SettingsReader, tier: Tier) -> Result<TierLimits, SettingError> {
    let default = tier.defaults();
    let [rpm, burst, daily] = keys(tier);
    let mut amount = |key: &'static str, default: u32| {
        let in_range = |text: &str| text.trim().parse().ok().filter(|n| (1..=Limit::MAX).contains(n));
        reader.get(key, default, in_range, "a number from 1 to 2147483647")
    };
    let numbers = [
        amount(rpm, default.requests_per_minute())?,
        amount(burst, default.burst_capacity())?,
        amount(daily, default.daily_limit())?,
    ];
    TierLimits::new(numbers[0], numbers[1], numbers[2])
        .map_err(|problem| SettingError::new(format!("rate_limit.tiers.{tier}"), "out of range", problem))
}
