//! What operators do with a whole tenant: its limit of new requests, and erasing its data.

use std::sync::Arc;

use axum::extract::State;
use http::StatusCode;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use weir_core::TenantId;
use weir_core::quota::QuotaLimits;
use weir_store::request::{TENANT_LIMITS_MAX, TenantLimit};

use crate::app::App;
use crate::http::body::Json;
use crate::http::error::ApiError;
use crate::http::extract::PathParam;
use crate::http::openapi::schema;
use crate::request::events::{ErasureBegun, TenantLimitChanged};
use crate::request::service::tenants::EffectiveLimit;

#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct TenantLimitRequest {
    /// New requests in a minute; 0 is no limit.
    #[schema(value_type = u32, maximum = 2_147_483_647, examples(600))]
    requests_per_minute: serde_json::Value,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = TenantLimit)]
pub(crate) struct TenantLimitResponse {
    tenant_id: String,
    /// New requests in a minute; 0 is no limit.
    #[schema(examples(600))]
    requests_per_minute: u32,
    /// `operator` if it was set for this tenant, else `settings` (`request.tenant_limit`).
    #[schema(examples("operator"))]
    source: &'static str,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ErasureResponse {
    /// How many requests are erased; 1,000,000 if there are more.
    #[schema(examples(1234))]
    erasing: u64,
}

/// Read a tenant's limit.
///
/// How many new requests the tenant may submit in a minute: what an operator has set for it, else the setting
/// `request.tenant_limit`. At most 5 seconds old.
#[utoipa::path(
    get,
    path = "/admin/tenants/{tenant}/limits",
    tag = "request",
    params(("tenant" = schema::TenantName, Path, description = "The `tenant_id` of its tokens, percent-encoded.")),
    responses(
        (status = 200, description = "The limit.", body = TenantLimitResponse),
        (status = 400, description = "The tenant in the path is too long or contains a control character. Nothing was changed."),
    ),
)]
pub(crate) async fn get_tenant_limit(
    State(app): State<Arc<App>>,
    tenant: PathParam,
) -> Result<Json<TenantLimitResponse>, ApiError> {
    let tenant = parse_tenant(tenant)?;
    let limit = app.requests.tenant_limits().of(&tenant).await?;
    Ok(Json(describe(&tenant, limit)))
}

/// Change a tenant's limit.
///
/// Applies at once on this server, within 5 seconds on the others, and from then on instead of the setting. What the tenant has
/// submitted in its present minute counts.
#[utoipa::path(
    put,
    path = "/admin/tenants/{tenant}/limits",
    tag = "request",
    params(("tenant" = schema::TenantName, Path, description = "The `tenant_id` of its tokens, percent-encoded.")),
    request_body = TenantLimitRequest,
    responses(
        (status = 200, description = "The limit as it is now.", body = TenantLimitResponse),
        (status = 409, description = "`TOO_MANY_LIMITS`: 10,000 tenants have limits of their own. Remove one first."),
    ),
)]
pub(crate) async fn put_tenant_limit(
    State(app): State<Arc<App>>,
    tenant: PathParam,
    Json(request): Json<TenantLimitRequest>,
) -> Result<Json<TenantLimitResponse>, ApiError> {
    let tenant = parse_tenant(tenant)?;
    let limits = parse_limit(&request.requests_per_minute)?;
    let before = app.requests.tenant_limits().of(&tenant).await?;
    if !app.requests.tenant_limits().put(TenantLimit { tenant: tenant.clone(), limits }).await? {
        let message = format!("There are limits of {TENANT_LIMITS_MAX} tenants already; remove one first");
        return Err(ApiError::conflict("TOO_MANY_LIMITS", message));
    }
    let limit = EffectiveLimit { limits, is_own: true };
    TenantLimitChanged { tenant: &tenant, limit, before }.emit();
    Ok(Json(describe(&tenant, limit)))
}

/// Remove a tenant's limit.
///
/// The setting `request.tenant_limit` applies again: at once on this server, within 5 seconds on the others.
#[utoipa::path(
    delete,
    path = "/admin/tenants/{tenant}/limits",
    tag = "request",
    params(("tenant" = schema::TenantName, Path, description = "The `tenant_id` of its tokens, percent-encoded.")),
    responses(
        (status = 204, description = "Removed."),
        (status = 400, description = "The tenant in the path is too long or contains a control character. Nothing was changed."),
        (status = 404, description = "The tenant has no limit of its own."),
    ),
)]
pub(crate) async fn delete_tenant_limit(
    State(app): State<Arc<App>>,
    tenant: PathParam,
) -> Result<StatusCode, ApiError> {
    let tenant = parse_tenant(tenant)?;
    let before = app.requests.tenant_limits().of(&tenant).await?;
    if !app.requests.tenant_limits().delete(&tenant).await? {
        return Err(ApiError::not_found(format!("The tenant {tenant} has no limit of its own")));
    }
    let limit = app.requests.tenant_limits().of(&tenant).await?;
    TenantLimitChanged { tenant: &tenant, limit, before }.emit();
    Ok(StatusCode::NO_CONTENT)
}

/// Erase a tenant's data.
///
/// Erases everything that the tenant has submitted until now, whatever its state: requests with payloads and results, idempotency
/// keys, dead letters, and webhooks that were not sent. **This cannot be undone.** It happens in the background, in small steps,
/// and goes on after a crash. A request that is being called meanwhile is erased, too: what comes of the call is thrown away.
///
/// What the tenant submits from now on stays. The audit counts the requests as `erased`.
#[utoipa::path(
    delete,
    path = "/admin/tenants/{tenant}/data",
    tag = "request",
    params(("tenant" = schema::TenantName, Path, description = "The `tenant_id` of its tokens, percent-encoded.")),
    responses(
        (status = 202, description = "It has begun.", body = ErasureResponse),
        (status = 400, description = "The tenant in the path is too long or contains a control character. Nothing was changed."),
    ),
)]
pub(crate) async fn erase_tenant(
    State(app): State<Arc<App>>,
    tenant: PathParam,
) -> Result<(StatusCode, Json<ErasureResponse>), ApiError> {
    let tenant = parse_tenant(tenant)?;
    let erasing = app.requests.begin_erasure(&tenant).await?;
    ErasureBegun { tenant: &tenant, count: erasing }.emit();
    Ok((StatusCode::ACCEPTED, Json(ErasureResponse { erasing })))
}

fn parse_tenant(tenant: PathParam) -> Result<TenantId, ApiError> {
    let tenant = tenant.0.map_err(|_not_utf8| ApiError::invalid_field("tenant", "must be valid UTF-8"))?;
    TenantId::parse(tenant).map_err(|problem| ApiError::invalid_field("tenant", problem))
}

fn parse_limit(value: &serde_json::Value) -> Result<Option<QuotaLimits>, ApiError> {
    let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
    let limits = match number {
        Some(0) => Some(None),
        Some(number) => QuotaLimits::new(number, 1).ok().map(Some),
        None => None,
    };
    limits.ok_or_else(|| {
        ApiError::invalid_field("requestsPerMinute", "must be an integer from 0 (no limit) to 2147483647")
    })
}

fn describe(tenant: &TenantId, limit: EffectiveLimit) -> TenantLimitResponse {
    TenantLimitResponse {
        tenant_id: tenant.to_string(),
        requests_per_minute: limit.limits.map_or(0, |limits| limits.rate_limit()),
        source: if limit.is_own { "operator" } else { "settings" },
    }
}
