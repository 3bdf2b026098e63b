//! Settings of authentication.

use std::path::PathBuf;

use url::Url;

use super::parse::{boolean, optional_trusted_url};
use super::process::{ProcessSettings, is_loopback};
use super::source::{SettingError, SettingsReader};

/// The shortest admin key, in bytes.
pub(crate) const ADMIN_KEY_MIN: usize = 16;
/// The shortest JWT secret, in bytes.
const JWT_SECRET_MIN: usize = 32;

/// The allowed values of the operator's key, as error messages state them.
pub(crate) const ADMIN_KEY: &str = "at least 16 bytes long, without white space or control characters in it";
/// The allowed values of the URL of a key set.
const JWKS_URL: &str =
    "an https:// URL such as https://login.example/.well-known/jwks.json, or an http:// URL on loopback";

#[derive(Clone, PartialEq, Eq)]
pub struct AuthSettings {
    /// `WEIR_ADMIN_KEY`; generated when absent.
    pub admin_key: Option<String>,
    /// `WEIR_JWT_SECRET`, for HS256; generated when absent.
    pub jwt_secret: Option<String>,
    /// `WEIR_JWKS_FILE`: public keys for RS256 and ES256; HS256 is then refused.
    pub jwks_file: Option<PathBuf>,
    /// `WEIR_JWKS_URL`: where a provider publishes its keys for RS256 and ES256; HS256 is then refused unless the secret is set.
    pub jwks_url: Option<Url>,
    /// `auth.issuer`: the required `iss` of tokens.
    pub issuer: Option<String>,
    /// `auth.audience`: the required `aud` of tokens.
    pub audience: Option<String>,
    /// `WEIR_ALLOW_ANONYMOUS`: whether the endpoints of quota and slot take callers without credentials. Unless it is set,
    /// they do on a loopback address.
    pub allow_anonymous: bool,
    /// The same for gRPC, which has an address of its own.
    pub allow_anonymous_grpc: bool,
}

impl AuthSettings {
    pub(crate) fn read(reader: &mut SettingsReader, process: &ProcessSettings) -> Result<Self, SettingError> {
        let at_least = |bytes: usize| move |text: &str| (text.len() >= bytes).then(|| text.to_owned());
        let path = |text: &str| (!text.is_empty()).then(|| PathBuf::from(text));
        let name = |text: &str| Some((!text.is_empty()).then(|| text.to_owned()));
        let allow_anonymous = reader.get_optional("allow_anonymous", boolean, "true or false")?;
        let jwks_file = reader.get_optional("jwks_file", path, "the path of a JWKS file")?;
        let jwks_url = reader.get("jwks_url", None, optional_trusted_url, JWKS_URL)?;
        if jwks_file.is_some() && jwks_url.is_some() {
            let problem = "WEIR_JWKS_FILE and WEIR_JWKS_URL are both set; set the one that has the keys of your provider";
            return Err(SettingError::conflict(problem.to_owned()));
        }
        Ok(Self {
            admin_key: reader.get_optional("admin_key", admin_key, ADMIN_KEY)?,
            jwt_secret: reader.get_optional(
                "jwt_secret",
                at_least(JWT_SECRET_MIN),
                "at least 32 bytes long",
            )?,
            jwks_file,
            jwks_url,
            issuer: reader.get("auth.issuer", None, name, "the iss of tokens")?,
            audience: reader.get("auth.audience", None, name, "the aud of tokens")?,
            allow_anonymous: allow_anonymous.unwrap_or(is_loopback(process.listen)),
            allow_anonymous_grpc: allow_anonymous.unwrap_or(is_loopback(process.grpc_listen)),
        })
    }
}

/// Parses the operator's key. It often ends with a line break, which is removed. The rest must fit into a header unchanged.
#[must_use]
pub(crate) fn admin_key(text: &str) -> Option<String> {
    let key = text.trim();
    let is_plain = !key.chars().any(|c| c.is_whitespace() || c.is_control());
    (key.len() >= ADMIN_KEY_MIN && is_plain).then(|| key.to_owned())
}

impl std::fmt::Debug for AuthSettings {
    /// Shows which secrets are set, never their values.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AuthSettings")
            .field("admin_key", &self.admin_key.as_ref().map(|_| "…"))
            .field("jwt_secret", &self.jwt_secret.as_ref().map(|_| "…"))
            .field("jwks_file", &self.jwks_file)
            .field("jwks_url", &self.jwks_url.as_ref().map(Url::host_str))
            .field("issuer", &self.issuer)
            .field("audience", &self.audience)
            .field("allow_anonymous", &self.allow_anonymous)
            .field("allow_anonymous_grpc", &self.allow_anonymous_grpc)
            .finish()
    }
}
