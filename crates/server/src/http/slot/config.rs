//! Configs of slot over HTTP, for the operator: `/admin/rate-limit`.

use std::sync::Arc;
use std::time::Duration;

use super::super::path_params::PathParam;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use weir_core::slot::Pace;
use weir_queue::sms::rfc3339;
use weir_store::slot::{Config, window_text};

use super::super::body::Json;
use super::super::error::ApiError;
use super::super::pagination::{Page, parse_limit};
use super::{parse_config_name, unknown_config};
use crate::app::App;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ConfigRequest {
    config_name: Box<str>,
    max_per_window: serde_json::Value,
    window_size: Box<str>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ConfigResponse {
    config_name: String,
    version: u32,
    max_per_window: u32,
    window_size: String,
    active: bool,
    created_at: jiff::Timestamp,
}

#[derive(Debug, Deserialize)]
pub(crate) struct ListQuery {
    limit: Option<String>,
    cursor: Option<String>,
}

/// `POST /admin/rate-limit/config`
pub(crate) async fn put_config(
    State(app): State<Arc<App>>,
    Json(request): Json<ConfigRequest>,
) -> Result<Json<ConfigResponse>, ApiError> {
    let name = parse_config_name(&request.config_name)?;
    // Zero is out of range, and gets the same advice as anything that is no number.
    let max = request.max_per_window.as_u64().and_then(|max| u32::try_from(max).ok()).unwrap_or(0);
    let window = parse_duration(&request.window_size).unwrap_or(Duration::ZERO);
    let pace = Pace::new(max, window).map_err(|problem| {
        let field = match problem {
            weir_core::slot::PaceError::MaxPerWindow => "maxPerWindow",
            weir_core::slot::PaceError::WindowSize => "windowSize",
        };
        ApiError::invalid_field(field, problem)
    })?;
    Ok(Json(describe(app.slot.put_config(&name, pace).await?)))
}

/// `GET /admin/rate-limit/config`
pub(crate) async fn list_configs(
    State(app): State<Arc<App>>,
    query: Result<Query<ListQuery>, QueryRejection>,
) -> Result<Json<Page<ConfigResponse>>, ApiError> {
    let Query(query) = query.map_err(|problem| ApiError::invalid(problem.body_text()))?;
    let limit = parse_limit(query.limit.as_deref())?;
    let after = query.cursor.as_deref().map(parse_config_name).transpose()?;
    let configs = app.slot.configs(after.as_ref(), limit + 1).await?;
    Ok(Json(Page::cut(configs.into_iter().map(describe).collect(), limit, |config| {
        config.config_name.clone()
    })))
}

/// `GET /admin/rate-limit/config/{name}`
pub(crate) async fn get_config(
    State(app): State<Arc<App>>,
    name: PathParam,
) -> Result<Json<ConfigResponse>, ApiError> {
    let name = parse_path(name)?;
    let config = app.slot.config(&name).await?.ok_or_else(|| unknown_config(&name))?;
    Ok(Json(describe(config)))
}

/// `DELETE /admin/rate-limit/config/{name}`
pub(crate) async fn deactivate_config(
    State(app): State<Arc<App>>,
    name: PathParam,
) -> Result<StatusCode, ApiError> {
    let name = parse_path(name)?;
    if app.slot.deactivate(&name).await? { Ok(StatusCode::NO_CONTENT) } else { Err(unknown_config(&name)) }
}

/// `POST /admin/rate-limit/cache/flush`
pub(crate) async fn flush_cache(State(app): State<Arc<App>>) -> StatusCode {
    app.slot.flush_cache();
    StatusCode::NO_CONTENT
}

fn parse_path(path: PathParam) -> Result<weir_core::ConfigName, ApiError> {
    let text = path.0.map_err(|_not_utf8| ApiError::invalid_field("configName", "must be valid UTF-8"))?;
    parse_config_name(&text)
}

/// ISO 8601 of fixed length: weeks and days are 7 times 24 hours; months and years have none.
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

fn describe(config: Config) -> ConfigResponse {
    ConfigResponse {
        config_name: config.name.to_string(),
        version: config.version,
        max_per_window: config.pace.max_per_window(),
        window_size: window_text(&config.pace),
        active: true,
        created_at: rfc3339(config.created_at),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_of_fixed_length_are_taken() {
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
