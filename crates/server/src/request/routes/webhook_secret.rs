//! The secret with which a tenant verifies its webhooks: `GET /v1/webhook-secret`.

use std::sync::Arc;

use axum::extract::State;
use http::HeaderName;
use http::header::CACHE_CONTROL;
use serde::Serialize;
use utoipa::ToSchema;

use crate::app::App;
use crate::http::body::Json;
use crate::http::extract::Tenant;

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct WebhookSecretResponse {
    /// `whsec_` and base64, as Standard Webhooks libraries take it.
    #[schema(
        pattern = "^whsec_[A-Za-z0-9+/]+=*$",
        examples("whsec_mZ58jvgeuO7U3aIqKL/IKQ5TZjl5dxJW5CXWerkrNvg=")
    )]
    secret: String,
}

/// Read the secret of the tenant's webhooks.
///
/// The webhooks to a `callbackUrl` of this tenant, and of no other, are signed with this secret as Standard Webhooks
/// (standardwebhooks.com) defines it. Keep it where you verify them.
///
/// It changes when the operator replaces `WEIR_WEBHOOK_SECRET`. While the server has both the old and the new one, every
/// webhook has two signatures: one by the tenant's old secret and one by the new one.
///
/// Needs the scope `requests:read` and a token with `tenant_id`.
#[utoipa::path(
    get,
    path = "/v1/webhook-secret",
    tag = "request",
    responses((status = 200, description = "The secret.", body = WebhookSecretResponse)),
)]
pub(crate) async fn get_webhook_secret(
    Tenant(tenant): Tenant,
    State(app): State<Arc<App>>,
) -> ([(HeaderName, &'static str); 1], Json<WebhookSecretResponse>) {
    let secret = app.auth.webhook.tenant_secret(&tenant);
    ([(CACHE_CONTROL, "no-store")], Json(WebhookSecretResponse { secret }))
}
