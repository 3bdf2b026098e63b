//! The public keys of a JWKS: which of them may verify tokens.

use jsonwebtoken::jwk::{
    AlgorithmParameters, EllipticCurve, Jwk, JwkSet, KeyAlgorithm, KeyOperations, PublicKeyUse,
};
use jsonwebtoken::{Algorithm, DecodingKey, DecodingKeyKind};

use super::Key;

/// Shorter RSA keys can be broken with what money buys.
const RSA_BITS_MIN: usize = 2_048;

/// Why a key is not used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unused {
    #[error("its \"use\" or \"key_ops\" is not to verify signatures")]
    Purpose,
    #[error("it is neither RSA nor on the curve P-256")]
    Kind,
    #[error("its \"alg\" is {0}, and only RS256 and ES256 are taken")]
    Algorithm(KeyAlgorithm),
    #[error("it has {0} bits, and RSA keys need at least {RSA_BITS_MIN}")]
    Short(usize),
    #[error("it is malformed")]
    Malformed,
}

/// The keys of a set that may be used; for each of the others a log line says why not.
pub(super) fn usable(set: &JwkSet) -> Vec<Key> {
    let judged = set.keys.iter().map(|jwk| (jwk, key(jwk)));
    let usable = judged.filter_map(|(jwk, judged)| {
        let log = |reason: &Unused| {
            let kid = jwk.common.key_id.as_deref().unwrap_or("(none)");
            tracing::warn!(kid, "a key of the JWKS is not used: {reason}");
        };
        judged.inspect_err(log).ok()
    });
    usable.collect()
}

fn key(jwk: &Jwk) -> Result<Key, Unused> {
    let algorithm = match &jwk.algorithm {
        AlgorithmParameters::RSA(_) => Algorithm::RS256,
        AlgorithmParameters::EllipticCurve(curve) if curve.curve == EllipticCurve::P256 => Algorithm::ES256,
        _ => return Err(Unused::Kind),
    };
    let common = &jwk.common;
    let is_to_verify = common.public_key_use.as_ref().is_none_or(|of| *of == PublicKeyUse::Signature);
    let operations = common.key_operations.as_ref();
    if !is_to_verify || operations.is_some_and(|listed| !listed.contains(&KeyOperations::Verify)) {
        return Err(Unused::Purpose);
    }
    match common.key_algorithm {
        Some(other) if other != algorithm.into() => return Err(Unused::Algorithm(other)),
        _ => {}
    }
    let key = DecodingKey::from_jwk(jwk).map_err(|_not_base64| Unused::Malformed)?;
    if let DecodingKeyKind::RsaModulusExponent { n, .. } = key.kind() {
        let bits = bits(n);
        if bits < RSA_BITS_MIN {
            return Err(Unused::Short(bits));
        }
    }
    Ok(Key::new(common.key_id.clone(), key, algorithm))
}

/// How long a number is, in bits.
fn bits(number: &[u8]) -> usize {
    let first = number.iter().position(|byte| *byte != 0);
    first.map_or(0, |at| (number.len() - at) * 8 - number[at].leading_zeros() as usize)
}

#[cfg(test)]
mod tests {
    use base64::Engine;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    use serde_json::{Value, json};

    use super::*;

    fn judge(jwk: &Value) -> Result<(), Unused> {
        key(&serde_json::from_value(jwk.clone()).unwrap()).map(|_key| ())
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
        assert_eq!(judge(&rsa(256, 0x80)), Ok(()));
        assert_eq!(judge(&rsa(257, 0)), Ok(()), "zeros before a number do not count");
        assert_eq!(judge(&rsa(256, 0x7f)), Err(Unused::Short(2_047)));
        assert_eq!(judge(&rsa(128, 0x80)), Err(Unused::Short(1_024)));
        assert_eq!(judge(&with(rsa(1, 1), "n", json!(""))), Err(Unused::Short(0)));
    }

    #[test]
    fn keys_for_another_purpose_verify_nothing() {
        for (name, value, expected) in [
            ("use", json!("sig"), Ok(())),
            ("key_ops", json!(["verify"]), Ok(())),
            ("alg", json!("RS256"), Ok(())),
            ("use", json!("enc"), Err(Unused::Purpose)),
            ("use", json!("other"), Err(Unused::Purpose)),
            ("key_ops", json!(["encrypt", "wrapKey"]), Err(Unused::Purpose)),
            ("alg", json!("RSA-OAEP"), Err(Unused::Algorithm(KeyAlgorithm::RSA_OAEP))),
            ("alg", json!("RS512"), Err(Unused::Algorithm(KeyAlgorithm::RS512))),
        ] {
            assert_eq!(judge(&with(rsa(256, 0x80), name, value.clone())), expected, "{name} {value}");
        }
        assert_eq!(judge(&json!({"kty": "oct", "k": "c2VjcmV0"})), Err(Unused::Kind));
        let okp = json!({"kty": "OKP", "crv": "Ed25519", "x": "AAAA"});
        assert_eq!(judge(&okp), Err(Unused::Kind));
    }
}
