//! Policies over HTTP, for the operator: `/admin/policies`.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{Object, ObjectBuilder};
use utoipa::{PartialSchema, ToSchema};
use weir_core::PolicyName;
use weir_core::tier::Limit;
use weir_store::slot::span_text;
use weir_store::tier::{Match, OnOutage, POLICIES_MAX};

use super::check::parse_key;
use crate::app::App;
use crate::http::body::Json;
use crate::http::error::ApiError;
use crate::http::extract::{PathParam, TwoPathParams};
use crate::http::openapi::schema;
use crate::http::pagination::{Page, PageQuery, parse_limit};
use crate::tier::events::{PolicyChanged, PolicyDeleted};
use crate::tier::service::AnyPolicy;
use crate::tier::settings::policy_input::{PolicyDefinition, PolicyFields};

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct PolicyRequest {
    kind: Option<String>,
    limit: Option<serde_json::Value>,
    window: Option<String>,
    capacity: Option<serde_json::Value>,
    refill: Option<serde_json::Value>,
    period: Option<String>,
    ttl: Option<String>,
    shadow: Option<bool>,
    on_outage: Option<String>,
    #[serde(rename = "match")]
    matches: Option<MatchBody>,
}

/// The proxy's descriptors to which the policy applies over gRPC.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = PolicyMatch)]
struct MatchBody {
    #[schema(
        min_length = 1,
        max_length = 255,
        pattern = r"^[^\u0000-\u001F\u007F-\u009F]+$",
        examples("edge")
    )]
    domain: String,
    #[schema(schema_with = entries_schema)]
    entries: BTreeMap<String, String>,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PolicyResponse {
    #[schema(value_type = schema::PolicyName)]
    name: String,
    #[serde(flatten)]
    limit: PolicyLimit,
    /// Whether the policy only counts what it would deny.
    shadow: bool,
    #[schema(value_type = schema::OnOutage)]
    on_outage: &'static str,
    #[serde(rename = "match", skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    matches: Option<MatchBody>,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum PolicyLimit {
    /// At most `limit` in every window.
    FixedWindow {
        #[schema(minimum = 1, maximum = 2_147_483_647, examples(5))]
        limit: u32,
        #[schema(value_type = schema::FixedDuration)]
        window: String,
    },
    /// At most `limit` in any span as long as the window.
    SlidingWindow {
        #[schema(minimum = 1, maximum = 2_147_483_647, examples(5))]
        limit: u32,
        #[schema(value_type = schema::FixedDuration)]
        window: String,
    },
    /// At most `capacity` at once; `refill` come back in every period.
    TokenBucket {
        #[schema(minimum = 1, maximum = 2_147_483_647, examples(5))]
        capacity: u32,
        #[schema(minimum = 1, maximum = 2_147_483_647, examples(5))]
        refill: u32,
        #[schema(value_type = schema::FixedDuration)]
        period: String,
    },
    /// At most `limit` in use at once, each until it is given back or until `ttl` is over.
    Concurrency {
        #[schema(minimum = 1, maximum = 10_000, examples(5))]
        limit: u32,
        #[schema(value_type = schema::FixedDuration)]
        ttl: String,
    },
}

/// A policy has the fields of its kind and no others.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = PolicyRequest, examples(json!({"kind": "sliding_window", "limit": 5, "window": "PT1M"})))]
struct PolicyRequestSchema {
    #[serde(flatten)]
    limit: PolicyLimit,
    /// Whether the policy only counts what it would deny.
    shadow: Option<bool>,
    /// `local` if it is left out.
    #[schema(value_type = Option<schema::OnOutage>)]
    on_outage: Option<String>,
    #[serde(rename = "match")]
    matches: Option<MatchBody>,
}

fn entries_schema() -> Object {
    let RefOr::T(text) = schema::DescriptorText::schema() else { return Object::default() };
    ObjectBuilder::new()
        .property_names(Some(text.clone()))
        .additional_properties(Some(text))
        .min_properties(Some(1))
        .max_properties(Some(16))
        .description(Some("1 to 16 keys of descriptors and their values; `*` stands for any value."))
        .examples([serde_json::json!({"remote_address": "*"})])
        .build()
}

/// Create or change a policy.
///
/// A `fixed_window` or `sliding_window` has `limit` and `window`, a `token_bucket` has `capacity`, `refill` and
/// `period`, `concurrency` has `limit` (up to 10,000) and `ttl`, and no `match`; lengths are ISO 8601 of fixed length, whole milliseconds from 1 ms to 366 days. `shadow` only
/// counts what it would deny. `onOutage` says how checks are decided while Redis cannot be reached: `local` (each server
/// counts for itself), `open` or `closed`. `match` applies the policy to a proxy's descriptors over gRPC.
///
/// Applies at once on this server, within 5 seconds on the others. What was spent stays spent, also under a policy of
/// another kind.
#[utoipa::path(
    put,
    path = "/admin/policies/{name}",
    tag = "limits",
    params(("name" = schema::PolicyName, Path, description = "Which policy, percent-encoded.")),
    request_body = PolicyRequestSchema,
    responses(
        (status = 200, description = "The policy as it is now.", body = PolicyResponse),
        (status = 409, description = "`TOO_MANY_POLICIES`: the maximum number of policies exists."),
    ),
)]
pub(crate) async fn put_policy(
    State(app): State<Arc<App>>,
    name: PathParam,
    Json(request): Json<PolicyRequest>,
) -> Result<Json<PolicyResponse>, ApiError> {
    let name = parse_name(name)?;
    let definition = fields(request)?.into_definition();
    let definition = definition.map_err(|error| ApiError::invalid_field(error.field, error.problem))?;
    let before = app.tier.any_policy(name.as_str()).map(|policy| policy.definition());
    if !app.tier.put_policy(&name, &definition).await? {
        let message = format!("There are {POLICIES_MAX} policies already; delete one that is not used");
        return Err(ApiError::conflict("TOO_MANY_POLICIES", message));
    }
    PolicyChanged { policy: &name, definition: &definition, before: before.as_ref() }.emit();
    Ok(Json(describe(&name, &definition)))
}

/// Read a policy.
///
/// The policy as it is now.
#[utoipa::path(
    get,
    path = "/admin/policies/{name}",
    tag = "limits",
    params(("name" = schema::PolicyName, Path, description = "Which policy, percent-encoded.")),
    responses(
        (status = 200, description = "The policy.", body = PolicyResponse),
        (status = 400, description = "The name in the path is too long or contains a control character."),
        (status = 404, description = "There is no policy of that name. Nothing was spent."),
    ),
)]
pub(crate) async fn get_policy(
    State(app): State<Arc<App>>,
    name: PathParam,
) -> Result<Json<PolicyResponse>, ApiError> {
    let name = parse_name(name)?;
    let policy = app.tier.any_policy(name.as_str()).ok_or_else(|| unknown_policy(name.as_str()))?;
    Ok(Json(describe(&name, &policy.definition())))
}

/// List policies.
///
/// In order of name.
#[utoipa::path(
    get,
    path = "/admin/policies",
    tag = "limits",
    params(PageQuery),
    responses((status = 200, description = "A page of policies.", body = Page<PolicyResponse>)),
)]
pub(crate) async fn list_policies(
    State(app): State<Arc<App>>,
    query: Result<Query<PageQuery>, QueryRejection>,
) -> Result<Json<Page<PolicyResponse>>, ApiError> {
    let Query(query) = query.map_err(|problem| ApiError::invalid(problem.body_text()))?;
    let limit = parse_limit(query.limit.as_deref())?;
    // One more than requested shows whether there is a next page.
    let policies = app.tier.policies(query.cursor.as_deref(), limit + 1);
    let items = policies.iter().map(|policy| describe(policy.name(), &policy.definition())).collect();
    Ok(Json(Page::cut(items, limit, |policy: &PolicyResponse| policy.name.clone())))
}

/// Delete a policy.
///
/// Deletes its spending, too. Checks that name it are 404 from then on.
#[utoipa::path(
    delete,
    path = "/admin/policies/{name}",
    tag = "limits",
    params(("name" = schema::PolicyName, Path, description = "Which policy, percent-encoded.")),
    responses(
        (status = 204, description = "Deleted."),
        (status = 400, description = "The name in the path is too long or contains a control character."),
        (status = 404, description = "There is no policy of that name. Nothing was spent."),
    ),
)]
pub(crate) async fn delete_policy(
    State(app): State<Arc<App>>,
    name: PathParam,
) -> Result<StatusCode, ApiError> {
    let name = parse_name(name)?;
    let before = app.tier.any_policy(name.as_str()).map(|policy| policy.definition());
    if !app.tier.delete_policy(&name).await? {
        return Err(unknown_policy(name.as_str()));
    }
    PolicyDeleted { policy: &name, before: before.as_ref() }.emit();
    Ok(StatusCode::NO_CONTENT)
}

/// Reset a key.
///
/// Deletes the spending of a key.
#[utoipa::path(
    delete,
    path = "/admin/policies/{name}/keys/{key}",
    tag = "limits",
    params(
        (
            "name" = schema::PolicyName, Path,
            description = "Which policy, percent-encoded.",
            ), ("key" = schema::LimitKey, Path, description = "The key, percent-encoded.",
        ),
    ),
    responses(
        (status = 204, description = "Reset."),
        (status = 400, description = "The name or the key in the path is too long or contains a control character."),
        (status = 404, description = "There is no policy of that name. Nothing was spent."),
    ),
)]
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
    // Bounds how much of the caller's text is repeated.
    let name: String = name.chars().take(64).collect();
    ApiError::not_found(format!("There is no policy {name}; PUT /admin/policies/{{name}} creates one"))
}

fn parse_name(path: PathParam) -> Result<PolicyName, ApiError> {
    let text = path.0.map_err(|_not_utf8| ApiError::invalid_field("name", "must be valid UTF-8"))?;
    PolicyName::parse(text).map_err(|problem| ApiError::invalid_field("name", problem))
}

fn fields(request: PolicyRequest) -> Result<PolicyFields, ApiError> {
    // A number that is not an integer gets the same error as one that is out of range.
    let number = |value: Option<serde_json::Value>| value.map(|v| v.as_i64().map_or(0, i128::from));
    Ok(PolicyFields {
        kind: request.kind,
        limit: number(request.limit),
        window: request.window,
        capacity: number(request.capacity),
        refill: number(request.refill),
        period: request.period,
        ttl: request.ttl,
        shadow: request.shadow.unwrap_or(false),
        on_outage: request.on_outage,
        matches: request.matches.map(|matches| Match { domain: matches.domain, entries: matches.entries }),
    })
}

fn describe(name: &PolicyName, definition: &PolicyDefinition) -> PolicyResponse {
    let response = |limit, shadow, on_outage: OnOutage, matches: Option<&Match>| PolicyResponse {
        name: name.to_string(),
        limit,
        shadow,
        on_outage: on_outage.as_str(),
        matches: matches.cloned().map(|Match { domain, entries }| MatchBody { domain, entries }),
    };
    match definition {
        PolicyDefinition::Limit(spec) => {
            response(describe_limit(&spec.limit), spec.shadow, spec.on_outage, definition.matches())
        }
        PolicyDefinition::Concurrency(spec) => {
            let (limit, ttl) = (spec.rule.limit(), span_text(spec.rule.ttl()));
            response(PolicyLimit::Concurrency { limit, ttl }, spec.shadow, spec.on_outage, None)
        }
    }
}

fn describe_limit(limit: &Limit) -> PolicyLimit {
    match limit {
        Limit::FixedWindow(window) => {
            PolicyLimit::FixedWindow { limit: window.limit(), window: span_text(window.window()) }
        }
        Limit::SlidingWindow(window) => {
            PolicyLimit::SlidingWindow { limit: window.limit(), window: span_text(window.window()) }
        }
        Limit::TokenBucket(bucket) => PolicyLimit::TokenBucket {
            capacity: bucket.capacity(),
            refill: bucket.refill(),
            period: span_text(bucket.period()),
        },
    }
}

/// The error for a policy that has no amounts to hold or to give back; for other names that there is none.
pub(super) fn not_a_limit(app: &App, name: &str) -> ApiError {
    match app.tier.any_policy(name) {
        Some(AnyPolicy::Concurrency(_)) => {
            let problem = "must not be a concurrency policy: POST /v1/check gives a permit, POST /v1/release takes it back";
            ApiError::invalid_field("policy", problem)
        }
        _ => unknown_policy(name),
    }
}
