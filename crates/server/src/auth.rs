//! Who is calling: the operator's key and callers' tokens.

pub mod admin;
pub mod credentials;
pub mod jwt;
pub mod secrets;
pub(crate) mod webhook;

use std::path::Path;

use crate::config::Settings;
use crate::config::auth::AuthSettings;
use crate::config::source::SettingError;

/// What credentials are checked against.
#[derive(Debug)]
pub struct Auth {
    /// The operator's key.
    pub admin: admin::AdminKey,
    /// Callers' tokens.
    pub tokens: jwt::Verifier,
    /// What callbacks and webhooks are signed with.
    pub webhook: webhook::WebhookSecret,
}

impl Auth {
    /// Takes the secrets that are given and makes those that are not, in the data directory.
    ///
    /// # Errors
    /// When a secret's file cannot be written or read, or a key file holds no usable key.
    pub fn load(settings: &Settings) -> Result<Self, SettingError> {
        let data = &settings.process.data;
        let webhook = webhook::WebhookSecret::load(&settings.request, data)?;
        let settings = &settings.auth;
        let admin = match &settings.admin_key {
            Some(key) => key.clone(),
            None => secrets::load_or_create(data, secrets::ADMIN_KEY)?,
        };
        let tokens = match &settings.jwks_file {
            Some(file) => jwt::Verifier::from_jwks_file(file)?,
            None => jwt::Verifier::from_secret(&jwt_secret(settings, data)?),
        };
        Ok(Self { admin: admin::AdminKey::new(&admin), tokens, webhook })
    }
}

/// The secret that tokens are signed with: the given one, or the data directory's.
///
/// # Errors
/// When it has to be made and cannot.
pub fn jwt_secret(settings: &AuthSettings, data: &Path) -> Result<String, SettingError> {
    match &settings.jwt_secret {
        Some(secret) => Ok(secret.clone()),
        None => secrets::load_or_create(data, secrets::JWT_SECRET),
    }
}
