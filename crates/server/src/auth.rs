//! Authentication: the operator's key, callers' tokens and the secrets behind them.

pub mod credentials;
pub(crate) mod file_modes;
pub mod jwt;
pub mod secrets;
pub(crate) mod webhook;

use std::path::Path;

use self::jwt::{RequiredClaims, TokenVerifier};
use crate::sale::settings::BuyerIdentity;
use crate::settings::Settings;
use crate::settings::auth::{ADMIN_KEY, AuthSettings, admin_key};
use crate::settings::source::SettingError;

/// The keys and secrets that credentials are checked against.
#[derive(Debug)]
pub struct Auth {
    pub admin: credentials::AdminKey,
    pub tokens: TokenVerifier,
    /// Whether callers without credentials may use quota and slot.
    pub allow_anonymous: bool,
    /// Whether buyers are named by tokens.
    pub buyers_have_tokens: bool,
    /// Verifies callbacks and signs webhooks.
    pub webhook: webhook::WebhookSecret,
}

impl Auth {
    /// Takes the secrets from the settings, and from the data directory those that are not set. Creates them there if needed.
    /// Fails when a secret's file cannot be read or written, or a key file holds no usable key.
    pub fn load(settings: &Settings) -> Result<Self, SettingError> {
        let data = &settings.process.data;
        let webhook = webhook::WebhookSecret::load(&settings.request, data)?;
        let buyers_have_tokens = settings.sale.identity == BuyerIdentity::Token;
        let (settings, plan_claim) = (&settings.auth, settings.tier.plan_claim.clone());
        let admin = match &settings.admin_key {
            Some(key) => key.clone(),
            None => load_admin_key(data)?,
        };
        let (issuer, audience) = (settings.issuer.clone(), settings.audience.clone());
        let required = RequiredClaims { issuer, audience, plan_claim };
        let tokens = match (&settings.jwks_url, &settings.jwks_file) {
            (Some(url), _) => TokenVerifier::from_jwks_url(url, settings.jwt_secret.as_deref(), required)?,
            (None, Some(file)) => TokenVerifier::from_jwks_file(file, &required)?,
            (None, None) => TokenVerifier::from_secret(&jwt_secret(settings, data)?, &required),
        };
        let (admin, allow_anonymous) = (credentials::AdminKey::new(&admin), settings.allow_anonymous);
        Ok(Self { admin, tokens, allow_anonymous, buyers_have_tokens, webhook })
    }
}

/// Loads the operator's key from the data directory. It is validated, because the operator may have written the file.
fn load_admin_key(data: &Path) -> Result<String, SettingError> {
    let text = secrets::load_or_create(data, secrets::ADMIN_KEY)?;
    admin_key(&text).ok_or_else(|| {
        let file = data.join(secrets::ADMIN_KEY.file);
        SettingError::secret(format!("the key in {}", file.display()), ADMIN_KEY)
    })
}

/// Returns the secret that signs tokens, from the settings or the data directory.
/// Fails when it has to be created and cannot be.
pub fn jwt_secret(settings: &AuthSettings, data: &Path) -> Result<String, SettingError> {
    match &settings.jwt_secret {
        Some(secret) => Ok(secret.clone()),
        None => secrets::load_or_create(data, secrets::JWT_SECRET),
    }
}
