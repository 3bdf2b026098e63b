//! Settings of the challenge of buyers: the provider, its keys, and where its script and its verifier are.

use url::Url;

use crate::settings::parse::optional_trusted_url;
use crate::settings::secret::Secret;
use crate::settings::source::{SettingError, SettingsReader};

/// Who says whether a buyer is a person.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provider {
    Turnstile,
    HCaptcha,
    ReCaptcha,
}

/// The challenge of buyers.
#[derive(Clone, PartialEq, Eq)]
pub struct ChallengeSettings {
    pub provider: Provider,
    /// The key of the invisible challenge, and of the interactive one unless that has a key of its own.
    pub keys: KeyPair,
    /// The key of the interactive challenge. reCAPTCHA's keys are for one of the two only.
    pub interactive_keys: Option<KeyPair>,
    /// Where tokens are verified.
    pub verify_url: Url,
    /// The script that the page loads.
    pub script_url: Url,
}

/// What the provider knows this site by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyPair {
    /// The public key, which the page shows to the provider.
    pub site_key: String,
    /// The secret with which this server asks the verifier.
    pub secret: Secret,
}

const PROVIDERS: [Provider; 3] = [Provider::Turnstile, Provider::HCaptcha, Provider::ReCaptcha];

impl Provider {
    /// The name in settings and on the page.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Turnstile => "turnstile",
            Self::HCaptcha => "hcaptcha",
            Self::ReCaptcha => "recaptcha",
        }
    }

    const fn verify_url(self) -> &'static str {
        match self {
            Self::Turnstile => "https://challenges.cloudflare.com/turnstile/v0/siteverify",
            Self::HCaptcha => "https://api.hcaptcha.com/siteverify",
            Self::ReCaptcha => "https://www.google.com/recaptcha/api/siteverify",
        }
    }

    /// The script, which draws nothing until the page asks it to.
    const fn script_url(self) -> &'static str {
        match self {
            Self::Turnstile => "https://challenges.cloudflare.com/turnstile/v0/api.js?render=explicit",
            Self::HCaptcha => "https://js.hcaptcha.com/1/api.js?render=explicit",
            Self::ReCaptcha => "https://www.google.com/recaptcha/api.js?render=explicit",
        }
    }

    /// What the provider asks sites to allow, as sources of a Content-Security-Policy.
    #[must_use]
    pub const fn sources(self) -> &'static str {
        match self {
            Self::Turnstile => "https://challenges.cloudflare.com",
            Self::HCaptcha => "https://hcaptcha.com https://*.hcaptcha.com",
            Self::ReCaptcha => {
                "https://www.google.com/recaptcha/ https://www.gstatic.com/recaptcha/ https://recaptcha.google.com/recaptcha/"
            }
        }
    }
}

impl ChallengeSettings {
    pub(super) fn read(reader: &mut SettingsReader) -> Result<Option<Self>, SettingError> {
        let provider = |text: &str| match text {
            "" => Some(None),
            name => PROVIDERS.into_iter().find(|provider| provider.as_str() == name).map(Some),
        };
        let names = "\"turnstile\", \"hcaptcha\", \"recaptcha\", or empty";
        let provider = reader.get("sale.challenge.provider", None, provider, names)?;
        let keys = key_pair(
            reader,
            "sale.challenge.site_key",
            "sale.challenge.secret",
            "WEIR_SALE_CHALLENGE_SECRET",
        )?;
        let interactive_keys = key_pair(
            reader,
            "sale.challenge.interactive_site_key",
            "sale.challenge.interactive_secret",
            "WEIR_SALE_CHALLENGE_INTERACTIVE_SECRET",
        )?;
        let allowed = "an https:// URL, or an http:// URL on loopback";
        let verify_url = reader.get("sale.challenge.verify_url", None, optional_trusted_url, allowed)?;
        let script_url = reader.get("sale.challenge.script_url", None, optional_trusted_url, allowed)?;
        let (Some(provider), Some(keys)) = (provider, &keys) else {
            let is_begun = provider.is_some() || keys.is_some() || interactive_keys.is_some();
            return if is_begun { Err(incomplete(provider)) } else { Ok(None) };
        };
        // The addresses of known providers are valid.
        let or_default = |url: Option<Url>, default: &str| url.or_else(|| Url::parse(default).ok());
        Ok(or_default(verify_url, provider.verify_url())
            .zip(or_default(script_url, provider.script_url()))
            .map(|(verify_url, script_url)| Self {
                provider,
                keys: keys.clone(),
                interactive_keys,
                verify_url,
                script_url,
            }))
    }

    /// The sources that the page's policy has to allow: the provider's, and that of the script if it is another.
    #[must_use]
    pub fn sources(&self) -> String {
        let mut sources = self.provider.sources().to_owned();
        let is_own = |url: &str| Url::parse(url).is_ok_and(|url| url.origin() == self.script_url.origin());
        if !is_own(self.provider.script_url()) {
            sources.push(' ');
            sources.push_str(&self.script_url.origin().ascii_serialization());
        }
        sources
    }
}

/// A challenge of which a part is missing. Half of one must not pass for none.
fn incomplete(provider: Option<Provider>) -> SettingError {
    let allowed =
        "set together with sale.challenge.site_key and WEIR_SALE_CHALLENGE_SECRET, and they with it";
    let shown = provider.map_or("", Provider::as_str);
    SettingError::new("sale.challenge.provider", shown, allowed)
}

fn key_pair(
    reader: &mut SettingsReader,
    site_key: &'static str,
    secret: &'static str,
    variable: &str,
) -> Result<Option<KeyPair>, SettingError> {
    let text = |text: &str| Some(text.trim().to_owned());
    let found = [
        reader.get_optional(site_key, text, "the site key that the provider gave")?,
        reader.get_optional(secret, text, "the secret that the provider gave")?,
    ];
    match found.map(|text| text.filter(|text| !text.is_empty())) {
        [Some(site_key), Some(secret)] => Ok(Some(KeyPair { site_key, secret: Secret(secret) })),
        [None, None] => Ok(None),
        [Some(shown), None] => {
            Err(SettingError::new(site_key, shown, format!("set together with {variable}")))
        }
        [None, Some(_)] => {
            Err(SettingError::secret(variable, &format!("set together with {site_key}, or not at all")))
        }
    }
}

impl std::fmt::Debug for ChallengeSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChallengeSettings")
            .field("provider", &self.provider)
            .field("keys", &self.keys)
            .field("interactive_keys", &self.interactive_keys)
            .field("verify_url", &self.verify_url.host_str())
            .field("script_url", &self.script_url.host_str())
            .finish()
    }
}
