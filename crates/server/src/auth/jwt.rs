//! Callers' tokens: signed JWTs, with HS256 by the server's own secret or RS256/ES256 by keys in a JWKS file.

mod key_set;
mod verified_tokens;

use std::path::Path;
use std::sync::Arc;

use jsonwebtoken::jwk::JwkSet;
use jsonwebtoken::{Algorithm, DecodingKey, EncodingKey, Header, Validation, decode, decode_header, encode};
use serde::{Deserialize, Serialize};

use self::verified_tokens::VerifiedTokens;
use crate::settings::source::SettingError;

/// What a token says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claims {
    /// Who is calling.
    pub sub: String,
    /// Until when the token is good, in seconds since 1970.
    pub exp: u64,
    /// The tenant whose data the caller may see.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant_id: Option<String>,
    /// What the caller may do, separated by spaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<String>,
}

impl Claims {
    /// Whether the token allows `scope`.
    #[must_use]
    pub fn allows(&self, scope: &str) -> bool {
        self.scope.iter().any(|scopes| scopes.split(' ').any(|allowed| allowed == scope))
    }
}

/// A token's body, before it is believed. Times are seconds since 1970, perhaps with a fraction.
#[derive(Deserialize)]
struct Signed {
    sub: String,
    exp: f64,
    #[serde(default)]
    tenant_id: Option<String>,
    #[serde(default)]
    scope: Option<String>,
    /// When it was signed.
    #[serde(default)]
    iat: Option<f64>,
}

impl Signed {
    /// What it says, unless it claims to have been signed in the future: a clock is wrong then, or somebody lies.
    fn of_the_past(self, now_seconds: i64) -> Option<Claims> {
        let Self { sub, exp, tenant_id, scope, iat } = self;
        let is_past = iat.is_none_or(|iat| iat <= now_seconds as f64 + LEEWAY_SECONDS as f64);
        is_past.then(|| Claims { sub, exp: whole_seconds(exp), tenant_id, scope })
    }
}

/// A time without its fraction. One that is out of range becomes the nearest that is not, as all conversions of floats do.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the fraction is to go, and out of range the nearest number is right"
)]
const fn whole_seconds(seconds: f64) -> u64 {
    seconds as u64
}

/// How far the clocks of issuers may be off.
const LEEWAY_SECONDS: u64 = 5;

/// Checks tokens. Only the algorithms of the keys it has are accepted, whatever a token claims to be signed with.
pub struct Verifier {
    keys: Vec<Key>,
    verified: VerifiedTokens,
}

struct Key {
    id: Option<String>,
    key: DecodingKey,
    validation: Validation,
}

impl Verifier {
    /// Tokens signed with a shared secret.
    #[must_use]
    pub fn from_secret(secret: &str) -> Self {
        let key = DecodingKey::from_secret(secret.as_bytes());
        let keys = vec![Key::new(None, key, Algorithm::HS256)];
        Self { keys, verified: VerifiedTokens::default() }
    }

    /// The same, but tokens have to name this issuer (`iss`), or this audience among theirs (`aud`), where one is given.
    #[must_use]
    pub fn expecting(mut self, issuer: Option<&str>, audience: Option<&str>) -> Self {
        for Key { validation, .. } in &mut self.keys {
            if let Some(issuer) = issuer {
                validation.set_issuer(&[issuer]);
                validation.required_spec_claims.insert("iss".to_owned());
            }
            if let Some(audience) = audience {
                validation.validate_aud = true;
                validation.set_audience(&[audience]);
                validation.required_spec_claims.insert("aud".to_owned());
            }
        }
        self
    }

    /// Tokens signed with one of the keys in a file.
    /// Fails when the file cannot be read or has no key that can be used.
    pub fn from_jwks_file(path: &Path) -> Result<Self, SettingError> {
        let refuse = |problem: String| {
            let allowed =
                format!("a JWKS file with keys for RS256 (2,048 bits or more) or ES256 ({problem})");
            SettingError::new("WEIR_JWKS_FILE", path.display(), allowed)
        };
        let text = std::fs::read(path).map_err(|error| refuse(error.to_string()))?;
        let set: JwkSet = serde_json::from_slice(&text).map_err(|error| refuse(error.to_string()))?;
        let keys = key_set::usable(&set);
        if keys.is_empty() {
            return Err(refuse("it has none".to_owned()));
        }
        Ok(Self { keys, verified: VerifiedTokens::default() })
    }

    /// What a token says, if it is genuine and not past its time.
    #[must_use]
    pub fn verify(&self, token: &str) -> Option<Arc<Claims>> {
        let now = jiff::Timestamp::now().as_second();
        let now_seconds = u64::try_from(now).unwrap_or(0);
        if let Some(claims) = self.verified.get(token, now_seconds) {
            return Some(claims);
        }
        let claims = Arc::new(self.judge(token, now)?);
        self.verified.insert(token, &claims, now_seconds);
        Some(claims)
    }

    fn judge(&self, token: &str, now_seconds: i64) -> Option<Claims> {
        let header = decode_header(token).ok()?;
        // It names what a reader must understand besides the standard, and Weir understands none of that.
        if header.crit.is_some() {
            return None;
        }
        let candidates = self.keys.iter().filter(|key| match (&header.kid, &key.id) {
            (Some(wanted), Some(id)) => wanted == id,
            _ => true,
        });
        candidates
            .filter(|key| key.validation.algorithms.contains(&header.alg))
            .find_map(|key| decode::<Signed>(token, &key.key, &key.validation).ok())
            .and_then(|token| token.claims.of_the_past(now_seconds))
    }
}

impl Key {
    fn new(id: Option<String>, key: DecodingKey, algorithm: Algorithm) -> Self {
        Self { id, key, validation: validation(algorithm) }
    }
}

/// `exp` has to be there and in the future, `nbf` in the past where it is there, both to within the leeway.
fn validation(algorithm: Algorithm) -> Validation {
    let mut validation = Validation::new(algorithm);
    validation.set_required_spec_claims(&["exp", "sub"]);
    validation.leeway = LEEWAY_SECONDS;
    validation.validate_nbf = true;
    // Unless a setting says whom tokens are for, they may name anybody.
    validation.validate_aud = false;
    validation
}

/// Signs a token with the server's own secret.
/// Fails when the claims cannot be encoded.
pub fn sign(secret: &str, claims: &Claims) -> Result<String, jsonwebtoken::errors::Error> {
    sign_for(secret, claims, None, None)
}

/// The same for a server that expects an issuer or an audience.
/// Fails when the claims cannot be encoded.
pub fn sign_for(
    secret: &str,
    claims: &Claims,
    issuer: Option<&str>,
    audience: Option<&str>,
) -> Result<String, jsonwebtoken::errors::Error> {
    #[derive(Serialize)]
    struct Body<'a> {
        #[serde(flatten)]
        claims: &'a Claims,
        #[serde(skip_serializing_if = "Option::is_none")]
        iss: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        aud: Option<&'a str>,
    }
    let body = Body { claims, iss: issuer, aud: audience };
    encode(&Header::new(Algorithm::HS256), &body, &EncodingKey::from_secret(secret.as_bytes()))
}

impl std::fmt::Debug for Verifier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Verifier").field("keys", &self.keys.len()).finish()
    }
}

/// The token of `Authorization: Bearer`.
#[must_use]
pub fn bearer(headers: &http::HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(http::header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

#[cfg(test)]
mod tests;
