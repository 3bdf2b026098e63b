//! Webhook signatures according to Standard Webhooks: HMAC-SHA-256 over the message's id, time and body.
//!
//! The same rule signs the webhooks that Weir sends and verifies those it receives. Callers read and write the headers
//! `webhook-id`, `webhook-timestamp` and `webhook-signature`. A message can be replayed within the tolerance, so its
//! handler must be idempotent.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::Timestamp;

/// The largest accepted difference between a message's time and now, in either direction.
pub const TOLERANCE: Duration = Duration::from_secs(300);

const SECRET_PREFIX: &str = "whsec_";
const SIGNATURE_PREFIX: &str = "v1,";

/// A shared secret. It can be neither printed nor read back.
#[derive(Clone)]
pub struct SigningSecret(Hmac<Sha256>);

/// Why a text is not a valid secret. The messages complete the sentence "`WEIR_WEBHOOK_SECRET` …".
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SigningSecretError {
    #[error("must begin with {SECRET_PREFIX}")]
    Prefix,
    #[error("must have base64 after {SECRET_PREFIX}")]
    Base64,
    /// Too short to be safe, or longer than the standard allows.
    #[error("must encode {} to {} bytes", SigningSecret::MIN_BYTES, SigningSecret::MAX_BYTES)]
    Length,
}

/// Why a message is not authentic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SignatureError {
    /// The id is empty or contains a full stop, which could shift the boundary between the signed parts.
    #[error("the webhook's id is not valid")]
    Id,
    #[error("the webhook's timestamp is not valid")]
    Timestamp,
    #[error("the webhook's timestamp is too old")]
    TooOld,
    #[error("the webhook's timestamp is too far in the future")]
    TooNew,
    /// None of the signatures was made with any of the secrets.
    #[error("no signature of the webhook matches")]
    NoMatch,
}

impl SigningSecret {
    pub const MIN_BYTES: usize = 24;
    pub const MAX_BYTES: usize = 64;

    /// Parses `whsec_` and base64. Errors do not repeat the text.
    pub fn parse(text: &str) -> Result<Self, SigningSecretError> {
        Self::from_key(&Self::decode(text)?)
    }

    /// Decodes `whsec_` and base64, for callers that derive other secrets from the bytes. Does not check the length.
    /// Errors do not repeat the text.
    pub fn decode(text: &str) -> Result<Vec<u8>, SigningSecretError> {
        let encoded = text.strip_prefix(SECRET_PREFIX).ok_or(SigningSecretError::Prefix)?;
        BASE64.decode(encoded).map_err(|_invalid| SigningSecretError::Base64)
    }

    /// Encodes bytes in the form that [`SigningSecret::parse`] reads.
    #[must_use]
    pub fn encode(key: &[u8]) -> String {
        format!("{SECRET_PREFIX}{}", BASE64.encode(key))
    }

    /// Creates a secret from bytes; fails if there are too few or too many.
    pub fn from_key(key: &[u8]) -> Result<Self, SigningSecretError> {
        if !(Self::MIN_BYTES..=Self::MAX_BYTES).contains(&key.len()) {
            return Err(SigningSecretError::Length);
        }
        Hmac::new_from_slice(key).map(Self).map_err(|_length| SigningSecretError::Length)
    }

    fn mac(&self, id: &str, timestamp: &str, body: &[u8]) -> Hmac<Sha256> {
        self.0.clone().chain_update(format!("{id}.{timestamp}.")).chain_update(body)
    }
}

/// Returns the `webhook-signature` of a message sent at `now`. The id must not contain a full stop. The caller sends
/// the same time as `webhook-timestamp`, see [`timestamp`].
#[must_use]
pub fn sign(secret: &SigningSecret, id: &str, now: Timestamp, body: &[u8]) -> String {
    let mac = secret.mac(id, &timestamp(now), body).finalize().into_bytes();
    format!("{SIGNATURE_PREFIX}{}", BASE64.encode(mac))
}

/// Formats a time for `webhook-timestamp`: whole seconds since 1970.
#[must_use]
pub fn timestamp(now: Timestamp) -> String {
    now.as_micros().div_euclid(1_000_000).to_string()
}

/// A received message: the three headers and the unchanged body.
#[derive(Clone, Copy)]
pub struct SignedMessage<'a> {
    pub id: &'a str,
    pub timestamp: &'a str,
    /// One or more signatures, separated by spaces. Versions other than `v1` are ignored.
    pub signatures: &'a str,
    pub body: &'a [u8],
}

/// Checks that a message was signed with one of the secrets (there are two during a rotation) and is recent. Compares
/// signatures in constant time.
pub fn verify(
    secrets: &[SigningSecret],
    message: SignedMessage<'_>,
    now: Timestamp,
) -> Result<(), SignatureError> {
    if message.id.is_empty() || message.id.contains('.') {
        return Err(SignatureError::Id);
    }
    check_time(message.timestamp, now)?;
    let is_signed = secrets.iter().any(|secret| is_signed_with(secret, message));
    if is_signed { Ok(()) } else { Err(SignatureError::NoMatch) }
}

fn check_time(text: &str, now: Timestamp) -> Result<(), SignatureError> {
    let is_number = !text.is_empty() && text.bytes().all(|digit| digit.is_ascii_digit());
    let seconds = text.parse().ok().filter(|_| is_number).ok_or(SignatureError::Timestamp)?;
    let sent = Timestamp::from_seconds(seconds);
    if now.since(sent) > TOLERANCE {
        return Err(SignatureError::TooOld);
    }
    if sent.since(now) > TOLERANCE {
        return Err(SignatureError::TooNew);
    }
    Ok(())
}

fn is_signed_with(secret: &SigningSecret, message: SignedMessage<'_>) -> bool {
    let mac = secret.mac(message.id, message.timestamp, message.body);
    let candidates = message.signatures.split(' ').filter_map(|text| text.strip_prefix(SIGNATURE_PREFIX));
    let mut decoded = candidates.filter_map(|encoded| BASE64.decode(encoded).ok());
    decoded.any(|signature| mac.clone().verify_slice(&signature).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";
    const ID: &str = "msg_27UH4WbU6Z5A5EzD8u03UvzRbpk";
    const BODY: &[u8] = br#"{"email":"test@example.com","username":"test_user"}"#;
    const SENT: i64 = 1_649_367_553;
    const SIGNATURE: &str = "v1,tZ1I4/hDygAJgO5TYxiSd6Sd0kDW6hPenDe+bTa3Kkw=";

    fn secret(text: &str) -> SigningSecret {
        SigningSecret::parse(text).ok().unwrap()
    }

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_seconds(seconds)
    }

    const fn message<'a>(timestamp: &'a str, signatures: &'a str) -> SignedMessage<'a> {
        SignedMessage { id: ID, timestamp, signatures, body: BODY }
    }

    fn check(message: SignedMessage<'_>) -> Result<(), SignatureError> {
        verify(&[secret(SECRET)], message, at(SENT))
    }

    /// The test vectors of the Standard Webhooks libraries.
    #[test]
    fn signatures_match_the_published_test_vectors() {
        assert_eq!(sign(&secret(SECRET), ID, at(SENT), BODY), SIGNATURE);
        let other = secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw");
        let signature =
            sign(&other, "msg_p5jXN8AQM9LWM0D4loKWxJek", at(1_614_265_330), br#"{"test": 2432232314}"#);
        assert_eq!(signature, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
    }

    #[test]
    fn any_change_to_a_message_breaks_its_signature() {
        let good = message("1649367553", SIGNATURE);
        assert_eq!(check(good), Ok(()));
        assert_eq!(check(SignedMessage { id: "msg_x", ..good }), Err(SignatureError::NoMatch));
        assert_eq!(check(SignedMessage { body: b"{}", ..good }), Err(SignatureError::NoMatch));
        assert_eq!(check(SignedMessage { timestamp: "1649367554", ..good }), Err(SignatureError::NoMatch));
        assert_eq!(check(SignedMessage { id: "", ..good }), Err(SignatureError::Id));
        assert_eq!(check(SignedMessage { id: "msg.1", ..good }), Err(SignatureError::Id));
    }

    #[test]
    fn one_good_signature_among_others_is_enough() {
        let other = "v1,AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
        for list in [format!("{other} {SIGNATURE}"), format!("v1a,xyz v1,?? {SIGNATURE} {other}")] {
            assert_eq!(check(message("1649367553", &list)), Ok(()), "{list}");
        }
        let asymmetric = SIGNATURE.replace("v1,", "v1a,");
        for list in ["", " ", "v1,", "v1", other, &SIGNATURE[3..], &SIGNATURE[..20], &asymmetric] {
            assert_eq!(check(message("1649367553", list)), Err(SignatureError::NoMatch), "{list}");
        }
    }

    #[test]
    fn a_message_is_valid_for_five_minutes_either_way() {
        let good = message("1649367553", SIGNATURE);
        let check_at = |now| verify(&[secret(SECRET)], good, now);
        assert_eq!(check_at(at(SENT + 300)), Ok(()));
        assert_eq!(check_at(at(SENT - 300)), Ok(()));
        assert_eq!(check_at(at(SENT + 300).plus(Duration::from_micros(1))), Err(SignatureError::TooOld));
        assert_eq!(check_at(at(SENT - 301)), Err(SignatureError::TooNew));
        for text in ["", "-1", "+1649367553", "1649367553.0", "soon", " 1649367553", "99999999999999999999"] {
            assert_eq!(check(message(text, SIGNATURE)), Err(SignatureError::Timestamp), "{text:?}");
        }
        assert_eq!(check(message("9223372036854775807", SIGNATURE)), Err(SignatureError::TooNew));
    }

    #[test]
    fn old_and_new_secret_are_accepted_during_a_rotation() {
        let old = secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw");
        let good = message("1649367553", SIGNATURE);
        assert_eq!(verify(&[old.clone(), secret(SECRET)], good, at(SENT)), Ok(()));
        assert_eq!(verify(&[old], good, at(SENT)), Err(SignatureError::NoMatch));
        assert_eq!(verify(&[], good, at(SENT)), Err(SignatureError::NoMatch));
    }

    #[test]
    fn a_secret_has_a_prefix_and_24_to_64_bytes() {
        let of =
            |bytes: usize| SigningSecret::parse(&format!("whsec_{}", BASE64.encode(vec![7; bytes]))).err();
        assert_eq!(
            [of(23), of(24), of(64), of(65)],
            [Some(SigningSecretError::Length), None, None, Some(SigningSecretError::Length)]
        );
        assert_eq!(SigningSecret::parse(&SECRET[6..]).err(), Some(SigningSecretError::Prefix));
        assert_eq!(SigningSecret::parse("whsec_?").err(), Some(SigningSecretError::Base64));
        assert_eq!(SigningSecret::decode(&SigningSecret::encode(&[7; 32])), Ok(vec![7; 32]));
    }
}
