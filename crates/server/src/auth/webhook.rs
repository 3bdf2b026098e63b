//! What callbacks and webhooks are signed with: `WEIR_WEBHOOK_SECRET`, or one made in the data directory.

use std::path::Path;

use weir_core::Timestamp;
use weir_core::webhook::{Received, Secret, SignatureError, sign, verify};

use super::secrets;
use crate::config::request::RequestSettings;
use crate::config::source::SettingError;

/// The secret, which cannot be printed.
#[derive(Clone)]
pub struct WebhookSecret(Secret);

impl WebhookSecret {
    /// Takes the secret that is given, or makes one in the data directory.
    ///
    /// # Errors
    /// When its file cannot be made or read, or holds no secret.
    pub fn load(settings: &RequestSettings, data: &Path) -> Result<Self, SettingError> {
        let (text, name) = match &settings.webhook_secret {
            Some(secret) => (secret.0.clone(), "WEIR_WEBHOOK_SECRET"),
            None => (secrets::load_or_create_webhook_secret(data)?, "webhook.secret in the data directory"),
        };
        let allowed = "whsec_ and 24 to 64 bytes in base64";
        Secret::parse(&text).map(Self).map_err(|_told| SettingError::secret(name, allowed))
    }

    /// Whether a message was signed with it and is of the present.
    ///
    /// # Errors
    /// Says why the message is not to be believed.
    pub fn verify(&self, message: Received<'_>, now: Timestamp) -> Result<(), SignatureError> {
        verify(std::slice::from_ref(&self.0), message, now)
    }

    /// The `webhook-signature` of a message that is sent now.
    #[must_use]
    pub fn sign(&self, id: &str, now: Timestamp, body: &[u8]) -> String {
        sign(&self.0, id, now, body)
    }
}

impl std::fmt::Debug for WebhookSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WebhookSecret(…)")
    }
}
