//! Slot over HTTP: `/api/v1/slots`. Bulk loads stand in `slot/bulk.rs`, configs in `slot/config.rs`.

pub(crate) mod bulk;
pub(crate) mod config;

use std::sync::Arc;

use super::path_params::PathParam;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use weir_core::slot::WindowStatus;
use weir_core::{ConfigName, EventId, Timestamp};
use weir_queue::sms::rfc3339;
use weir_store::slot::{Assign, AssignOutcome, Slot};

use super::body::Json;
use super::error::ApiError;
use super::pagination::{Page, parse_limit};
use crate::app::App;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct AssignRequest {
    event_id: Box<str>,
    config_name: Box<str>,
    requested_time: Box<str>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SlotResponse {
    event_id: EventIdText,
    config_name: ConfigNameText,
    requested_time: jiff::Timestamp,
    window_start: jiff::Timestamp,
    scheduled_time: jiff::Timestamp,
    status: &'static str,
}

/// Names as they are written.
#[derive(Debug)]
struct EventIdText(EventId);

#[derive(Debug)]
struct ConfigNameText(ConfigName);

impl Serialize for EventIdText {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0.as_str())
    }
}

impl Serialize for ConfigNameText {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0.as_str())
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct WindowsQuery {
    config_name: Option<String>,
    from: Option<String>,
    to: Option<String>,
    limit: Option<String>,
    cursor: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct WindowResponse {
    window_start: jiff::Timestamp,
    slot_count: u32,
    max_per_window: u32,
    status: &'static str,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ForecastRequest {
    config_name: Box<str>,
    requested_time: Box<str>,
    events: serde_json::Value,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ForecastResponse {
    config_name: ConfigNameText,
    requested_time: jiff::Timestamp,
    events: u64,
    windows: u64,
    first_window: jiff::Timestamp,
    last_window: jiff::Timestamp,
    finishes_by: jiff::Timestamp,
}

/// The largest load that can be asked about.
const FORECAST_MAX: u64 = 1_000_000_000;

/// `POST /api/v1/slots`
pub(crate) async fn assign_slot(
    State(app): State<Arc<App>>,
    Json(request): Json<AssignRequest>,
) -> Result<Response, ApiError> {
    let assign = parse(request)?;
    let config = assign.config.clone();
    match app.slot.assign(assign).await? {
        AssignOutcome::New(slot) => Ok((StatusCode::CREATED, Json(describe(slot, "NEW"))).into_response()),
        AssignOutcome::Existing(slot) => Ok(Json(describe(slot, "EXISTING")).into_response()),
        AssignOutcome::UnknownConfig => Err(unknown_config(&config)),
        AssignOutcome::Exhausted => Err(exhausted()),
    }
}

/// `POST /api/v1/slots/forecast`
pub(crate) async fn forecast_slots(
    State(app): State<Arc<App>>,
    Json(request): Json<ForecastRequest>,
) -> Result<Json<ForecastResponse>, ApiError> {
    let name = parse_config_name(&request.config_name)?;
    let requested = parse_time("requestedTime", &request.requested_time)?;
    let events = request.events.as_u64().filter(|events| (1..=FORECAST_MAX).contains(events));
    let events = events.ok_or_else(|| {
        ApiError::invalid_field("events", format!("must be an integer from 1 to {FORECAST_MAX}"))
    })?;
    let (config, forecast) =
        app.slot.forecast(&name, requested, events).await?.ok_or_else(|| unknown_config(&name))?;
    Ok(Json(ForecastResponse {
        config_name: ConfigNameText(name),
        requested_time: rfc3339(requested),
        events,
        windows: forecast.windows,
        first_window: rfc3339(forecast.first_window),
        last_window: rfc3339(forecast.last_window),
        finishes_by: rfc3339(config.pace.later(forecast.last_window, 1)),
    }))
}

/// `GET /api/v1/slots/{eventId}`
pub(crate) async fn get_slot(
    State(app): State<Arc<App>>,
    event: PathParam,
) -> Result<Json<SlotResponse>, ApiError> {
    let event = parse_event(event)?;
    let slot = app.slot.find(&event).await?.ok_or_else(|| unknown_event(&event))?;
    Ok(Json(describe(slot, "EXISTING")))
}

/// `DELETE /api/v1/slots/{eventId}`
pub(crate) async fn give_slot_back(
    State(app): State<Arc<App>>,
    event: PathParam,
) -> Result<StatusCode, ApiError> {
    let event = parse_event(event)?;
    app.slot.give_back(&event).await?.ok_or_else(|| unknown_event(&event))?;
    Ok(StatusCode::NO_CONTENT)
}

/// `GET /api/v1/slots/windows`
pub(crate) async fn list_windows(
    State(app): State<Arc<App>>,
    query: Result<Query<WindowsQuery>, QueryRejection>,
) -> Result<Json<Page<WindowResponse>>, ApiError> {
    let Query(query) = query.map_err(|problem| ApiError::invalid(problem.body_text()))?;
    let name = query.config_name.ok_or_else(|| ApiError::invalid_field("configName", "is required"))?;
    let name = parse_config_name(&name)?;
    let limit = parse_limit(query.limit.as_deref())?;
    let from = query.from.map_or(Ok(EARLIEST), |text| parse_time("from", &text))?;
    let to = query.to.map_or(Ok(LATEST), |text| parse_time("to", &text))?;
    let after = query.cursor.map(|text| parse_time("cursor", &text)).transpose()?;
    let from = after.map_or(from, |after| from.max(Timestamp::from_micros(after.as_micros() + 1)));
    let config = app.slot.config(&name).await?.ok_or_else(|| unknown_config(&name))?;
    // One more than asked for tells whether there is a next page.
    let windows = app.slot.windows(&name, from, to, limit + 1).await?;
    let max_per_window = config.pace.max_per_window();
    let items = windows.into_iter().map(|window| WindowResponse {
        window_start: rfc3339(window.start),
        slot_count: window.count,
        max_per_window,
        status: match window.status {
            WindowStatus::Open => "OPEN",
            WindowStatus::Closed => "CLOSED",
        },
    });
    Ok(Json(Page::cut(items.collect(), limit, |window| window.window_start.to_string())))
}

const EARLIEST: Timestamp = Timestamp::from_seconds(-62_135_596_800);
/// The end of the year 9998: a slot may be a while later than its event asked for.
const LATEST: Timestamp = Timestamp::from_seconds(253_370_764_800);

pub(super) fn parse(request: AssignRequest) -> Result<Assign, ApiError> {
    let AssignRequest { event_id, config_name, requested_time } = request;
    Ok(Assign {
        event: EventId::parse(event_id).map_err(|problem| ApiError::invalid_field("eventId", problem))?,
        config: parse_config_name(&config_name)?,
        requested: parse_time("requestedTime", &requested_time)?,
    })
}

fn parse_time(field: &str, text: &str) -> Result<Timestamp, ApiError> {
    let time = text.parse::<jiff::Timestamp>().ok();
    let time = time.map(|time| Timestamp::from_micros(time.as_microsecond()));
    time.filter(|time| (EARLIEST..LATEST).contains(time)).ok_or_else(|| {
        let allowed = "must be an RFC 3339 time in the years 1 to 9998, such as 2026-01-01T12:00:00Z";
        ApiError::invalid_field(field, allowed)
    })
}

pub(super) fn parse_config_name(text: &str) -> Result<ConfigName, ApiError> {
    ConfigName::parse(text).map_err(|problem| ApiError::invalid_field("configName", problem))
}

fn parse_event(path: PathParam) -> Result<EventId, ApiError> {
    let text = path.0.map_err(|_not_utf8| ApiError::invalid_field("eventId", "must be valid UTF-8"))?;
    EventId::parse(text).map_err(|problem| ApiError::invalid_field("eventId", problem))
}

pub(super) fn describe(slot: Slot, status: &'static str) -> SlotResponse {
    SlotResponse {
        event_id: EventIdText(slot.event),
        config_name: ConfigNameText(slot.config),
        requested_time: rfc3339(slot.requested),
        window_start: rfc3339(slot.window_start),
        scheduled_time: rfc3339(slot.scheduled),
        status,
    }
}

pub(super) fn unknown_config(name: &ConfigName) -> ApiError {
    let advice = "create it with POST /admin/rate-limit/config";
    ApiError::not_found(format!("No active config has the name {name}; {advice}"))
}

pub(super) fn exhausted() -> ApiError {
    let message = "Every window that was searched is full or held by others; nothing was assigned, try again";
    ApiError::unavailable(message).with_code("SLOTS_EXHAUSTED")
}

fn unknown_event(event: &EventId) -> ApiError {
    ApiError::not_found(format!("The event {event} has no slot; POST /api/v1/slots gives it one"))
}
