//! Callers' tokens: JWTs signed with the server's own secret (HS256), or with keys of a JWKS file or of an identity provider
//! (RS256, ES256).

mod key_set;
mod provider;
mod verified_tokens;

use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jsonwebtoken::{Algorithm, DecodingKey, EncodingKey, Header, Validation, decode, decode_header, encode};
use serde::{Deserialize, Serialize};

use tokio_util::sync::CancellationToken;
use url::Url;

use self::provider::{ProviderKeys, Timing};
use self::verified_tokens::VerifiedTokens;
use crate::settings::source::SettingError;

/// The claims of a token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claims {
    /// The user.
    pub sub: String,
    /// The time of expiry, in seconds since 1970.
    pub exp: u64,
    /// The tenant that the user acts for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant_id: Option<String>,
    /// The granted scopes, separated by spaces.
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

/// The claims of a token whose signature is valid, and the plan that it claims.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifiedClaims {
    claims: Claims,
    /// The claim that [`RequiredClaims::plan_claim`] names, as text.
    pub plan: Option<Box<str>>,
}

impl Deref for VerifiedClaims {
    type Target = Claims;

    fn deref(&self) -> &Claims {
        &self.claims
    }
}

/// The body of a token as it was signed. Times are seconds since 1970 and may have a fraction.
#[derive(Deserialize)]
struct SignedClaims {
    sub: String,
    exp: f64,
    #[serde(default)]
    tenant_id: Option<String>,
    #[serde(default)]
    scope: Option<SignedScope>,
    /// The time of signing.
    #[serde(default)]
    iat: Option<f64>,
}

/// Scopes as providers write them: separated by spaces, or as a list.
#[derive(Deserialize)]
#[serde(untagged)]
enum SignedScope {
    Text(String),
    List(Vec<String>),
}

impl SignedScope {
    fn into_text(self) -> String {
        match self {
            Self::Text(text) => text,
            Self::List(mut scopes) => {
                // No scope has a space in its name; joined, such an item would become several.
                scopes.retain(|scope| !scope.contains(' '));
                scopes.join(" ")
            }
        }
    }
}

impl SignedClaims {
    /// Returns `None` if the token was signed in the future: then a clock is wrong, or the token is forged.
    fn into_claims(self, now_seconds: i64) -> Option<Claims> {
        let Self { sub, exp, tenant_id, scope, iat } = self;
        let is_past = iat.is_none_or(|iat| iat <= now_seconds as f64 + LEEWAY_SECONDS as f64);
        let scope = scope.map(SignedScope::into_text);
        is_past.then(|| Claims { sub, exp: whole_seconds(exp), tenant_id, scope })
    }
}

/// Drops the fraction. A time out of range becomes the nearest one in range.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the fraction is not needed, and out of range the nearest number is right"
)]
const fn whole_seconds(seconds: f64) -> u64 {
    seconds as u64
}

/// How much the clocks of issuers may differ from ours.
const LEEWAY_SECONDS: u64 = 5;

/// Verifies tokens. A token's header cannot select an algorithm that its key is not for.
pub struct TokenVerifier {
    source: KeySource,
}

/// The origin of the keys.
enum KeySource {
    /// A secret or a file, read at the start.
    Fixed(Box<KeySet>),
    Provider(Box<ProviderKeys>),
}

/// The longest text of a claimed plan that is kept, in characters. No plan has so long a name.
const PLAN_MAX: usize = 64;

/// The claims that tokens must have, if they are set, and the one that may have a plan.
#[derive(Clone, Debug, Default)]
pub struct RequiredClaims {
    /// The issuer (`iss`).
    pub issuer: Option<String>,
    /// The audience (`aud`), alone or among others.
    pub audience: Option<String>,
    /// The name of the claim that may have the user's plan.
    pub plan_claim: Option<String>,
}

/// Keys, and the tokens that they have verified.
struct KeySet {
    keys: Vec<VerificationKey>,
    plan_claim: Option<String>,
    verified: VerifiedTokens,
}

#[derive(Clone)]
struct VerificationKey {
    id: Option<String>,
    key: DecodingKey,
    validation: Validation,
}

impl TokenVerifier {
    /// Verifies tokens that are signed with a shared secret.
    #[must_use]
    pub fn from_secret(secret: &str, required: &RequiredClaims) -> Self {
        Self::fixed([VerificationKey::from_secret(secret)], required)
    }

    /// Verifies tokens that are signed with one of the keys in a file.
    /// Fails when the file cannot be read or has no usable key.
    pub fn from_jwks_file(path: &Path, required: &RequiredClaims) -> Result<Self, SettingError> {
        let refuse = |problem: String| {
            let allowed =
                format!("a JWKS file with keys for RS256 (2,048 bits or more) or ES256 ({problem})");
            SettingError::new("WEIR_JWKS_FILE", path.display(), allowed)
        };
        let text = std::fs::read(path).map_err(|error| refuse(error.to_string()))?;
        let keys = key_set::usable_keys(&text).map_err(|error| refuse(error.to_string()))?;
        if keys.is_empty() {
            return Err(refuse("the file has none".to_owned()));
        }
        Ok(Self::fixed(keys, required))
    }

    /// Verifies tokens that are signed with one of the keys at a URL, or with the secret if there is one. The keys have to be
    /// fetched. Fails when the URL cannot be called.
    pub fn from_jwks_url(
        url: &Url,
        secret: Option<&str>,
        required: RequiredClaims,
    ) -> Result<Self, SettingError> {
        let own_key = secret.map(VerificationKey::from_secret);
        let provider = ProviderKeys::new(url, own_key, required, Timing::default());
        let provider =
            provider.ok_or_else(|| SettingError::secret("WEIR_JWKS_URL", "a URL that can be called"))?;
        Ok(Self { source: KeySource::Provider(Box::new(provider)) })
    }

    fn fixed(keys: impl IntoIterator<Item = VerificationKey>, required: &RequiredClaims) -> Self {
        Self { source: KeySource::Fixed(Box::new(KeySet::new(keys, required))) }
    }

    /// Fetches the keys of the provider for the first time, if there is one. Returns after some seconds even without them.
    pub async fn fetch_first_keys(&self) {
        if let KeySource::Provider(provider) = &self.source {
            provider.fetch_first().await;
        }
    }

    /// Keeps the keys of the provider fresh until the server stops, if there is one.
    pub async fn keep_keys_fresh(&self, closing: &CancellationToken) {
        if let KeySource::Provider(provider) = &self.source {
            provider.keep_fresh(closing).await;
        }
    }

    /// Fetches the key of a token if the provider may have published it since. Returns whether it has, so that the token is
    /// worth another look.
    pub async fn fetch_key_of(&self, token: &str) -> bool {
        let KeySource::Provider(provider) = &self.source else { return false };
        let Ok(Header { alg: Algorithm::RS256 | Algorithm::ES256, kid: Some(key_id), .. }) =
            decode_header(token)
        else {
            return false;
        };
        !provider.current().has(&key_id) && provider.fetch_key(&key_id).await
    }

    /// Returns the claims of a token if its signature is valid and it has not expired.
    #[must_use]
    pub fn verify(&self, token: &str) -> Option<Arc<VerifiedClaims>> {
        match &self.source {
            KeySource::Fixed(keys) => keys.verify(token),
            KeySource::Provider(provider) => provider.current().verify(token),
        }
    }
}

impl KeySet {
    fn new(keys: impl IntoIterator<Item = VerificationKey>, required: &RequiredClaims) -> Self {
        let keys = keys.into_iter().map(|key| key.requiring(required)).collect();
        Self { keys, plan_claim: required.plan_claim.clone(), verified: VerifiedTokens::default() }
    }

    fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether there is a key of this id.
    fn has(&self, key_id: &str) -> bool {
        self.keys.iter().any(|key| key.id.as_deref() == Some(key_id))
    }

    fn verify(&self, token: &str) -> Option<Arc<VerifiedClaims>> {
        let now = jiff::Timestamp::now().as_second();
        let now_seconds = u64::try_from(now).unwrap_or(0);
        if let Some(claims) = self.verified.get(token, now_seconds) {
            return Some(claims);
        }
        let claims = self.verify_signature(token, now)?;
        let plan = self.plan_claim.as_deref().and_then(|claim| read_plan(token, claim));
        let claims = Arc::new(VerifiedClaims { claims, plan });
        self.verified.insert(token, &claims, now_seconds);
        Some(claims)
    }

    fn verify_signature(&self, token: &str, now_seconds: i64) -> Option<Claims> {
        let header = decode_header(token).ok()?;
        // `crit` names extensions that a reader must understand. Weir understands none.
        if header.crit.is_some() {
            return None;
        }
        let candidates = self.keys.iter().filter(|key| match (&header.kid, &key.id) {
            (Some(key_id), Some(id)) => key_id == id,
            _ => true,
        });
        candidates
            .filter(|key| key.validation.algorithms.contains(&header.alg))
            .find_map(|key| decode::<SignedClaims>(token, &key.key, &key.validation).ok())
            .and_then(|token| token.claims.into_claims(now_seconds))
    }
}

/// Returns a claim of a token that was verified, as text. One that is not a text is returned as JSON: it names no plan.
fn read_plan(token: &str, claim: &str) -> Option<Box<str>> {
    let body = URL_SAFE_NO_PAD.decode(token.split('.').nth(1)?).ok()?;
    let mut body: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(&body).ok()?;
    let text = match body.remove(claim)? {
        serde_json::Value::Null => return None,
        serde_json::Value::String(text) => text,
        other => other.to_string(),
    };
    Some(text.chars().take(PLAN_MAX).collect())
}

impl VerificationKey {
    fn new(id: Option<String>, key: DecodingKey, algorithm: Algorithm) -> Self {
        Self { id, key, validation: validation(algorithm) }
    }

    fn from_secret(secret: &str) -> Self {
        Self::new(None, DecodingKey::from_secret(secret.as_bytes()), Algorithm::HS256)
    }

    fn requiring(mut self, RequiredClaims { issuer, audience, .. }: &RequiredClaims) -> Self {
        if let Some(issuer) = issuer {
            self.validation.set_issuer(&[issuer]);
            self.validation.required_spec_claims.insert("iss".to_owned());
        }
        if let Some(audience) = audience {
            self.validation.validate_aud = true;
            self.validation.set_audience(&[audience]);
            self.validation.required_spec_claims.insert("aud".to_owned());
        }
        self
    }
}

/// `sub` and `exp` are required, `exp` in the future; `nbf` is optional and must be in the past; both within the leeway.
fn validation(algorithm: Algorithm) -> Validation {
    let mut validation = Validation::new(algorithm);
    validation.set_required_spec_claims(&["exp", "sub"]);
    validation.leeway = LEEWAY_SECONDS;
    validation.validate_nbf = true;
    // Tokens may name any audience unless a setting requires one.
    validation.validate_aud = false;
    validation
}

/// Signs a token with the server's own secret.
/// Fails when the claims cannot be encoded.
pub fn sign(secret: &str, claims: &Claims) -> Result<String, jsonwebtoken::errors::Error> {
    sign_for(secret, claims, None, None)
}

/// Signs a token for a server that requires an issuer or an audience.
/// Fails when the claims cannot be encoded.
pub fn sign_for(
    secret: &str,
    claims: &Claims,
    issuer: Option<&str>,
    audience: Option<&str>,
) -> Result<String, jsonwebtoken::errors::Error> {
    #[derive(Serialize)]
    struct TokenBody<'a> {
        #[serde(flatten)]
        claims: &'a Claims,
        #[serde(skip_serializing_if = "Option::is_none")]
        iss: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        aud: Option<&'a str>,
    }
    let body = TokenBody { claims, iss: issuer, aud: audience };
    encode(&Header::new(Algorithm::HS256), &body, &EncodingKey::from_secret(secret.as_bytes()))
}

impl std::fmt::Debug for TokenVerifier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let keys = match &self.source {
            KeySource::Fixed(keys) => keys.len(),
            KeySource::Provider(provider) => provider.current().len(),
        };
        f.debug_struct("TokenVerifier").field("keys", &keys).finish()
    }
}

/// Returns the token of `Authorization: Bearer`.
#[must_use]
pub fn bearer(headers: &http::HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(http::header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

#[cfg(test)]
mod tests;
