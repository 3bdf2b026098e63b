//! The secrets of webhooks: the master, and what tenants get of it.
//!
//! `WEIR_WEBHOOK_SECRET`, or one made in the data directory, is the master. Downstreams sign their callbacks with it; tenants
//! never see it. Webhooks to tenants are signed with secrets that are derived from it, one for each tenant, so a tenant
//! that can verify its own webhooks can forge neither those of others nor callbacks. Nothing about them is stored: every server
//! that has the master derives the same ones.

use std::path::Path;

use ring::hkdf::{HKDF_SHA256, Prk, Salt};
use weir_core::webhook::{SignatureError, SignedMessage, SigningSecret, SigningSecretError, sign, verify};
use weir_core::{TenantId, Timestamp};

use super::secrets;
use crate::request::settings::{RequestSettings, WEBHOOK_SECRET, is_webhook_secret};
use crate::settings::source::SettingError;

/// Keeps what is derived here apart from anything else that may be derived from the same master one day.
const SALT: &[u8] = b"weir webhook secret v1";
/// The bytes of a tenant's secret: what SHA-256 can hold.
const TENANT_SECRET_BYTES: usize = 32;

/// The masters, which cannot be printed: the present one first; while it is replaced, the older ones too.
#[derive(Clone)]
pub struct WebhookSecret {
    present: Master,
    older: Vec<Master>,
}

#[derive(Clone)]
struct Master {
    /// What downstreams sign with.
    secret: SigningSecret,
    /// What tenants' secrets are derived from.
    prk: Prk,
}

impl Master {
    fn parse(text: &str) -> Result<Self, SigningSecretError> {
        let key = SigningSecret::decode(text)?;
        Ok(Self { secret: SigningSecret::from_key(&key)?, prk: Salt::new(HKDF_SHA256, SALT).extract(&key) })
    }

    fn tenant_key(&self, tenant: &TenantId) -> [u8; TENANT_SECRET_BYTES] {
        let mut key = [0; TENANT_SECRET_BYTES];
        let info = [tenant.as_str().as_bytes()];
        let filled = self.prk.expand(&info, HKDF_SHA256).and_then(|okm| okm.fill(&mut key));
        // Only more bytes than HKDF can give (8,160), or another number than was announced, could fail.
        filled.expect("HKDF-SHA-256 gives 32 bytes");
        key
    }

    fn tenant_secret(&self, tenant: &TenantId) -> SigningSecret {
        SigningSecret::from_key(&self.tenant_key(tenant)).expect("32 bytes are a secret")
    }
}

impl WebhookSecret {
    /// Takes the secret that is given, or makes one in the data directory.
    /// Fails when its file cannot be made or read, or holds no secret.
    pub fn load(settings: &RequestSettings, data: &Path) -> Result<Self, SettingError> {
        let (text, name) = match &settings.webhook_secret {
            Some(secret) => (secret.0.clone(), "WEIR_WEBHOOK_SECRET"),
            None => (secrets::load_or_create_webhook_secret(data)?, "webhook.secret in the data directory"),
        };
        let mut masters = text.split_whitespace().filter_map(|text| Master::parse(text).ok());
        match masters.next() {
            Some(present) if is_webhook_secret(&text) => Ok(Self { present, older: masters.collect() }),
            _ => Err(SettingError::secret(name, WEBHOOK_SECRET)),
        }
    }

    /// Whether a downstream's message was signed with one of the masters and is of the present.
    /// Says why the message is not to be believed.
    pub fn verify_callback(&self, message: SignedMessage<'_>, now: Timestamp) -> Result<(), SignatureError> {
        let secrets: Vec<SigningSecret> = self.masters().map(|master| master.secret.clone()).collect();
        verify(&secrets, message, now)
    }

    /// The `webhook-signature` of a message that is sent to a tenant now: one signature for each master, so that a tenant
    /// may change to its new secret at any time while the master is replaced.
    #[must_use]
    pub fn sign_for(&self, tenant: &TenantId, id: &str, now: Timestamp, body: &[u8]) -> String {
        let signatures = self.masters().map(|master| sign(&master.tenant_secret(tenant), id, now, body));
        signatures.collect::<Vec<_>>().join(" ")
    }

    /// What a tenant verifies its webhooks with: the secret derived from the present master, as `whsec_` and base64.
    #[must_use]
    pub fn tenant_secret(&self, tenant: &TenantId) -> String {
        SigningSecret::encode(&self.present.tenant_key(tenant))
    }

    fn masters(&self) -> impl Iterator<Item = &Master> {
        std::iter::once(&self.present).chain(&self.older)
    }
}

impl std::fmt::Debug for WebhookSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WebhookSecret(…)")
    }
}

#[cfg(test)]
mod tests {
    use crate::request::settings as config;

    use super::*;

    const NEW: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";
    const OLD: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    const NOW: Timestamp = Timestamp::from_seconds(1_700_000_000);

    fn load(text: &str) -> WebhookSecret {
        let mut settings =
            crate::settings::Settings::read(crate::settings::source::Sources::default()).unwrap().request;
        settings.webhook_secret = Some(config::Secret(text.to_owned()));
        WebhookSecret::load(&settings, Path::new("")).unwrap()
    }

    fn tenant(name: &str) -> TenantId {
        TenantId::parse(name).unwrap()
    }

    fn check(secret: &str, signatures: &str) -> Result<(), SignatureError> {
        let timestamp = weir_core::webhook::timestamp(NOW);
        let message = SignedMessage { id: "m", timestamp: &timestamp, signatures, body: b"{}" };
        verify(&[SigningSecret::parse(secret).unwrap()], message, NOW)
    }

    /// Computed with Python's hmac module: tenants keep their secrets over versions of Weir.
    #[test]
    fn the_secret_of_a_tenant_is_hkdf_of_the_master_and_stays_what_it_is() {
        assert_eq!(
            load(NEW).tenant_secret(&tenant("acme")),
            "whsec_mZ58jvgeuO7U3aIqKL/IKQ5TZjl5dxJW5CXWerkrNvg="
        );
    }

    #[test]
    fn a_tenant_can_verify_its_own_webhooks_and_forge_no_others() {
        let secrets = load(NEW);
        let own = secrets.tenant_secret(&tenant("acme"));
        assert_eq!(check(&own, &secrets.sign_for(&tenant("acme"), "m", NOW, b"{}")), Ok(()));
        let of_rival = secrets.sign_for(&tenant("rival"), "m", NOW, b"{}");
        assert_eq!(check(&own, &of_rival), Err(SignatureError::NoMatch));
        assert_eq!(check(NEW, &of_rival), Err(SignatureError::NoMatch), "nor is it signed with the master");
        let (timestamp, own) = (weir_core::webhook::timestamp(NOW), SigningSecret::parse(&own).unwrap());
        let forged = sign(&own, "m", NOW, b"{}");
        let callback = SignedMessage { id: "m", timestamp: &timestamp, signatures: &forged, body: b"{}" };
        assert_eq!(secrets.verify_callback(callback, NOW), Err(SignatureError::NoMatch));
        let genuine = sign(&SigningSecret::parse(NEW).unwrap(), "m", NOW, b"{}");
        assert_eq!(secrets.verify_callback(SignedMessage { signatures: &genuine, ..callback }, NOW), Ok(()));
    }

    #[test]
    fn while_the_master_is_replaced_webhooks_verify_with_either_secret() {
        let (before, during, after) = (load(OLD), load(&format!("{NEW} {OLD}")), load(NEW));
        let acme = tenant("acme");
        let (old, new) = (before.tenant_secret(&acme), after.tenant_secret(&acme));
        assert_ne!(old, new);
        assert_eq!(during.tenant_secret(&acme), new, "tenants are shown the new one");
        let signatures = during.sign_for(&acme, "m", NOW, b"{}");
        assert_eq!((check(&old, &signatures), check(&new, &signatures)), (Ok(()), Ok(())));
        let signatures = after.sign_for(&acme, "m", NOW, b"{}");
        assert_eq!(check(&old, &signatures), Err(SignatureError::NoMatch));
    }
}
