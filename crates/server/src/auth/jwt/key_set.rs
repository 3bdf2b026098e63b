//! Selects the public keys of a JWKS that may verify tokens.

use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, KeyAlgorithm, KeyOperations, PublicKeyUse};
use jsonwebtoken::{Algorithm, DecodingKey, DecodingKeyKind};
use serde::Deserialize;
use serde_json::Value;

use super::VerificationKey;

/// Shorter RSA keys can be broken at a price that attackers may pay.
const RSA_BITS_MIN: usize = 2_048;

/// Why a key is not used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum UnusableKey {
    #[error("its \"use\" or \"key_ops\" is not to verify signatures")]
    Purpose,
    #[error("it is neither RSA nor on the curve P-256")]
    Kind,
    #[error("its \"alg\" is {0}; only RS256 and ES256 are supported")]
    Algorithm(KeyAlgorithm),
    #[error("it has {0} bits; RSA keys need at least {RSA_BITS_MIN}")]
    TooShort(usize),
    #[error("it is malformed, or of an unknown kind")]
    Malformed,
}

/// Returns the usable keys of a JWKS and logs why the others are not used. Each is parsed by itself: a kind of key that is
/// newer than this server must not cost it the others (RFC 7517, section 5). Fails when the text is not a JWKS.
pub(super) fn usable_keys(text: &[u8]) -> serde_json::Result<Vec<VerificationKey>> {
    #[derive(Deserialize)]
    struct Document {
        keys: Vec<Value>,
    }
    let Document { keys } = serde_json::from_slice(text)?;
    let usable = keys.iter().filter_map(|value| {
        let jwk = Jwk::deserialize(value).map_err(|_unknown| UnusableKey::Malformed);
        let log = |reason: &UnusableKey| {
            let kid = value["kid"].as_str().unwrap_or("(none)");
            tracing::warn!(kid, "a key of the JWKS is not used: {reason}");
        };
        jwk.and_then(|jwk| verification_key(&jwk)).inspect_err(log).ok()
    });
    Ok(usable.collect())
}

fn verification_key(jwk: &Jwk) -> Result<VerificationKey, UnusableKey> {
    let algorithm = match &jwk.algorithm {
        AlgorithmParameters::RSA(_) => Algorithm::RS256,
        AlgorithmParameters::EllipticCurve(curve) if curve.curve == EllipticCurve::P256 => Algorithm::ES256,
        _ => return Err(UnusableKey::Kind),
    };
    let common = &jwk.common;
    let is_for_signatures = common.public_key_use.as_ref().is_none_or(|u| *u == PublicKeyUse::Signature);
    let operations = common.key_operations.as_ref();
    if !is_for_signatures || operations.is_some_and(|listed| !listed.contains(&KeyOperations::Verify)) {
        return Err(UnusableKey::Purpose);
    }
    match common.key_algorithm {
        Some(other) if other != algorithm.into() => return Err(UnusableKey::Algorithm(other)),
        _ => {}
    }
    let key = DecodingKey::from_jwk(jwk).map_err(|_not_base64| UnusableKey::Malformed)?;
    if let DecodingKeyKind::RsaModulusExponent { n, .. } = key.kind() {
        let bits = bits(n);
        if bits < RSA_BITS_MIN {
            return Err(UnusableKey::TooShort(bits));
        }
    }
    Ok(VerificationKey::new(common.key_id.clone(), key, algorithm))
}

/// The length of a big-endian number in bits.
fn bits(number: &[u8]) -> usize {
    let first = number.iter().position(|byte| *byte != 0);
    first.map_or(0, |at| (number.len() - at) * 8 - number[at].leading_zeros() as usize)
}

#[cfg(test)]
mod tests {
    use base64::Engine;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    use serde_json::json;

    use super::*;

    fn check(jwk: &Value) -> Result<(), UnusableKey> {
        verification_key(&serde_json::from_value(jwk.clone()).unwrap()).map(|_key| ())
    }

    fn rsa(bytes: usize, first: u8) -> Value {
        let mut modulus = vec![0xff; bytes];
        modulus[0] = first;
        json!({"kty": "RSA", "kid": "k", "e": "AQAB", "n": URL_SAFE_NO_PAD.encode(modulus)})
    }

    fn with(mut jwk: Value, name: &str, value: Value) -> Value {
        jwk[name] = value;
        jwk
    }

    #[test]
    fn rsa_keys_need_2048_bits() {
        assert_eq!(check(&rsa(256, 0x80)), Ok(()));
        assert_eq!(check(&rsa(257, 0)), Ok(()), "leading zeros do not count");
        assert_eq!(check(&rsa(256, 0x7f)), Err(UnusableKey::TooShort(2_047)));
        assert_eq!(check(&rsa(128, 0x80)), Err(UnusableKey::TooShort(1_024)));
        assert_eq!(check(&with(rsa(1, 1), "n", json!(""))), Err(UnusableKey::TooShort(0)));
    }

    #[test]
    fn keys_for_another_purpose_are_not_used() {
        for (name, value, expected) in [
            ("use", json!("sig"), Ok(())),
            ("key_ops", json!(["verify"]), Ok(())),
            ("alg", json!("RS256"), Ok(())),
            ("use", json!("enc"), Err(UnusableKey::Purpose)),
            ("use", json!("other"), Err(UnusableKey::Purpose)),
            ("key_ops", json!(["encrypt", "wrapKey"]), Err(UnusableKey::Purpose)),
            ("alg", json!("RSA-OAEP"), Err(UnusableKey::Algorithm(KeyAlgorithm::RSA_OAEP))),
            ("alg", json!("RS512"), Err(UnusableKey::Algorithm(KeyAlgorithm::RS512))),
        ] {
            assert_eq!(check(&with(rsa(256, 0x80), name, value.clone())), expected, "{name} {value}");
        }
        assert_eq!(check(&json!({"kty": "oct", "k": "c2VjcmV0"})), Err(UnusableKey::Kind));
        let okp = json!({"kty": "OKP", "crv": "Ed25519", "x": "AAAA"});
        assert_eq!(check(&okp), Err(UnusableKey::Kind));
    }

    #[test]
    fn a_key_of_an_unknown_kind_does_not_spoil_the_others() {
        let unknown =
            [json!({"kty": "AKP", "kid": "new", "alg": "ML-DSA-44", "pub": "AAAA"}), json!("odd"), json!(7)];
        let keys: Vec<Value> = unknown.into_iter().chain([rsa(256, 0x80)]).collect();
        let usable = usable_keys(json!({ "keys": keys }).to_string().as_bytes()).unwrap();
        assert_eq!(usable.len(), 1);
        assert!(usable_keys(b"<html>").is_err() && usable_keys(b"{}").is_err());
    }
}
