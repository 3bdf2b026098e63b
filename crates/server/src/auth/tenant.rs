//! Which tenant a caller acts for, and whether its token allows what it asks for.

use std::sync::Arc;

use axum::extract::FromRequestParts;
use http::request::Parts;
use weir_core::TenantId;
use weir_core::request::Scope;

use super::jwt::authenticate;
use crate::app::App;
use crate::http::error::ApiError;

/// Proof that the caller may submit requests for this tenant.
#[derive(Clone, Debug)]
pub struct Submitter(pub TenantId);

/// Proof that the caller may read this tenant's requests.
#[derive(Clone, Debug)]
pub struct Viewer(pub TenantId);

impl FromRequestParts<Arc<App>> for Submitter {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, ApiError> {
        allowed(parts, app, Scope::Create).map(Self)
    }
}

impl FromRequestParts<Arc<App>> for Viewer {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, ApiError> {
        allowed(parts, app, Scope::Read).map(Self)
    }
}

fn allowed(parts: &Parts, app: &Arc<App>, scope: Scope) -> Result<TenantId, ApiError> {
    let claims = authenticate(&parts.headers, app)?;
    if !claims.scope.as_deref().is_some_and(|granted| scope.is_in(granted)) {
        let scope = scope.as_str();
        return Err(ApiError::forbidden(format!("The token lacks the scope {scope}; get one that has it")));
    }
    let tenant = claims.tenant_id.as_deref().and_then(|tenant| TenantId::parse(tenant).ok());
    tenant.ok_or_else(|| {
        let message = "The token names no tenant; get one whose tenant_id is a name of 1 to 255 characters";
        ApiError::forbidden(message)
    })
}
