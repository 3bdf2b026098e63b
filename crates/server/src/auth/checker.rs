//! Who may ask about limits: the operator, and callers whose token says so.

use std::sync::Arc;

use axum::extract::FromRequestParts;
use http::request::Parts;

use super::jwt::authenticate;
use crate::app::App;
use crate::http::error::ApiError;

/// The scope a token needs.
pub const SCOPE: &str = "limits:check";

/// Proof that the caller may spend of policies.
#[derive(Clone, Copy, Debug)]
pub struct Checker;

impl FromRequestParts<Arc<App>> for Checker {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, ApiError> {
        if app.auth.admin.matches(&parts.headers) {
            return Ok(Self);
        }
        let claims = authenticate(&parts.headers, app).map_err(|_unknown| {
            ApiError::unauthenticated("Send X-Admin-Key, or a bearer token that is valid and has not expired")
        })?;
        if claims.allows(SCOPE) {
            Ok(Self)
        } else {
            Err(ApiError::forbidden(format!("The token lacks the scope {SCOPE}; get one that has it")))
        }
    }
}
