//! Policies over HTTP, for the operator: `/admin/policies`.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::path_params::{PathParam, TwoPathParams};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use weir_core::PolicyName;
use weir_core::tier::Limit;
use weir_store::slot::span_text;
use weir_store::tier::{Match, POLICIES_MAX, Policy};

use super::super::body::Json;
use super::super::error::ApiError;
use super::super::pagination::{Page, parse_limit};
use super::check::parse_key;
use crate::app::App;
use crate::config::tier::policy_input::Fields;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PolicyRequest {
    kind: Option<String>,
    limit: Option<serde_json::Value>,
    window: Option<String>,
    capacity: Option<serde_json::Value>,
    refill: Option<serde_json::Value>,
    period: Option<String>,
    shadow: Option<bool>,
    on_outage: Option<String>,
    #[serde(rename = "match")]
    matches: Option<MatchForm>,
}

#[derive(Debug, Serialize, Deserialize)]
struct MatchForm {
    domain: String,
    entries: BTreeMap<String, String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PolicyResponse {
    name: String,
    #[serde(flatten)]
    limit: LimitResponse,
    shadow: bool,
    on_outage: &'static str,
    #[serde(rename = "match", skip_serializing_if = "Option::is_none")]
    matches: Option<MatchForm>,
}

#[derive(Debug, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum LimitResponse {
    FixedWindow { limit: u32, window: String },
    SlidingWindow { limit: u32, window: String },
    TokenBucket { capacity: u32, refill: u32, period: String },
}

#[derive(Debug, Deserialize)]
pub(crate) struct ListQuery {
    limit: Option<String>,
    cursor: Option<String>,
}

/// `PUT /admin/policies/{name}`
pub(crate) async fn put_policy(
    State(app): State<Arc<App>>,
    name: PathParam,
    Json(request): Json<PolicyRequest>,
) -> Result<Json<PolicyResponse>, ApiError> {
    let name = parse_name(name)?;
    let spec =
        fields(request)?.into_spec().map_err(|wrong| ApiError::invalid_field(wrong.field, wrong.problem))?;
    let Some(policy) = app.tier.put_policy(&name, &spec).await? else {
        let message = format!("There are {POLICIES_MAX} policies already; delete one that is not used");
        return Err(ApiError::conflict("TOO_MANY_POLICIES", message));
    };
    tracing::info!(policy = %name, limit = ?spec.limit, "a policy was changed");
    Ok(Json(describe(&policy)))
}

/// `GET /admin/policies/{name}`
pub(crate) async fn get_policy(
    State(app): State<Arc<App>>,
    name: PathParam,
) -> Result<Json<PolicyResponse>, ApiError> {
    let name = parse_name(name)?;
    let policy = app.tier.policy(name.as_str()).ok_or_else(|| unknown_policy(name.as_str()))?;
    Ok(Json(describe(&policy)))
}

/// `GET /admin/policies`
pub(crate) async fn list_policies(
    State(app): State<Arc<App>>,
    query: Result<Query<ListQuery>, QueryRejection>,
) -> Result<Json<Page<PolicyResponse>>, ApiError> {
    let Query(query) = query.map_err(|problem| ApiError::invalid(problem.body_text()))?;
    let limit = parse_limit(query.limit.as_deref())?;
    // One more than asked for tells whether there is a next page.
    let policies = app.tier.policies(query.cursor.as_deref(), limit + 1);
    let items = policies.iter().map(|policy| describe(policy)).collect();
    Ok(Json(Page::cut(items, limit, |policy: &PolicyResponse| policy.name.clone())))
}

/// `DELETE /admin/policies/{name}`
pub(crate) async fn delete_policy(
    State(app): State<Arc<App>>,
    name: PathParam,
) -> Result<StatusCode, ApiError> {
    let name = parse_name(name)?;
    if !app.tier.delete_policy(&name).await? {
        return Err(unknown_policy(name.as_str()));
    }
    tracing::info!(policy = %name, "a policy was deleted");
    Ok(StatusCode::NO_CONTENT)
}

/// `DELETE /admin/policies/{name}/keys/{key}`
pub(crate) async fn reset_key(
    State(app): State<Arc<App>>,
    path: TwoPathParams,
) -> Result<StatusCode, ApiError> {
    let [name, key] = path.0.map_err(|_not_utf8| ApiError::invalid_field("key", "must be valid UTF-8"))?;
    let name = parse_name(PathParam(Ok(name)))?;
    parse_key("key", &key)?;
    if app.tier.reset_key(name.as_str(), &key).await? {
        Ok(StatusCode::NO_CONTENT)
    } else {
        Err(unknown_policy(name.as_str()))
    }
}

pub(super) fn unknown_policy(name: &str) -> ApiError {
    // A caller's text is not repeated without bounds.
    let name: String = name.chars().take(64).collect();
    ApiError::not_found(format!("There is no policy {name}; PUT /admin/policies/{{name}} makes one"))
}

fn parse_name(path: PathParam) -> Result<PolicyName, ApiError> {
    let text = path.0.map_err(|_not_utf8| ApiError::invalid_field("name", "must be valid UTF-8"))?;
    PolicyName::parse(text).map_err(|problem| ApiError::invalid_field("name", problem))
}

fn fields(request: PolicyRequest) -> Result<Fields, ApiError> {
    // What is no integer gets the same advice as one that is out of range.
    let number = |value: Option<serde_json::Value>| value.map(|v| v.as_i64().map_or(0, i128::from));
    Ok(Fields {
        kind: request.kind,
        limit: number(request.limit),
        window: request.window,
        capacity: number(request.capacity),
        refill: number(request.refill),
        period: request.period,
        shadow: request.shadow.unwrap_or(false),
        on_outage: request.on_outage,
        matches: request.matches.map(|form| Match { domain: form.domain, entries: form.entries }),
    })
}

fn describe(policy: &Policy) -> PolicyResponse {
    let limit = match &policy.spec.limit {
        Limit::FixedWindow(window) => {
            LimitResponse::FixedWindow { limit: window.limit(), window: span_text(window.window()) }
        }
        Limit::SlidingWindow(window) => {
            LimitResponse::SlidingWindow { limit: window.limit(), window: span_text(window.window()) }
        }
        Limit::TokenBucket(bucket) => LimitResponse::TokenBucket {
            capacity: bucket.capacity(),
            refill: bucket.refill(),
            period: span_text(bucket.period()),
        },
    };
    let matches = policy.spec.matches.clone();
    PolicyResponse {
        name: policy.name.to_string(),
        limit,
        shadow: policy.spec.shadow,
        on_outage: policy.spec.on_outage.as_str(),
        matches: matches.map(|matches| MatchForm { domain: matches.domain, entries: matches.entries }),
    }
}
