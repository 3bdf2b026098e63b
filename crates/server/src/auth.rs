//! Who is calling: the operator's key and callers' tokens.

pub mod admin;
pub mod credentials;
pub(crate) mod file_modes;
pub mod jwt;
pub mod secrets;
pub(crate) mod webhook;

use std::path::Path;

use crate::settings::Settings;
use crate::settings::auth::{ADMIN_KEY, AuthSettings, admin_key};
use crate::settings::source::SettingError;

/// What credentials are checked against.
#[derive(Debug)]
pub struct Auth {
    /// The operator's key.
    pub admin: admin::AdminKey,
    /// Callers' tokens.
    pub tokens: jwt::Verifier,
    /// What callbacks are signed with, and what the secrets of tenants' webhooks are derived from.
    pub webhook: webhook::WebhookSecret,
}

impl Auth {
    /// Takes the secrets that are given and makes those that are not, in the data directory.
    /// Fails when a secret's file cannot be written or read, or a key file holds no usable key.
    pub fn load(settings: &Settings) -> Result<Self, SettingError> {
        let data = &settings.process.data;
        let webhook = webhook::WebhookSecret::load(&settings.request, data)?;
        let settings = &settings.auth;
        let admin = match &settings.admin_key {
            Some(key) => key.clone(),
            None => load_admin_key(data)?,
        };
        let tokens = match &settings.jwks_file {
            Some(file) => jwt::Verifier::from_jwks_file(file)?,
            None => jwt::Verifier::from_secret(&jwt_secret(settings, data)?),
        };
        let tokens = tokens.expecting(settings.issuer.as_deref(), settings.audience.as_deref());
        Ok(Self { admin: admin::AdminKey::new(&admin), tokens, webhook })
    }
}

/// The operator's key of the data directory, which somebody may have written there.
fn load_admin_key(data: &Path) -> Result<String, SettingError> {
    let text = secrets::load_or_create(data, secrets::ADMIN_KEY)?;
    admin_key(&text).ok_or_else(|| {
        let file = data.join(secrets::ADMIN_KEY.file);
        SettingError::secret(format!("the key in {}", file.display()), ADMIN_KEY)
    })
}

/// The secret that tokens are signed with: the given one, or the data directory's.
/// Fails when it has to be made and cannot.
pub fn jwt_secret(settings: &AuthSettings, data: &Path) -> Result<String, SettingError> {
    match &settings.jwt_secret {
        Some(secret) => Ok(secret.clone()),
        None => secrets::load_or_create(data, secrets::JWT_SECRET),
    }
}
