//! HTTP route of anomalies: `/admin/sale/anomalies`.

use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use serde::Serialize;
use utoipa::ToSchema;
use weir_core::sale::anomaly::Anomaly;

use super::time_text;
use crate::app::App;
use crate::http::body::Json;
use crate::http::error::ApiError;
use crate::http::openapi::schema;
use crate::http::pagination::{Page, PageQuery, parse_limit};

/// Attempts to buy that do not look like a crowd of people.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = Anomaly)]
pub(crate) struct AnomalyResponse {
    /// The cursor behind it.
    #[serde(skip)]
    id: u64,
    /// `network_spike`, `sequential_users`, `non_browser_agents` or `many_users_one_address`.
    #[schema(pattern = "^[a-z_]+$", examples("network_spike"))]
    pattern: &'static str,
    /// What the attempts have in common: the network, the form of the user ids (`#` is the number), the most frequent client, or
    /// the address.
    #[schema(examples("203.0.113.0/24"))]
    key: String,
    #[schema(value_type = schema::Sku)]
    sku: String,
    /// The attempts.
    #[schema(minimum = 1, examples(1500))]
    count: u64,
    #[schema(format = DateTime)]
    first_seen: String,
    #[schema(format = DateTime)]
    last_seen: String,
}

/// List anomalies.
///
/// What this server has found in the attempts to buy that it took, the latest first, up to 1,000 since its start. An anomaly
/// is listed with the attempt that shows it. One that pauses for less than a minute is one item. Nothing is refused because of
/// an anomaly.
#[utoipa::path(
    get,
    path = "/admin/sale/anomalies",
    tag = "sale",
    params(PageQuery),
    responses((status = 200, description = "One page.", body = Page<AnomalyResponse>)),
)]
pub(crate) async fn list_anomalies(
    State(app): State<Arc<App>>,
    query: Result<Query<PageQuery>, QueryRejection>,
) -> Result<Json<Page<AnomalyResponse>>, ApiError> {
    let Query(query) = query.map_err(|problem| ApiError::invalid(problem.body_text()))?;
    let limit = parse_limit(query.limit.as_deref())?;
    let before = query.cursor.map(|cursor| cursor.parse::<u64>()).transpose();
    let before = before.map_err(|_not_a_number| {
        ApiError::invalid_field("cursor", "must be the nextCursor of the page before")
    })?;
    // One more than requested shows whether there is a next page.
    let found = app.sale.anomalies().list(before, limit + 1).into_iter().map(describe).collect();
    Ok(Json(Page::cut(found, limit, |last: &AnomalyResponse| last.id.to_string())))
}

fn describe(anomaly: Anomaly) -> AnomalyResponse {
    let Anomaly { id, pattern, key, sku, count, first_seen, last_seen } = anomaly;
    AnomalyResponse {
        id,
        pattern: pattern.as_str(),
        key: key.into(),
        sku: sku.to_string(),
        count,
        first_seen: time_text(first_seen),
        last_seen: time_text(last_seen),
    }
}
