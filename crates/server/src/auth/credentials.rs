//! What a route asks of its caller, and the one place that checks it.

use std::sync::Arc;

use http::HeaderMap;
use weir_core::TenantId;
use weir_core::request::Scope;

use super::Auth;
use super::jwt::{Claims, bearer};

/// The scope of tokens that may spend from policies.
pub const LIMITS_CHECK: &str = "limits:check";

/// What `WWW-Authenticate` says where a bearer token is taken.
pub(crate) const BEARER_CHALLENGE: &str = r#"Bearer realm="weir""#;
/// The same for the operator's key. No registered scheme is that of a key in a header of its own, so this names it.
const ADMIN_KEY_CHALLENGE: &str = r#"AdminKey realm="weir", header="X-Admin-Key""#;
const EITHER_CHALLENGE: &str = r#"Bearer realm="weir", AdminKey realm="weir", header="X-Admin-Key""#;

/// What a caller must show. Every route of the table names one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Credentials {
    /// Nothing.
    Open,
    /// The operator's key.
    Operator,
    /// The operator's key, or a token with this scope.
    OperatorOrScope(&'static str),
    /// A valid token, whatever its scopes.
    Token,
    /// A token with this scope that names a tenant.
    Tenant(Scope),
    /// A signature over the body, which only the handler has: it checks it first of all.
    Signature,
}

/// Who a caller has proved to be.
#[derive(Clone, Debug)]
pub enum Identity {
    /// Nobody in particular: the route asks for nothing, or for the operator's key.
    None,
    /// The holder of a token.
    User(Arc<Claims>),
    /// Somebody who acts for a tenant.
    Tenant(TenantId),
}

/// Why a caller is turned away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// The operator's key is missing or wrong.
    #[error(
        "Missing or invalid X-Admin-Key header; unless WEIR_ADMIN_KEY is set, the key is in the file admin.key of \
         the server's data directory"
    )]
    AdminKey,
    /// The token is missing or not valid.
    #[error(
        "Missing, invalid or expired bearer token; `weir token` makes one, where the server's own secret signs them"
    )]
    Token,
    /// Neither the operator's key nor a valid token.
    #[error("Send X-Admin-Key, or a bearer token that is valid and has not expired")]
    AdminKeyOrToken,
    /// The token is valid and does not allow this.
    #[error("The token lacks the scope {0}; get one that has it")]
    Scope(&'static str),
    /// The token is valid and names no tenant.
    #[error("The token names no tenant; get one whose tenant_id is a name of 1 to 255 characters")]
    Tenant,
}

impl AuthError {
    /// Whether the caller is known but not allowed (403), and not unknown (401).
    #[must_use]
    pub const fn is_forbidden(self) -> bool {
        matches!(self, Self::Scope(_) | Self::Tenant)
    }

    /// Which credentials would do, as `WWW-Authenticate` says it; none where the caller is known but not allowed.
    pub(crate) const fn challenge(self) -> Option<&'static str> {
        match self {
            Self::AdminKey => Some(ADMIN_KEY_CHALLENGE),
            Self::Token => Some(BEARER_CHALLENGE),
            Self::AdminKeyOrToken => Some(EITHER_CHALLENGE),
            Self::Scope(_) | Self::Tenant => None,
        }
    }
}

impl Auth {
    /// Checks what a request shows against what its route asks for.
    /// Says what is missing.
    pub fn authorize(&self, required: Credentials, headers: &HeaderMap) -> Result<Identity, AuthError> {
        match required {
            Credentials::Open | Credentials::Signature => Ok(Identity::None),
            Credentials::Operator if self.admin.matches(headers) => Ok(Identity::None),
            Credentials::Operator => Err(AuthError::AdminKey),
            Credentials::OperatorOrScope(_) if self.admin.matches(headers) => Ok(Identity::None),
            Credentials::OperatorOrScope(scope) => {
                let claims = self.claims(headers).ok_or(AuthError::AdminKeyOrToken)?;
                if claims.allows(scope) { Ok(Identity::None) } else { Err(AuthError::Scope(scope)) }
            }
            Credentials::Token => self.claims(headers).map(Identity::User).ok_or(AuthError::Token),
            Credentials::Tenant(scope) => self.tenant(headers, scope).map(Identity::Tenant),
        }
    }

    /// What the token of a request says, if it brings a valid one.
    fn claims(&self, headers: &HeaderMap) -> Option<Arc<Claims>> {
        bearer(headers).and_then(|token| self.tokens.verify(token))
    }

    fn tenant(&self, headers: &HeaderMap, scope: Scope) -> Result<TenantId, AuthError> {
        let claims = self.claims(headers).ok_or(AuthError::Token)?;
        if !claims.scope.as_deref().is_some_and(|granted| scope.is_in(granted)) {
            return Err(AuthError::Scope(scope.as_str()));
        }
        let tenant = claims.tenant_id.as_deref().and_then(|tenant| TenantId::parse(tenant).ok());
        tenant.ok_or(AuthError::Tenant)
    }
}
