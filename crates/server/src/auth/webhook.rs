//! The secrets of webhooks: the master secret and those derived from it for tenants.
//!
//! The master secret is `WEIR_WEBHOOK_SECRET`, or the one generated in the data directory. Downstreams sign their callbacks
//! with it; tenants never see it. Webhooks to a tenant are signed with a secret derived for that tenant, so a tenant that can
//! verify its own webhooks can forge neither those of others nor callbacks. Derived secrets are not stored: every server that
//! has the master secret derives the same ones.

use std::path::Path;

use ring::hkdf::{HKDF_SHA256, Prk, Salt};
use weir_core::webhook::{SignatureError, SignedMessage, SigningSecret, SigningSecretError, sign, verify};
use weir_core::{TenantId, Timestamp};

use super::secrets;
use crate::request::settings::{RequestSettings, WEBHOOK_SECRET, is_webhook_secret};
use crate::settings::source::SettingError;

/// Separates these secrets from any others that may be derived from the same master later.
const SALT: &[u8] = b"weir webhook secret v1";
/// The length of a tenant's secret: the output of SHA-256.
const TENANT_SECRET_BYTES: usize = 32;

/// The current master secret and, while it is being replaced, the older ones.
#[derive(Clone)]
pub struct WebhookSecret {
    current: MasterSecret,
    older: Vec<MasterSecret>,
}

#[derive(Clone)]
struct MasterSecret {
    /// Verifies callbacks of downstreams.
    secret: SigningSecret,
    /// Derives the secrets of tenants.
    prk: Prk,
}

impl MasterSecret {
    fn parse(text: &str) -> Result<Self, SigningSecretError> {
        let key = SigningSecret::decode(text)?;
        Ok(Self { secret: SigningSecret::from_key(&key)?, prk: Salt::new(HKDF_SHA256, SALT).extract(&key) })
    }

    fn tenant_key(&self, tenant: &TenantId) -> [u8; TENANT_SECRET_BYTES] {
        let mut key = [0; TENANT_SECRET_BYTES];
        let info = [tenant.as_str().as_bytes()];
        let filled = self.prk.expand(&info, HKDF_SHA256).and_then(|okm| okm.fill(&mut key));
        // HKDF fails only for more than 8,160 bytes, or for another length than was requested.
        filled.expect("HKDF-SHA-256 can produce 32 bytes");
        key
    }

    fn tenant_secret(&self, tenant: &TenantId) -> SigningSecret {
        SigningSecret::from_key(&self.tenant_key(tenant)).expect("32 bytes are a secret")
    }
}

impl WebhookSecret {
    /// Takes the secret from the settings, or loads or creates the one in the data directory.
    /// Fails when its file cannot be created or read, or holds no valid secret.
    pub fn load(settings: &RequestSettings, data: &Path) -> Result<Self, SettingError> {
        let (text, name) = match &settings.webhook_secret {
            Some(secret) => (secret.0.clone(), "WEIR_WEBHOOK_SECRET"),
            None => (secrets::load_or_create_webhook_secret(data)?, "webhook.secret in the data directory"),
        };
        let mut masters = text.split_whitespace().filter_map(|text| MasterSecret::parse(text).ok());
        match masters.next() {
            Some(current) if is_webhook_secret(&text) => Ok(Self { current, older: masters.collect() }),
            _ => Err(SettingError::secret(name, WEBHOOK_SECRET)),
        }
    }

    /// Checks that a callback was signed with one of the master secrets, and recently.
    pub fn verify_callback(&self, message: SignedMessage<'_>, now: Timestamp) -> Result<(), SignatureError> {
        let secrets: Vec<SigningSecret> = self.masters().map(|master| master.secret.clone()).collect();
        verify(&secrets, message, now)
    }

    /// Returns the `webhook-signature` of a message to a tenant: one signature per master secret, so that the tenant may
    /// switch to its new secret at any time while the master is being replaced.
    #[must_use]
    pub fn sign_for(&self, tenant: &TenantId, id: &str, now: Timestamp, body: &[u8]) -> String {
        let signatures = self.masters().map(|master| sign(&master.tenant_secret(tenant), id, now, body));
        signatures.collect::<Vec<_>>().join(" ")
    }

    /// Returns the `webhook-signature` of a message to an operator's own service: one signature per master secret.
    #[must_use]
    pub fn sign(&self, id: &str, now: Timestamp, body: &[u8]) -> String {
        let signatures = self.masters().map(|master| sign(&master.secret, id, now, body));
        signatures.collect::<Vec<_>>().join(" ")
    }

    /// Returns the secret with which a tenant verifies its webhooks, derived from the current master, as `whsec_` and base64.
    #[must_use]
    pub fn tenant_secret(&self, tenant: &TenantId) -> String {
        SigningSecret::encode(&self.current.tenant_key(tenant))
    }

    fn masters(&self) -> impl Iterator<Item = &MasterSecret> {
        std::iter::once(&self.current).chain(&self.older)
    }
}

impl std::fmt::Debug for WebhookSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WebhookSecret(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::secret::Secret;

    const NEW: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";
    const OLD: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    const NOW: Timestamp = Timestamp::from_seconds(1_700_000_000);

    fn load(text: &str) -> WebhookSecret {
        let mut settings =
            crate::settings::Settings::read(crate::settings::source::Sources::default()).unwrap().request;
        settings.webhook_secret = Some(Secret(text.to_owned()));
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

    /// The expected value was computed with Python's hmac module. Tenants' secrets must not change between versions of Weir.
    #[test]
    fn the_secret_of_a_tenant_is_hkdf_of_the_master_and_never_changes() {
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
        assert_eq!(
            check(NEW, &of_rival),
            Err(SignatureError::NoMatch),
            "it is not signed with the master either"
        );
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
