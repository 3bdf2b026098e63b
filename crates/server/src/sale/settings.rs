//! Settings of sale: the throttle of buyers (enforced by `SaleService::attempt`, which `routes/purchases.rs` calls first) and
//! their challenge.

use url::Url;

use crate::settings::parse::boolean;
use crate::settings::source::{SettingError, SettingsReader};

#[derive(Clone, PartialEq, Eq)]
pub struct SaleSettings {
    /// `sale.user_per_second`: how often a user may try to buy per second; 0 is no limit.
    pub user_per_second: u32,
    /// `sale.challenge`: URL of the verifier of challenge tokens, in the protocol of reCAPTCHA, hCaptcha and Turnstile.
    pub challenge: Option<Url>,
    /// `WEIR_SALE_CHALLENGE_SECRET`: the secret with which this server authenticates to the verifier.
    pub challenge_secret: Option<String>,
    /// `sale.allow_reset`: whether a product that is active or has purchases can be deleted. Unless it is set, it can on a
    /// loopback address.
    pub allow_reset: bool,
}

impl SaleSettings {
    pub(crate) fn read(reader: &mut SettingsReader, is_on_loopback: bool) -> Result<Self, SettingError> {
        let user_per_second =
            reader.get("sale.user_per_second", 1, up_to(1_000), "a number from 0 (no limit) to 1000")?;
        let challenge = reader.get(
            "sale.challenge",
            None,
            |text| if text.is_empty() { Some(None) } else { http_url(text).map(Some) },
            "an http:// or https:// URL of a verifier, or nothing",
        )?;
        let secret = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        let challenge_secret =
            reader.get_optional("sale.challenge_secret", secret, "the secret the verifier gave")?;
        if challenge.is_some() && challenge_secret.is_none() {
            let allowed = "set together with WEIR_SALE_CHALLENGE_SECRET, which the verifier asks for";
            return Err(SettingError::new("sale.challenge", "set alone", allowed));
        }
        let allow_reset = reader.get_optional("sale.allow_reset", boolean, "true or false")?;
        let allow_reset = allow_reset.unwrap_or(is_on_loopback);
        Ok(Self { user_per_second, challenge, challenge_secret, allow_reset })
    }
}

/// Returns a parser of numbers from 0 to `max`.
pub(crate) fn up_to(max: u32) -> impl Fn(&str) -> Option<u32> {
    move |text| text.trim().parse().ok().filter(|number| *number <= max)
}

fn http_url(text: &str) -> Option<Url> {
    Url::parse(text).ok().filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host())
}

impl std::fmt::Debug for SaleSettings {
    /// Shows whether there is a secret, never the secret itself.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SaleSettings")
            .field("user_per_second", &self.user_per_second)
            .field("challenge", &self.challenge.as_ref().map(Url::host_str))
            .field("challenge_secret", &self.challenge_secret.as_ref().map(|_| "…"))
            .field("allow_reset", &self.allow_reset)
            .finish()
    }
}
