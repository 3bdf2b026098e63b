//! HTTP routes of slot: `/api/v1/slots`. Bulk loads are in `routes/bulk.rs`, configs in `routes/config.rs`.

pub(crate) mod bulk;
pub(crate) mod config;

use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use weir_core::id::{NAME_MAX_CHARS, NameError};
use weir_core::slot::WindowStatus;
use weir_core::{ConfigName, EventId, Timestamp};
use weir_queue::MillisTime;
use weir_store::slot::{Assign, AssignOutcome, MoveOutcome, Slot, SlotPosition};

use crate::app::App;
use crate::http::body::Json;
use crate::http::error::ApiError;
use crate::http::extract::PathParam;
use crate::http::openapi::schema;
use crate::http::pagination::{Page, parse_limit};
use crate::http::time::{EARLIEST, LATEST, parse_time};

#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(
    as = AssignSlotRequest,
    examples(json!({"eventId": "payment-000001", "configName": "default", "requestedTime": "2026-06-01T12:00:00Z"}))
)]
pub(crate) struct AssignRequest {
    #[serde(deserialize_with = "short_name")]
    #[schema(value_type = schema::EventId)]
    event_id: Box<str>,
    #[serde(deserialize_with = "short_name")]
    #[schema(value_type = schema::ConfigName)]
    config_name: Box<str>,
    /// The earliest time at which the event may run.
    #[schema(value_type = schema::Time)]
    requested_time: Box<str>,
}

/// Deserializes a name and refuses one that is too long before copying it: uploads have thousands of lines.
fn short_name<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Box<str>, D::Error> {
    struct ShortName;

    impl serde::de::Visitor<'_> for ShortName {
        type Value = Box<str>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("a string")
        }

        fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Box<str>, E> {
            if is_short(text) { Ok(text.into()) } else { Err(E::custom(NameError::TooLong)) }
        }
    }

    deserializer.deserialize_str(ShortName)
}

/// Whether a text is no longer than a name may be.
fn is_short(text: &str) -> bool {
    text.len() <= NAME_MAX_CHARS || text.chars().nth(NAME_MAX_CHARS).is_none()
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = MoveSlotRequest, examples(json!({"requestedTime": "2026-06-01T13:00:00Z"})))]
pub(crate) struct MoveRequest {
    /// The earliest time at which the event may run now.
    #[schema(value_type = schema::Time)]
    requested_time: Box<str>,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(title = "A slot")]
pub(crate) struct SlotResponse {
    #[schema(value_type = schema::EventId)]
    event_id: EventIdText,
    #[schema(value_type = schema::ConfigName)]
    config_name: ConfigNameText,
    /// The requested time of the call that assigned the slot.
    #[schema(value_type = jiff::Timestamp)]
    requested_time: MillisTime,
    /// The start of the slot's window, by the config that was active when the slot was assigned.
    #[schema(value_type = jiff::Timestamp)]
    window_start: MillisTime,
    /// When the event is to run: a whole millisecond inside the window, not before `requestedTime`.
    #[schema(value_type = jiff::Timestamp)]
    scheduled_time: MillisTime,
    #[schema(value_type = schema::SlotStatus)]
    status: &'static str,
}

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

#[derive(Debug, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase")]
#[into_params(parameter_in = Query)]
pub(crate) struct WindowsQuery {
    /// The config whose windows are listed. It must be active.
    #[param(value_type = schema::ConfigName, required = true)]
    config_name: Option<String>,
    /// Only windows that begin at this time or later. A window that began before is left out, even if it has not
    /// ended yet.
    #[param(value_type = schema::Time, required = false)]
    from: Option<String>,
    /// Only windows that begin before this time.
    #[param(value_type = schema::Time, required = false)]
    to: Option<String>,
    /// The most items in the response.
    #[param(value_type = u32, required = false, minimum = 1, maximum = 1000, default = 100)]
    limit: Option<String>,
    /// The `nextCursor` of the page before. Leave it out for the first page.
    #[param(value_type = schema::Time, required = false)]
    cursor: Option<String>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase")]
#[into_params(parameter_in = Query)]
pub(crate) struct SlotsQuery {
    /// The config of the window. It must be active.
    #[param(value_type = schema::ConfigName, required = true)]
    config_name: Option<String>,
    /// The start of the window, as the list of windows shows it.
    #[param(value_type = schema::Time, required = true)]
    window_start: Option<String>,
    /// The most items in the response.
    #[param(value_type = u32, required = false, minimum = 1, maximum = 1000, default = 100)]
    limit: Option<String>,
    /// The `nextCursor` of the page before, percent-encoded. Leave it out for the first page.
    #[param(value_type = String, required = false)]
    cursor: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = SlotWindow)]
pub(crate) struct WindowResponse {
    #[schema(value_type = jiff::Timestamp)]
    window_start: MillisTime,
    /// Slots scheduled inside it.
    #[schema(minimum = 1, maximum = 2_147_483_647, examples(17))]
    slot_count: u32,
    /// The maximum of the config's active version.
    #[schema(minimum = 1, maximum = 2_147_483_647, examples(100))]
    max_per_window: u32,
    #[schema(value_type = schema::WindowStatus)]
    status: &'static str,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(
    as = ForecastSlotsRequest,
    examples(json!({"configName": "default", "requestedTime": "2026-06-01T12:00:00Z", "events": 500_000}))
)]
pub(crate) struct ForecastRequest {
    #[schema(value_type = schema::ConfigName)]
    config_name: Box<str>,
    /// The requested time of all of them.
    #[schema(value_type = schema::Time)]
    requested_time: Box<str>,
    /// The number of events.
    #[schema(value_type = u32, minimum = 1, maximum = 1_000_000_000)]
    events: serde_json::Value,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = ForecastSlotsResponse)]
pub(crate) struct ForecastResponse {
    #[schema(value_type = schema::ConfigName)]
    config_name: ConfigNameText,
    /// From the request.
    #[schema(value_type = jiff::Timestamp)]
    requested_time: MillisTime,
    /// From the request.
    #[schema(minimum = 1, maximum = 1_000_000_000, examples(500_000))]
    events: u64,
    /// How many windows the load would use.
    #[schema(minimum = 1, examples(5000))]
    windows: u64,
    /// The start of the first event's window.
    #[schema(value_type = jiff::Timestamp)]
    first_window: MillisTime,
    /// The start of the last event's window.
    #[schema(value_type = jiff::Timestamp)]
    last_window: MillisTime,
    /// The end of the last window: every event is scheduled before it.
    #[schema(value_type = jiff::Timestamp)]
    finishes_by: MillisTime,
}

/// The largest load of a forecast.
const FORECAST_MAX: u64 = 1_000_000_000;

/// Assign a slot.
///
/// Assigns a time to an event. The event goes into the window of `requestedTime` if that has room, otherwise into the
/// first later window with room, at a random millisecond inside it. `scheduledTime` is never before `requestedTime`.
///
/// A window that has begun before `requestedTime` offers only a share of its maximum, in proportion to the time that is left of
/// it. The server's clock is not used: a time in the past is valid.
///
/// **Event ids are global and idempotent.** An event that has a slot keeps it, whatever time or config a later call
/// names, so sending the same call again is always safe.
///
/// The slot and its window's counter are written in one commit before the response: a 201 survives a crash.
#[utoipa::path(
    post,
    path = "/api/v1/slots",
    tag = "slot",
    request_body = AssignRequest,
    responses(
        (
            status = 201,
            description = "The event has a slot now. It is durable: a restart keeps it.",
            body = SlotResponse,
        ),
        (
            status = 200,
            description = "The event has a slot already. The response is that slot, with the time and config of the call that \
                assigned it. Nothing was changed.",
            body = SlotResponse,
        ),
        (
            status = 404,
            description = "No active config has that name: it was never created, or it was deactivated. Create it \
                (`POST /admin/rate-limit/config`), or check the spelling of the name.",
        ),
        (
            status = 503,
            description = "No slot could be assigned. Wait `Retry-After` seconds and send the same event again: if the \
                first call did succeed, the response is the slot that it assigned. `SLOTS_EXHAUSTED` means \
                that every window up to the end of time is full; `DEPENDENCY_UNAVAILABLE` that the store did \
                not answer in time, other calls locked all windows of the headroom for too long, too many calls are waiting, or \
                the server is shutting down. `/health` says which engine is down.",
        ),
    ),
)]
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
        AssignOutcome::Recounting(_) => Err(recounting()),
    }
}

/// Forecast a load.
///
/// Returns which windows a load of `events` events for one time would use if it were assigned now. Nothing is
/// assigned or reserved: slots that other calls take in the meantime move the end.
#[utoipa::path(
    post,
    path = "/api/v1/slots/forecast",
    tag = "slot",
    request_body = ForecastRequest,
    responses(
        (status = 200, description = "The windows that the load would use.", body = ForecastResponse),
        (
            status = 404,
            description = "No active config has that name: it was never created, or it was deactivated. Create it \
                (`POST /admin/rate-limit/config`), or check the spelling of the name.",
        ),
    ),
)]
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
        requested_time: MillisTime::from(requested),
        events,
        windows: forecast.windows,
        first_window: MillisTime::from(forecast.first_window),
        last_window: MillisTime::from(forecast.last_window),
        finishes_by: MillisTime::from(config.pace.window_after(forecast.last_window, 1)),
    }))
}

/// Read an event's slot.
///
/// Returns the slot as it was assigned, whether or not its config is still active. `status` is always `EXISTING` here.
///
/// `windowStart` follows the config that was active then: a later change of the window size does not move slots.
#[utoipa::path(
    get,
    path = "/api/v1/slots/{eventId}",
    tag = "slot",
    params(
        (
            "eventId" = schema::EventId, Path,
            description = "The event. Percent-encode the id: it may contain `/`, spaces and any other character that \
                is not a control character. The ids `bulk`, `forecast` and `windows` are paths of their own; \
                write one of their letters encoded, such as `%62ulk`.",
        ),
    ),
    responses(
        (status = 200, description = "The slot.", body = SlotResponse),
        (
            status = 400,
            description = "The eventId in the path is too long or contains a control character. Nothing was changed.",
        ),
        (
            status = 404,
            description = "The event has no slot: it was never assigned one, or its slot was given back. Assign one (`POST \
                /api/v1/slots`), or check the spelling of the eventId.",
        ),
    ),
)]
pub(crate) async fn get_slot(
    State(app): State<Arc<App>>,
    event: PathParam,
) -> Result<Json<SlotResponse>, ApiError> {
    let event = parse_event_id(event)?;
    let slot = app.slot.find(&event).await?.ok_or_else(|| unknown_event(&event))?;
    Ok(Json(describe(slot, "EXISTING")))
}

/// Move an event to another time.
///
/// Gives the event another slot of its config, as an assignment for `requestedTime` would, and frees the one it has. Both are
/// one commit: the event always has exactly one slot. The place that it frees may be the one that it gets. If no window has
/// room, the event keeps its slot.
#[utoipa::path(
    put,
    path = "/api/v1/slots/{eventId}",
    tag = "slot",
    request_body = MoveRequest,
    params(
        (
            "eventId" = schema::EventId, Path,
            description = "The event. Percent-encode the id: it may contain `/`, spaces and any other character that \
                is not a control character. The ids `bulk`, `forecast` and `windows` are paths of their own; \
                write one of their letters encoded, such as `%62ulk`.",
        ),
    ),
    responses(
        (
            status = 200,
            description = "The new slot, with `status` `NEW`. It is durable: a restart keeps it.",
            body = SlotResponse,
        ),
        (
            status = 404,
            description = "The event has no slot, or its config was deactivated. Assign a slot (`POST /api/v1/slots`), or activate \
                the config (`POST /admin/rate-limit/config`). Nothing was changed.",
        ),
        (
            status = 503,
            description = "The event was not moved, or it is unknown whether it was: the message says which. Wait `Retry-After` \
                seconds and send the call again. `SLOTS_EXHAUSTED` means that every window up to the end of time is full; \
                `DEPENDENCY_UNAVAILABLE` that the store did not answer in time, other calls locked all windows of the \
                headroom for too long, or the server is shutting down.",
        ),
    ),
)]
pub(crate) async fn move_slot(
    State(app): State<Arc<App>>,
    event: PathParam,
    Json(request): Json<MoveRequest>,
) -> Result<Json<SlotResponse>, ApiError> {
    let event = parse_event_id(event)?;
    let requested = parse_time("requestedTime", &request.requested_time)?;
    match app.slot.move_slot(&event, requested).await? {
        MoveOutcome::Moved(slot) => Ok(Json(describe(slot, "NEW"))),
        MoveOutcome::UnknownEvent => Err(unknown_event(&event)),
        MoveOutcome::UnknownConfig(name) => Err(unknown_config(&name)),
        MoveOutcome::Exhausted => Err(exhausted()),
    }
}

/// Give a slot back.
///
/// Releases the event's slot for another event. Assigned again, the event counts as new and may get another
/// time.
#[utoipa::path(
    delete,
    path = "/api/v1/slots/{eventId}",
    tag = "slot",
    params(
        (
            "eventId" = schema::EventId, Path,
            description = "The event. Percent-encode the id: it may contain `/`, spaces and any other character that \
                is not a control character. The ids `bulk`, `forecast` and `windows` are paths of their own; \
                write one of their letters encoded, such as `%62ulk`.",
        ),
    ),
    responses(
        (status = 204, description = "Given back."),
        (
            status = 400,
            description = "The eventId in the path is too long or contains a control character. Nothing was changed.",
        ),
        (
            status = 404,
            description = "The event has no slot: it was never assigned one, or its slot was given back. Assign one (`POST \
                /api/v1/slots`), or check the spelling of the eventId.",
        ),
    ),
)]
pub(crate) async fn give_slot_back(
    State(app): State<Arc<App>>,
    event: PathParam,
) -> Result<StatusCode, ApiError> {
    let event = parse_event_id(event)?;
    app.slot.release(&event).await?.ok_or_else(|| unknown_event(&event))?;
    Ok(StatusCode::NO_CONTENT)
}

/// List windows.
///
/// Lists how many slots each window of a config has, in order of time. Windows without slots are left out.
///
/// After a change of the window size these are windows of the new size, with all slots scheduled inside them, whichever version
/// assigned them. After the maximum is lowered, a window may have more slots than `maxPerWindow`; it accepts no more.
///
/// The list is read page by page: pass `nextCursor` as `cursor` until it is null.
#[utoipa::path(
    get,
    path = "/api/v1/slots/windows",
    tag = "slot",
    params(WindowsQuery),
    responses(
        (status = 200, description = "One page.", body = Page<WindowResponse>),
        (
            status = 404,
            description = "No active config has that name: it was never created, or it was deactivated. Create it \
                (`POST /admin/rate-limit/config`), or check the spelling of the name.",
        ),
    ),
)]
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
    // One item more than the page shows whether there is a next page.
    let windows = app.slot.windows(&name, from, to, limit + 1).await?;
    let max_per_window = config.pace.max_per_window();
    let items = windows.into_iter().map(|window| WindowResponse {
        window_start: MillisTime::from(window.start),
        slot_count: window.count,
        max_per_window,
        status: match window.status {
            WindowStatus::Open => "OPEN",
            WindowStatus::Closed => "CLOSED",
        },
    });
    Ok(Json(Page::cut(items.collect(), limit, |window| window.window_start.to_string())))
}

/// List the slots of a window.
///
/// Lists the events that are scheduled inside a window of a config, in order of time, whichever version of the config put them
/// there. `status` is always `EXISTING` here.
///
/// The list is read page by page: pass `nextCursor` as `cursor` until it is null.
#[utoipa::path(
    get,
    path = "/api/v1/slots",
    tag = "slot",
    params(SlotsQuery),
    responses(
        (status = 200, description = "One page.", body = Page<SlotResponse>),
        (
            status = 404,
            description = "No active config has that name: it was never created, or it was deactivated. Create it \
                (`POST /admin/rate-limit/config`), or check the spelling of the name.",
        ),
    ),
)]
pub(crate) async fn list_slots(
    State(app): State<Arc<App>>,
    query: Result<Query<SlotsQuery>, QueryRejection>,
) -> Result<Json<Page<SlotResponse>>, ApiError> {
    let Query(query) = query.map_err(|problem| ApiError::invalid(problem.body_text()))?;
    let name = query.config_name.ok_or_else(|| ApiError::invalid_field("configName", "is required"))?;
    let name = parse_config_name(&name)?;
    let start = query.window_start.ok_or_else(|| ApiError::invalid_field("windowStart", "is required"))?;
    let start = parse_time("windowStart", &start)?;
    let limit = parse_limit(query.limit.as_deref())?;
    let cursor = query.cursor.as_deref().map(parse_slot_position).transpose()?;
    let config = app.slot.config(&name).await?.ok_or_else(|| unknown_config(&name))?;
    let window = config.pace.window_of(start);
    if window != start {
        let begun = MillisTime::from(window);
        let problem = format!("must be the start of a window; the window of this time starts at {begun}");
        return Err(ApiError::invalid_field("windowStart", problem));
    }
    let first = SlotPosition { scheduled: start, event: None };
    let after = cursor.filter(|after| after.scheduled >= start).unwrap_or(first);
    let slots = app.slot.slots(&name, after, config.pace.window_after(start, 1), limit + 1).await?;
    let items = slots.into_iter().map(|slot| describe(slot, "EXISTING")).collect();
    Ok(Json(Page::cut(items, limit, |slot: &SlotResponse| {
        format!("{}/{}", slot.scheduled_time, slot.event_id.0)
    })))
}

/// Parses a cursor: the time and the event of the last slot of a page.
fn parse_slot_position(text: &str) -> Result<SlotPosition, ApiError> {
    let invalid = || ApiError::invalid_field("cursor", "must be the nextCursor of the page before");
    let (scheduled, event) = text.split_once('/').ok_or_else(invalid)?;
    let scheduled = parse_time("cursor", scheduled).ok().ok_or_else(invalid)?;
    let event = EventId::parse(event).ok().ok_or_else(invalid)?;
    Ok(SlotPosition { scheduled, event: Some(event) })
}

pub(crate) fn parse(request: AssignRequest) -> Result<Assign, ApiError> {
    let AssignRequest { event_id, config_name, requested_time } = request;
    Ok(Assign {
        event: EventId::parse(event_id).map_err(|problem| ApiError::invalid_field("eventId", problem))?,
        config: parse_config_name(&config_name)?,
        requested: parse_time("requestedTime", &requested_time)?,
    })
}

pub(crate) fn parse_config_name(text: &str) -> Result<ConfigName, ApiError> {
    ConfigName::parse(text).map_err(|problem| ApiError::invalid_field("configName", problem))
}

fn parse_event_id(path: PathParam) -> Result<EventId, ApiError> {
    let text = path.0.map_err(|_not_utf8| ApiError::invalid_field("eventId", "must be valid UTF-8"))?;
    EventId::parse(text).map_err(|problem| ApiError::invalid_field("eventId", problem))
}

pub(crate) fn describe(slot: Slot, status: &'static str) -> SlotResponse {
    SlotResponse {
        event_id: EventIdText(slot.event),
        config_name: ConfigNameText(slot.config),
        requested_time: MillisTime::from(slot.requested),
        window_start: MillisTime::from(slot.window_start),
        scheduled_time: MillisTime::from(slot.scheduled),
        status,
    }
}

pub(crate) fn unknown_config(name: &ConfigName) -> ApiError {
    let advice = "create it with POST /admin/rate-limit/config";
    ApiError::not_found(format!("No active config has the name {name}; {advice}"))
}

pub(crate) fn exhausted() -> ApiError {
    let message = "Every window from the requested time to the end of time is full; nothing was assigned";
    ApiError::unavailable(message).with_code("SLOTS_EXHAUSTED")
}

pub(super) fn recounting() -> ApiError {
    ApiError::unavailable(
        "The windows of this config are being recounted for its new version; the outcome is unknown, try again",
    )
}

fn unknown_event(event: &EventId) -> ApiError {
    ApiError::not_found(format!("The event {event} has no slot; POST /api/v1/slots gives it one"))
}
