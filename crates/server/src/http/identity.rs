//! Who calls, as the router has found out before it runs a handler.

use std::sync::Arc;

use axum::extract::FromRequestParts;
use http::request::Parts;
use weir_core::TenantId;

use super::error::ApiError;
use crate::auth::credentials::Identity;
use crate::auth::jwt::Claims;

/// The tenant that a caller acts for, on routes whose credentials are `Tenant`.
#[derive(Clone, Debug)]
pub(crate) struct Tenant(pub(crate) TenantId);

/// The holder of a token, on routes whose credentials are `Token`.
#[derive(Clone, Debug)]
pub(crate) struct User(pub(crate) Arc<Claims>);

impl<S: Sync> FromRequestParts<S> for Tenant {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, ApiError> {
        match parts.extensions.remove() {
            Some(Identity::Tenant(tenant)) => Ok(Self(tenant)),
            _ => Err(not_checked()),
        }
    }
}

impl<S: Sync> FromRequestParts<S> for User {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, ApiError> {
        match parts.extensions.remove() {
            Some(Identity::User(claims)) => Ok(Self(claims)),
            _ => Err(not_checked()),
        }
    }
}

/// The table of routes asks for other credentials than the handler needs: a fault of Weir, and the route stays closed.
fn not_checked() -> ApiError {
    tracing::error!("a handler needs an identity that its route does not ask for");
    ApiError::internal()
}
