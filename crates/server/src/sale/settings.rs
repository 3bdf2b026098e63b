//! Settings of sale: who a buyer is, the throttle of buyers (enforced by `SaleService::attempt`, which
//! `routes/purchases.rs` calls first) and their challenge.

pub(crate) mod challenge;

use self::challenge::ChallengeSettings;
use crate::settings::parse::boolean;
use crate::settings::source::{SettingError, SettingsReader};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SaleSettings {
    /// `sale.user_per_second`: how often a user may try to buy per second; 0 is no limit.
    pub user_per_second: u32,
    /// `sale.identity`: where a buyer's name comes from.
    pub identity: BuyerIdentity,
    /// `[sale.challenge]`: how buyers show that they are people; `None` if they need not.
    pub challenge: Option<ChallengeSettings>,
    /// `sale.log_attempts`: whether each attempt to buy is a log line.
    pub log_attempts: bool,
    /// `sale.allow_reset`: whether a product that is active or has purchases can be deleted. Unless it is set, it can on a
    /// loopback address.
    pub allow_reset: bool,
}

/// Where a buyer's name comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BuyerIdentity {
    /// The header `X-User-Id`, which whatever stands in front of Weir vouches for.
    Header,
    /// The subject of a token.
    Token,
}

impl SaleSettings {
    pub(crate) fn read(reader: &mut SettingsReader, is_on_loopback: bool) -> Result<Self, SettingError> {
        let user_per_second =
            reader.get("sale.user_per_second", 1, up_to(1_000), "a number from 0 (no limit) to 1000")?;
        let identity = |text: &str| match text {
            "header" => Some(BuyerIdentity::Header),
            "token" => Some(BuyerIdentity::Token),
            _ => None,
        };
        let identity =
            reader.get("sale.identity", BuyerIdentity::Header, identity, "\"header\" or \"token\"")?;
        let challenge = ChallengeSettings::read(reader)?;
        let log_attempts = reader.get("sale.log_attempts", false, boolean, "true or false")?;
        let allow_reset = reader.get_optional("sale.allow_reset", boolean, "true or false")?;
        let allow_reset = allow_reset.unwrap_or(is_on_loopback);
        Ok(Self { user_per_second, identity, challenge, log_attempts, allow_reset })
    }
}

/// Returns a parser of numbers from 0 to `max`.
pub(crate) fn up_to(max: u32) -> impl Fn(&str) -> Option<u32> {
    move |text| text.trim().parse().ok().filter(|number| *number <= max)
}
