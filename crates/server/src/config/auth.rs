//! Who may call.

use std::path::PathBuf;

use super::parse::boolean;
use super::source::{Reader, SettingError};

/// The shortest secrets accepted, in bytes.
const ADMIN_KEY_MIN: usize = 16;
const JWT_SECRET_MIN: usize = 32;

/// Who may call.
#[derive(Clone, PartialEq, Eq)]
pub struct AuthSettings {
    /// `WEIR_ADMIN_KEY`; generated when absent.
    pub admin_key: Option<String>,
    /// `WEIR_JWT_SECRET`, for HS256; generated when absent.
    pub jwt_secret: Option<String>,
    /// `WEIR_JWKS_FILE`: public keys for RS256 and ES256; HS256 is then refused.
    pub jwks_file: Option<PathBuf>,
    /// `WEIR_ALLOW_ANONYMOUS`: whether endpoints without credentials may listen on more than loopback.
    pub allow_anonymous: bool,
}

impl AuthSettings {
    pub(super) fn read(reader: &mut Reader) -> Result<Self, SettingError> {
        let at_least = |bytes: usize| move |text: &str| (text.len() >= bytes).then(|| text.to_owned());
        let path = |text: &str| (!text.is_empty()).then(|| PathBuf::from(text));
        Ok(Self {
            admin_key: reader.get_optional("admin_key", at_least(ADMIN_KEY_MIN), "at least 16 bytes long")?,
            jwt_secret: reader.get_optional(
                "jwt_secret",
                at_least(JWT_SECRET_MIN),
                "at least 32 bytes long",
            )?,
            jwks_file: reader.get_optional("jwks_file", path, "the path of a JWKS file")?,
            allow_anonymous: reader.get("allow_anonymous", false, boolean, "true or false")?,
        })
    }
}

impl std::fmt::Debug for AuthSettings {
    /// Says which secrets are given, never what they are.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AuthSettings")
            .field("admin_key", &self.admin_key.as_ref().map(|_| "…"))
            .field("jwt_secret", &self.jwt_secret.as_ref().map(|_| "…"))
            .field("jwks_file", &self.jwks_file)
            .field("allow_anonymous", &self.allow_anonymous)
            .finish()
    }
}
