//! The event stream of a request: `GET /v1/requests/{requestId}/events`, as server-sent events.
//!
//! The first event has the present status, each further one the status after a change. The stream ends after a final status,
//! when the server stops, and after an hour. A client that connects again starts with the present status.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::sse::{Event, KeepAlive, Sse};
use futures_util::Stream;
use tokio::time::Instant;
use weir_core::request::state::RequestStatus;
use weir_store::request::Request;

use super::{StatusResponse, describe, find, parse_id, subscribe};
use crate::address_limits::LongLivedPermit;
use crate::app::App;
use crate::http::error::ApiError;
use crate::http::extract::{PathParam, Tenant};
use crate::request::service::hub::StatusSubscription;

/// How often a stream without events sends a comment.
const HEARTBEAT: Duration = Duration::from_secs(15);
/// How long a stream may last: the client's token is checked again when it reconnects.
const STREAM_MAX: Duration = Duration::from_secs(3_600);
/// The pause after the store did not answer.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(500);

/// Watch a request.
///
/// A stream of server-sent events, each `event: status` with the same JSON as `GET /v1/requests/{requestId}`: first the
/// present status, then one for every change. It ends after a final one. A comment every 15 seconds shows that it is
/// alive; after an hour, and when the server stops, it ends early: connect again.
///
/// Needs the scope `requests:read` and a token with `tenant_id`.
#[utoipa::path(
    get,
    path = "/v1/requests/{requestId}/events",
    tag = "request",
    params(("requestId" = uuid::Uuid, Path, description = "Which request: the `requestId` of its 202.")),
    responses(
        (
            status = 200,
            description = "The stream.",
            content(("text/event-stream")),
        ),
        (
            status = 404,
            description = "The tenant has no such request: the id is wrong, another tenant's, or was purged.",
        ),
    ),
)]
pub(crate) async fn watch_request(
    Tenant(tenant): Tenant,
    State(app): State<Arc<App>>,
    id: PathParam,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, ApiError> {
    let id = parse_id(id)?;
    let subscription = subscribe(&app, &tenant, id)?;
    let first = find(&app, &tenant, id).await?;
    let permit = app.address_limits.acquire_long_lived()?;
    let deadline = Instant::now() + STREAM_MAX;
    let watch = StatusWatch {
        app,
        subscription,
        next: NextEvent::Present(Box::new(first)),
        deadline,
        _permit: permit,
    };
    let events = futures_util::stream::unfold(watch, |mut watch| async move {
        let request = watch.next().await?;
        let event = event(&describe(&watch.app.requests, request).ok()?)?;
        Some((Ok(event), watch))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(HEARTBEAT)))
}

fn event(body: &StatusResponse) -> Option<Event> {
    // A downstream's JSON may have line breaks, but not inside of strings.
    let line = serde_json::to_string(body).ok()?.replace(['\r', '\n'], " ");
    Some(Event::default().event("status").data(line))
}

struct StatusWatch {
    app: Arc<App>,
    subscription: StatusSubscription,
    next: NextEvent,
    deadline: Instant,
    _permit: LongLivedPermit,
}

enum NextEvent {
    /// The request as it was at the start of the stream.
    Present(Box<Request>),
    /// The request once its status differs from this one.
    ChangeFrom(RequestStatus),
}

impl StatusWatch {
    /// The request for the next event, or `None` at the end of the stream.
    async fn next(&mut self) -> Option<Request> {
        let request = match std::mem::replace(&mut self.next, NextEvent::ChangeFrom(RequestStatus::Completed))
        {
            NextEvent::Present(first) => *first,
            NextEvent::ChangeFrom(last_status) if last_status.is_final() => return None,
            NextEvent::ChangeFrom(last_status) => self.next_change(last_status).await?,
        };
        self.next = NextEvent::ChangeFrom(request.status);
        Some(request)
    }

    /// Retries if the store does not answer: the client could only do the same.
    async fn next_change(&mut self, last_status: RequestStatus) -> Option<Request> {
        let Self { app, subscription, deadline, .. } = self;
        loop {
            match app.requests.next_change(subscription, last_status, *deadline, app.shutdown.closing()).await
            {
                Ok(changed) => return changed,
                Err(_) => tokio::time::sleep(PAUSE_AFTER_ERROR).await,
            }
        }
    }
}
