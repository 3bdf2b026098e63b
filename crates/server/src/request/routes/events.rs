//! A request's changes as they happen: `GET /v1/requests/{requestId}/events`, as server-sent events.
//!
//! The first event says how the request stands, each further one how it stands after a change of its status. The stream
//! ends after a final one, when the server stops, and after an hour; whoever connects again begins with the present.

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
use crate::request::service::hub::Subscription;

/// How often a silent stream shows that it is alive.
const HEARTBEAT: Duration = Duration::from_secs(15);
/// The longest stream: a token is looked at again after that.
const STREAM_MAX: Duration = Duration::from_secs(3_600);
/// The pause after the store could not say.
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
    let waiting = subscribe(&app, &tenant, id)?;
    let first = find(&app, &tenant, id).await?;
    let permit = app.address_limits.acquire_long_lived()?;
    let until = Instant::now() + STREAM_MAX;
    let watch = Watch { app, waiting, next: Next::Tell(Box::new(first)), until, _permit: permit };
    let events = futures_util::stream::unfold(watch, |mut watch| async move {
        let request = watch.next().await?;
        let event = event(&describe(&watch.app.requests, request).ok()?)?;
        Some((Ok(event), watch))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(HEARTBEAT)))
}

fn event(body: &StatusResponse) -> Option<Event> {
    // A downstream's JSON may be spread over lines; inside of strings it has no line breaks.
    let line = serde_json::to_string(body).ok()?.replace(['\r', '\n'], " ");
    Some(Event::default().event("status").data(line))
}

struct Watch {
    app: Arc<App>,
    waiting: Subscription,
    next: Next,
    until: Instant,
    _permit: LongLivedPermit,
}

enum Next {
    /// Say how it stands.
    Tell(Box<Request>),
    /// Wait until it stands otherwise.
    WaitFrom(RequestStatus),
}

impl Watch {
    /// The request as it is to be told next; None at the end.
    async fn next(&mut self) -> Option<Request> {
        let request = match std::mem::replace(&mut self.next, Next::WaitFrom(RequestStatus::Completed)) {
            Next::Tell(first) => *first,
            Next::WaitFrom(seen) if seen.is_final() => return None,
            Next::WaitFrom(seen) => self.changed(seen).await?,
        };
        self.next = Next::WaitFrom(request.status);
        Some(request)
    }

    /// A store that cannot say is asked again: the caller could do no better.
    async fn changed(&mut self, seen: RequestStatus) -> Option<Request> {
        let Self { app, waiting, until, .. } = self;
        loop {
            match app.requests.next_change(waiting, seen, *until, app.shutdown.closing()).await {
                Ok(changed) => return changed,
                Err(_) => tokio::time::sleep(PAUSE_AFTER_ERROR).await,
            }
        }
    }
}
