//! What callbacks and webhooks are signed with: `WEIR_WEBHOOK_SECRET`, or one made in the data directory.

use std::path::Path;

use weir_core::Timestamp;
use weir_core::webhook::{Received, Secret, SignatureError, sign, verify};

use super::secrets;
use crate::config::request::{RequestSettings, WEBHOOK_SECRET, is_webhook_secret};
use crate::config::source::SettingError;

/// The secret, which cannot be printed; while it is replaced, the older ones too.
#[derive(Clone)]
pub struct WebhookSecret {
    /// What is signed with it, and first of all what is checked.
    present: Secret,
    /// All of them.
    good: Vec<Secret>,
}

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
        let good: Vec<Secret> = text.split_whitespace().filter_map(|text| Secret::parse(text).ok()).collect();
        match good.first() {
            Some(present) if is_webhook_secret(&text) => Ok(Self { present: present.clone(), good }),
            _ => Err(SettingError::secret(name, WEBHOOK_SECRET)),
        }
    }

    /// Whether a message was signed with one of them and is of the present.
    ///
    /// # Errors
    /// Says why the message is not to be believed.
    pub fn verify(&self, message: Received<'_>, now: Timestamp) -> Result<(), SignatureError> {
        verify(&self.good, message, now)
    }

    /// The `webhook-signature` of a message that is sent now.
    #[must_use]
    pub fn sign(&self, id: &str, now: Timestamp, body: &[u8]) -> String {
        sign(&self.present, id, now, body)
    }
}

impl std::fmt::Debug for WebhookSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WebhookSecret(…)")
    }
}
