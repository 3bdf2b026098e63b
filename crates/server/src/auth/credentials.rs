//! The credentials that a route requires, and the only place that checks them.

use std::sync::Arc;

use http::{HeaderMap, Method};
use subtle::ConstantTimeEq;
use weir_core::TenantId;
use weir_core::request::Scope;

use super::Auth;
use super::jwt::{VerifiedClaims, bearer};

/// The header with the operator's key.
pub const ADMIN_KEY_HEADER: &str = "x-admin-key";

/// The scope of tokens that may spend from policies.
pub const LIMITS_CHECK: &str = "limits:check";
/// The scope of tokens that may configure quota.
pub const QUOTA_CONFIGURE: &str = "quota:configure";
/// The scope of tokens that may send messages.
pub const QUOTA_SEND: &str = "quota:send";
/// The scope of tokens that may use slots.
pub const SLOTS_ASSIGN: &str = "slots:assign";
/// The scope of tokens that may do what the operator's key may.
pub const ADMIN: &str = "admin";
/// The scope of tokens that may read what operators may, and change nothing.
pub const ADMIN_READ: &str = "admin:read";

/// `WWW-Authenticate` of routes that accept a bearer token.
pub(crate) const BEARER_CHALLENGE: &str = r#"Bearer realm="weir""#;
/// `WWW-Authenticate` of routes that also accept the operator's key. No registered scheme fits a key in its own header.
const EITHER_CHALLENGE: &str = r#"Bearer realm="weir", AdminKey realm="weir", header="X-Admin-Key""#;

/// The credentials that a route requires. CONTRIBUTING.md, "Adding a route", says what a new scope needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Credentials {
    /// None.
    Open,
    /// Those of an operator: the operator's key, or a token with the scope `admin`, or `admin:read` to read.
    Operator,
    /// Those of an operator, or a token with this scope.
    OperatorOrScope(&'static str),
    /// None while anonymous callers are allowed, otherwise those of an operator or a token with this scope.
    AnonymousOrScope(&'static str),
    /// A valid token, whatever its scopes.
    Token,
    /// A valid token if `sale.identity` says that tokens name buyers, otherwise none.
    Buyer,
    /// A token with this scope that names a tenant.
    Tenant(Scope),
    /// A signature over the body. Only the handler has the body, so the handler checks the signature before anything else.
    Signature,
}

/// Whom the credentials of a caller identify.
#[derive(Clone, Debug)]
pub enum Identity {
    /// Anybody.
    None,
    /// Somebody who may do what operators do. Handlers need not know who, but their log lines say it.
    Operator(Operator),
    /// The holder of a token.
    User(Arc<VerifiedClaims>),
    /// A caller that acts for a tenant.
    Tenant(TenantId),
}

/// By what a caller was admitted to a route of operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operator {
    /// The scope of the token; `None` for the operator's key.
    pub scope: Option<&'static str>,
    /// The tenant that the token names.
    pub tenant: Option<Box<str>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// The token is missing or not valid.
    #[error(
        "Missing, invalid or expired bearer token; `weir token` prints one if the server signs tokens with its own secret"
    )]
    Token,
    /// The request carries neither the operator's key nor a valid token.
    #[error(
        "Send X-Admin-Key, or a bearer token that is valid and has not expired; unless WEIR_ADMIN_KEY is set, the key is \
         in the file admin.key of the server's data directory"
    )]
    AdminKeyOrToken,
    /// The token is valid but lacks the scope.
    #[error("The token lacks the scope {0}; get one that has it")]
    Scope(&'static str),
    /// The token may read what operators may, and the request is neither GET nor HEAD.
    #[error("The scope admin:read may change nothing; get a token that has the scope admin")]
    ReadOnly,
    /// The token is valid but names no tenant.
    #[error("The token names no tenant; get one whose tenant_id is a name of 1 to 255 characters")]
    Tenant,
}

impl AuthError {
    /// Whether the caller is known but not allowed (403), and not unknown (401).
    #[must_use]
    pub const fn is_forbidden(self) -> bool {
        matches!(self, Self::Scope(_) | Self::ReadOnly | Self::Tenant)
    }

    /// The value of `WWW-Authenticate`; `None` if the caller is known but not allowed.
    pub(crate) const fn challenge(self) -> Option<&'static str> {
        match self {
            Self::Token => Some(BEARER_CHALLENGE),
            Self::AdminKeyOrToken => Some(EITHER_CHALLENGE),
            Self::Scope(_) | Self::ReadOnly | Self::Tenant => None,
        }
    }
}

/// The operator's key.
pub struct AdminKey(Box<[u8]>);

impl AdminKey {
    #[must_use]
    pub fn new(key: &str) -> Self {
        Self(key.as_bytes().into())
    }

    /// Whether the headers carry the key, compared in constant time.
    #[must_use]
    pub fn matches(&self, headers: &HeaderMap) -> bool {
        headers.get(ADMIN_KEY_HEADER).is_some_and(|value| value.as_bytes().ct_eq(&self.0).into())
    }
}

impl std::fmt::Debug for AdminKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AdminKey(…)")
    }
}

impl Auth {
    /// Checks the credentials of a request against those that its route requires. A token whose key is unknown is looked at
    /// again once the provider has been asked for the key.
    pub async fn authorize(
        &self,
        required: Credentials,
        method: &Method,
        headers: &HeaderMap,
    ) -> Result<Identity, AuthError> {
        let checked = self.check(required, method, headers);
        if let (Err(error), Some(token)) = (&checked, bearer(headers))
            && !error.is_forbidden()
            && self.tokens.fetch_key_of(token).await
        {
            return self.check(required, method, headers);
        }
        checked
    }

    fn check(
        &self,
        required: Credentials,
        method: &Method,
        headers: &HeaderMap,
    ) -> Result<Identity, AuthError> {
        match required {
            Credentials::Open | Credentials::Signature => Ok(Identity::None),
            Credentials::Buyer if !self.buyers_have_tokens => Ok(Identity::None),
            Credentials::Operator => self.operator(method, headers, None),
            Credentials::AnonymousOrScope(_) if self.allow_anonymous => Ok(Identity::None),
            Credentials::OperatorOrScope(scope) | Credentials::AnonymousOrScope(scope) => {
                self.operator(method, headers, Some(scope))
            }
            Credentials::Token | Credentials::Buyer => {
                self.claims(headers).map(Identity::User).ok_or(AuthError::Token)
            }
            Credentials::Tenant(scope) => self.tenant(headers, scope).map(Identity::Tenant),
        }
    }

    /// Admits an operator, and a caller whose token has `scope`.
    fn operator(
        &self,
        method: &Method,
        headers: &HeaderMap,
        scope: Option<&'static str>,
    ) -> Result<Identity, AuthError> {
        if self.admin.matches(headers) {
            return Ok(Identity::Operator(Operator { scope: None, tenant: None }));
        }
        let claims = self.claims(headers).ok_or(AuthError::AdminKeyOrToken)?;
        let admit = |scope| {
            let tenant = claims.tenant_id.as_deref().map(Box::from);
            Ok(Identity::Operator(Operator { scope: Some(scope), tenant }))
        };
        if let Some(scope) = [Some(ADMIN), scope].into_iter().flatten().find(|scope| claims.allows(scope)) {
            return admit(scope);
        }
        match claims.allows(ADMIN_READ) {
            true if matches!(*method, Method::GET | Method::HEAD) => admit(ADMIN_READ),
            true => Err(AuthError::ReadOnly),
            false => Err(AuthError::Scope(scope.unwrap_or(ADMIN))),
        }
    }

    /// Returns the claims of the request's token if it is valid.
    fn claims(&self, headers: &HeaderMap) -> Option<Arc<VerifiedClaims>> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_exact_admin_key_matches() {
        let key = AdminKey::new("0123456789abcdef");
        let with =
            |value: &str| HeaderMap::from_iter([(ADMIN_KEY_HEADER.parse().unwrap(), value.parse().unwrap())]);
        assert!(key.matches(&with("0123456789abcdef")));
        for wrong in ["", "0", "0123456789abcde", "0123456789abcdefg", "0123456789ABCDEF"] {
            assert!(!key.matches(&with(wrong)), "{wrong}");
        }
        assert!(!key.matches(&HeaderMap::new()));
        assert!(!format!("{key:?}").contains("0123"));
    }
}
