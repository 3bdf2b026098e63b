//! HTTP routes of slot configs, for the operator: `/admin/rate-limit`.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use weir_core::slot::Pace;
use weir_queue::MillisTime;
use weir_store::slot::{SlotConfig, window_text};

use super::{parse_config_name, unknown_config};
use crate::app::App;
use crate::http::body::Json;
use crate::http::error::ApiError;
use crate::http::extract::PathParam;
use crate::http::openapi::schema;
use crate::http::pagination::{Page, PageQuery, parse_limit};
use crate::slot::events::{ConfigChanged, ConfigDeactivated};

#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = PutConfigRequest, examples(json!({"configName": "default", "maxPerWindow": 100, "windowSize": "PT4S"})))]
pub(crate) struct ConfigRequest {
    #[schema(value_type = schema::ConfigName)]
    config_name: Box<str>,
    /// Events allowed in a window.
    #[schema(value_type = u32, minimum = 1, maximum = 2_147_483_647)]
    max_per_window: serde_json::Value,
    /// Length of a window.
    #[schema(value_type = schema::FixedDuration)]
    window_size: Box<str>,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = ConfigResponse)]
pub(crate) struct SlotConfigResponse {
    #[schema(value_type = schema::ConfigName)]
    config_name: String,
    /// Starts at 1 and grows by one with every change.
    #[schema(minimum = 1, examples(3))]
    version: u32,
    /// Events allowed in a window.
    #[schema(minimum = 1, maximum = 2_147_483_647, examples(100))]
    max_per_window: u32,
    /// Length of a window in ISO 8601, in hours and smaller: `P1D` reads as `PT24H`.
    #[schema(examples("PT4S"))]
    window_size: String,
    /// Whether events are assigned by this version. Of all versions of a config one is active, or none after it was deactivated.
    #[schema(examples(true))]
    active: bool,
    /// When this version was activated.
    #[schema(value_type = jiff::Timestamp)]
    created_at: MillisTime,
}

/// Configure a pace.
///
/// Creates a version of a config and activates it: how many events may run in a window, and how long a window is. Every
/// call creates a version, even one that changes nothing, and activates a deactivated config again.
///
/// Assigned slots do not move, and counters follow the new version:
///
/// - A raised maximum reopens windows that were full.
/// - A lowered maximum closes windows that have as many slots or more. No slot is removed.
/// - A new window size counts the slots already scheduled inside each of its windows.
///
/// Events assigned from then on follow the new version, on every server. `GET` of a config and the list of windows may
/// show the old one for up to 5 s on the others, unless their cache is flushed.
#[utoipa::path(
    post,
    path = "/admin/rate-limit/config",
    tag = "slot",
    request_body = ConfigRequest,
    responses(
        (
            status = 200,
            description = "The new version. It is durable: a restart keeps it.",
            body = SlotConfigResponse,
        ),
    ),
)]
pub(crate) async fn put_config(
    State(app): State<Arc<App>>,
    Json(request): Json<ConfigRequest>,
) -> Result<Json<SlotConfigResponse>, ApiError> {
    let name = parse_config_name(&request.config_name)?;
    // A value that is not a number becomes zero, which is out of range and gets the same error.
    let max = request.max_per_window.as_u64().and_then(|max| u32::try_from(max).ok()).unwrap_or(0);
    let window = parse_duration(&request.window_size).unwrap_or(Duration::ZERO);
    let pace = Pace::new(max, window).map_err(|problem| {
        let field = match problem {
            weir_core::slot::PaceError::MaxPerWindow => "maxPerWindow",
            weir_core::slot::PaceError::WindowSize => "windowSize",
        };
        ApiError::invalid_field(field, problem)
    })?;
    let before = app.slot.config(&name).await?;
    let config = app.slot.put_config(&name, pace).await?;
    ConfigChanged { config: &config, before: before.as_ref() }.emit();
    Ok(Json(describe(config)))
}

/// List paces.
///
/// Lists the active configs, in order of name.
///
/// The list is read page by page: pass `nextCursor` as `cursor` until it is null.
#[utoipa::path(
    get,
    path = "/admin/rate-limit/config",
    tag = "slot",
    params(PageQuery),
    responses((status = 200, description = "One page.", body = Page<SlotConfigResponse>)),
)]
pub(crate) async fn list_configs(
    State(app): State<Arc<App>>,
    query: Result<Query<PageQuery>, QueryRejection>,
) -> Result<Json<Page<SlotConfigResponse>>, ApiError> {
    let Query(query) = query.map_err(|problem| ApiError::invalid(problem.body_text()))?;
    let limit = parse_limit(query.limit.as_deref())?;
    let after = query.cursor.as_deref().map(parse_config_name).transpose()?;
    let configs = app.slot.configs(after.as_ref(), limit + 1).await?;
    Ok(Json(Page::cut(configs.into_iter().map(describe).collect(), limit, |config| {
        config.config_name.clone()
    })))
}

/// Read a pace.
///
/// Returns the active version. This server caches configs for 5 s, so a change made through another server may be visible
/// that much later, or at once after flushing the cache.
#[utoipa::path(
    get,
    path = "/admin/rate-limit/config/{name}",
    tag = "slot",
    params(
        (
            "name" = schema::ConfigName, Path,
            description = "The config. Percent-encode the name: it may contain `/`, spaces and any other character that \
                is not a control character.",
        ),
    ),
    responses(
        (status = 200, description = "The active version.", body = SlotConfigResponse),
        (
            status = 400,
            description = "The name in the path is too long or contains a control character. Nothing was changed.",
        ),
        (
            status = 404,
            description = "No active config has that name: it was never created, or it was deactivated. Create it \
                (`POST /admin/rate-limit/config`), or check the spelling of the name.",
        ),
    ),
)]
pub(crate) async fn get_config(
    State(app): State<Arc<App>>,
    name: PathParam,
) -> Result<Json<SlotConfigResponse>, ApiError> {
    let name = parse_path(name)?;
    let config = app.slot.config(&name).await?.ok_or_else(|| unknown_config(&name))?;
    Ok(Json(describe(config)))
}

/// List the versions of a pace.
///
/// Lists every version that a config has had, newest first, also after it was deactivated.
///
/// The list is read page by page: pass `nextCursor` as `cursor` until it is null.
#[utoipa::path(
    get,
    path = "/admin/rate-limit/config/{name}/versions",
    tag = "slot",
    params(
        (
            "name" = schema::ConfigName, Path,
            description = "The config. Percent-encode the name: it may contain `/`, spaces and any other character that \
                is not a control character.",
        ),
        PageQuery,
    ),
    responses(
        (status = 200, description = "One page.", body = Page<SlotConfigResponse>),
        (
            status = 400,
            description = "The name in the path is too long or contains a control character, or a parameter of the query is \
                invalid.",
        ),
        (
            status = 404,
            description = "No config ever had that name. Create it (`POST /admin/rate-limit/config`), or check the spelling \
                of the name.",
        ),
    ),
)]
pub(crate) async fn list_versions(
    State(app): State<Arc<App>>,
    name: PathParam,
    query: Result<Query<PageQuery>, QueryRejection>,
) -> Result<Json<Page<SlotConfigResponse>>, ApiError> {
    let name = parse_path(name)?;
    let Query(query) = query.map_err(|problem| ApiError::invalid(problem.body_text()))?;
    let limit = parse_limit(query.limit.as_deref())?;
    let before = query.cursor.as_deref().map(parse_version).transpose()?;
    let versions = app.slot.config_versions(&name, before, limit + 1).await?;
    if versions.is_empty() && before.is_none() {
        return Err(ApiError::not_found(format!(
            "No config ever had the name {name}; create it with POST /admin/rate-limit/config"
        )));
    }
    let items = versions
        .into_iter()
        .map(|version| SlotConfigResponse { active: version.is_active, ..describe(version.config) });
    Ok(Json(Page::cut(items.collect(), limit, |config| config.version.to_string())))
}

fn parse_version(text: &str) -> Result<u32, ApiError> {
    let invalid = || ApiError::invalid_field("cursor", "must be the nextCursor of the page before");
    text.parse().ok().ok_or_else(invalid)
}

/// Deactivate a pace.
///
/// Deactivates a config. New events that name it get 404; assigned slots stay, and can be read and
/// given back. Configuring it again activates it as the next version, with its counters as they are.
#[utoipa::path(
    delete,
    path = "/admin/rate-limit/config/{name}",
    tag = "slot",
    params(
        (
            "name" = schema::ConfigName, Path,
            description = "The config. Percent-encode the name: it may contain `/`, spaces and any other character that \
                is not a control character.",
        ),
    ),
    responses(
        (status = 204, description = "Deactivated."),
        (
            status = 400,
            description = "The name in the path is too long or contains a control character. Nothing was changed.",
        ),
        (
            status = 404,
            description = "No active config has that name: it was never created, or it was deactivated. Create it \
                (`POST /admin/rate-limit/config`), or check the spelling of the name.",
        ),
    ),
)]
pub(crate) async fn deactivate_config(
    State(app): State<Arc<App>>,
    name: PathParam,
) -> Result<StatusCode, ApiError> {
    let name = parse_path(name)?;
    let before = app.slot.config(&name).await?;
    if !app.slot.deactivate(&name).await? {
        return Err(unknown_config(&name));
    }
    ConfigDeactivated { name: &name, before: before.as_ref() }.emit();
    Ok(StatusCode::NO_CONTENT)
}

/// Flush the cache of paces.
///
/// Empties the cache of configs on this server, and on no other. Assigning needs no flush: it always follows the
/// version that is active in the store. Reading a config and listing windows may need it, within 5 s of a change made through
/// another server.
#[utoipa::path(
    post,
    path = "/admin/rate-limit/cache/flush",
    tag = "slot",
    responses((status = 204, description = "Flushed.")),
)]
pub(crate) async fn flush_cache(State(app): State<Arc<App>>) -> StatusCode {
    app.slot.flush_cache();
    StatusCode::NO_CONTENT
}

fn parse_path(path: PathParam) -> Result<weir_core::ConfigName, ApiError> {
    let text = path.0.map_err(|_not_utf8| ApiError::invalid_field("configName", "must be valid UTF-8"))?;
    parse_config_name(&text)
}

/// Parses an ISO 8601 duration of fixed length: a day is 24 hours, a week 7 days. Months and years are refused.
fn parse_duration(text: &str) -> Option<Duration> {
    if !text.starts_with(['P', 'p']) {
        return None;
    }
    let span: jiff::Span = text.parse().ok()?;
    if span.get_years() != 0 || span.get_months() != 0 {
        return None;
    }
    let fixed = span.to_duration(jiff::SpanRelativeTo::days_are_24_hours()).ok()?;
    Duration::try_from(fixed).ok()
}

fn describe(config: SlotConfig) -> SlotConfigResponse {
    SlotConfigResponse {
        config_name: config.name.to_string(),
        version: config.version,
        max_per_window: config.pace.max_per_window(),
        window_size: window_text(&config.pace),
        active: true,
        created_at: MillisTime::from(config.created_at),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_of_fixed_length_are_accepted() {
        let seconds = |text| parse_duration(text).map(|duration| duration.as_secs_f64());
        assert_eq!(seconds("PT4S"), Some(4.0));
        assert_eq!(seconds("PT0.25S"), Some(0.25));
        assert_eq!(seconds("PT1H30M"), Some(5_400.0));
        assert_eq!(seconds("P1D"), Some(86_400.0));
        assert_eq!(seconds("P1W"), Some(604_800.0));
        for bad in ["", "4", "4s", "P1M", "P1Y", "PT", "-PT4S", "4 seconds"] {
            assert_eq!(parse_duration(bad).filter(|duration| !duration.is_zero()), None, "{bad}");
        }
    }
}
