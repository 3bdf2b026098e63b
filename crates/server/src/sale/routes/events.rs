//! Sales as they happen: `GET /api/v1/sales/events`, as server-sent events.
//!
//! A stream begins with the present (`initial`) and goes on with every change. Whoever comes back with `Last-Event-ID` is told
//! what was missed, as far as it is remembered. A comment every half minute shows that a silent stream is alive.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::Response;
use bytes::Bytes;
use futures_util::StreamExt;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, HeaderValue};
use serde::Serialize;
use tokio_util::sync::CancellationToken;
use weir_store::sale::Product;

use super::{SaleQuery, parse_query, time_text, unknown_sale};
use crate::address_limits::StreamPermit;
use crate::app::App;
use crate::http::event_stream::EventStream;
use crate::http::extract::Visitor;
use crate::http::sale_error::SaleError;
use crate::sale::events_ring::{Listener, frame};

const HEARTBEAT: Duration = Duration::from_secs(30);
const ALIVE: Bytes = Bytes::from_static(b": heartbeat\n\n");
const LAST_EVENT_ID: &str = "last-event-id";
/// Asks nginx to hand events on as they come.
const BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct InitialData<'a> {
    sku: &'a str,
    state: &'static str,
    stock: u32,
    start_time: String,
    end_time: String,
}

/// Watch sales.
///
/// A stream of server-sent events: `initial` first (the sale as it is), then `stock-update` and `state-change` as they
/// happen. Without `sku` it tells of all sales. In a flood of purchases only the newest stock is told, a few times a
/// second; the last one and changes of state always are.
///
/// A caller that comes back with `Last-Event-ID` gets what it missed after `initial`, as far as it is remembered (1,024
/// events). A comment every 30 seconds shows that the stream is alive. Readers that are too slow are dropped.
#[utoipa::path(
    get,
    path = "/api/v1/sales/events",
    tag = "sale",
    params(
        SaleQuery,
        (
            "Last-Event-ID" = Option<String>,
            Header,
            nullable = false,
            description = "The id of the last event that was received.",
        ),
    ),
    responses(
        (status = 200, description = "The stream.", content(("text/event-stream"))),
        (status = 404, description = "There is no such sale."),
    ),
)]
pub(crate) async fn watch_sales(
    visitor: Visitor,
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    query: Result<Query<SaleQuery>, QueryRejection>,
) -> Result<Response, SaleError> {
    let sku = parse_query(query)?;
    let permit = app.address_limits.acquire_stream(visitor.address)?;
    let last = headers.get(LAST_EVENT_ID).and_then(|value| value.to_str().ok()?.trim().parse().ok());
    // Before the present is read: what happens in between is told twice rather than never.
    let (id, listener) = app.sale.events().listen(sku.clone(), last);
    let product = app.sale.status(sku.as_ref()).await?.ok_or_else(unknown_sale)?;
    let stream = Stream {
        first: Some(initial(id, &product)),
        listener,
        closing: app.shutdown.closing().clone(),
        _permit: Some(permit),
    };
    let events = futures_util::stream::unfold(stream, |mut stream| async move {
        let bytes = stream.next().await?;
        Some((bytes, stream))
    });
    let mut response = Response::new(Body::empty());
    response.extensions_mut().insert(EventStream::new(events.boxed()));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(BUFFERING, HeaderValue::from_static("no"));
    Ok(response)
}

fn initial(id: u64, product: &Product) -> Bytes {
    let sale = &product.sale;
    let data = InitialData {
        sku: product.sku.as_str(),
        state: sale.state.as_str(),
        stock: sale.stock(),
        start_time: time_text(sale.terms.start),
        end_time: time_text(sale.terms.end),
    };
    frame(id, "initial", &data)
}

struct Stream {
    first: Option<Bytes>,
    listener: Listener,
    closing: CancellationToken,
    _permit: Option<StreamPermit>,
}

impl Stream {
    /// What is sent next; none at the end: the server stops, or the caller was too slow.
    async fn next(&mut self) -> Option<Bytes> {
        if let Some(first) = self.first.take() {
            return Some(first);
        }
        tokio::select! {
            news = tokio::time::timeout(HEARTBEAT, self.listener.next()) => news.unwrap_or(Some(ALIVE)),
            () = self.closing.cancelled() => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::metrics::counter::Counter;
    use prometheus_client::metrics::gauge::Gauge;
    use tokio::time::Instant;
    use weir_core::sale::{SaleState, Sku};

    use super::*;
    use crate::sale::events_ring::Events;

    #[tokio::test(start_paused = true)]
    async fn a_silent_stream_shows_every_half_minute_that_it_is_alive() {
        let events = Arc::new(Events::new(Gauge::default(), Counter::default()));
        let (_, listener) = events.listen(None, None);
        let mut stream = Stream { first: None, listener, closing: CancellationToken::new(), _permit: None };
        let start = Instant::now();
        for n in 1..=3 {
            assert_eq!(stream.next().await, Some(ALIVE));
            assert_eq!(start.elapsed().as_secs(), 30 * n);
        }
        tokio::time::advance(HEARTBEAT / 2).await;
        events.tell_state(&Sku::parse("W").unwrap(), SaleState::Active);
        let told = stream.next().await.expect("it goes on");
        assert!(told.starts_with(b"event: state-change\n"), "{told:?}");
        let since = Instant::now();
        assert_eq!(stream.next().await, Some(ALIVE));
        assert_eq!(since.elapsed().as_secs(), 30, "after the last word");
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_ends_when_the_server_stops() {
        let events = Arc::new(Events::new(Gauge::default(), Counter::default()));
        let ((_, listener), closing) = (events.listen(None, None), CancellationToken::new());
        let mut stream = Stream { first: None, listener, closing: closing.clone(), _permit: None };
        closing.cancel();
        assert_eq!(stream.next().await, None);
        drop(stream);
        assert!(!events.has_listeners());
    }
}
