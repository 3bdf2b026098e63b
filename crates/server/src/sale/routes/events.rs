//! The event stream of sales: `GET /api/v1/sales/events`, as server-sent events.
//!
//! A stream begins with the present state (`initial`) and continues with every change. A caller that reconnects with
//! `Last-Event-ID` gets the events that it missed instead, if they are still in the ring. A comment every 30 seconds shows that
//! an idle stream is alive.

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
use weir_core::sale::{EndReason, SaleStage};
use weir_store::sale::{EventId, Product};

use super::{SaleQuery, parse_query, time_text, unknown_sale};
use crate::address_limits::StreamPermit;
use crate::app::App;
use crate::http::event_stream::EventStream;
use crate::http::extract::Visitor;
use crate::http::sale_error::SaleError;
use crate::sale::event_ring::{SaleSubscription, frame};

const HEARTBEAT: Duration = Duration::from_secs(30);
const HEARTBEAT_FRAME: Bytes = Bytes::from_static(b": heartbeat\n\n");
/// Begins a stream that continues another one, so that the response begins although nothing may have been missed.
const RESUMED_FRAME: Bytes = Bytes::from_static(b": resumed\n\n");
const LAST_EVENT_ID: &str = "last-event-id";
/// Tells nginx not to buffer the stream.
const BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct InitialData<'a> {
    sku: &'a str,
    state: &'static str,
    stock: u32,
    start_time: String,
    end_time: String,
    end_reason: Option<&'static str>,
}

/// Watch sales.
///
/// A stream of server-sent events: first `initial` with the present state of the sale, then `stock-update` and
/// `state-change` as they happen. Without `sku` the stream has the events of all sales. In a flood of purchases only the newest
/// stock is sent, a few times a second; the last stock and changes of state are always sent.
///
/// A caller that reconnects with `Last-Event-ID` gets the events that it missed, in order and each once, if they are among the
/// last 1,024; otherwise `initial` again. With Redis it may reconnect to any server. The stock of a sale never goes up.
/// A comment every 30 seconds shows that the stream is alive. Callers that read too slowly are disconnected.
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
    let last =
        headers.get(LAST_EVENT_ID).and_then(|value| value.to_str().ok()?.trim().parse::<EventId>().ok());
    let product = app.sale.status(sku.as_ref()).await?.ok_or_else(unknown_sale)?;
    let (begin, subscription) = app.sale.subscribe(sku, last, &product).await?;
    let first = begin.map_or(RESUMED_FRAME, |(id, stage)| initial(id, &product, stage));
    let stream = SaleEventStream {
        first: Some(first),
        subscription,
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

/// What the events up to `id` have told of a product.
fn initial(id: EventId, product: &Product, stage: SaleStage) -> Bytes {
    let sale = &product.sale;
    let data = InitialData {
        sku: product.sku.as_str(),
        state: stage.state.as_str(),
        stock: stage.stock,
        start_time: time_text(sale.terms.start),
        end_time: time_text(sale.terms.end),
        end_reason: stage.state.end_reason().map(EndReason::as_str),
    };
    frame(id, "initial", &data)
}

struct SaleEventStream {
    first: Option<Bytes>,
    subscription: SaleSubscription,
    closing: CancellationToken,
    _permit: Option<StreamPermit>,
}

impl SaleEventStream {
    /// Returns the next bytes, or `None` at the end: the server stops, or the caller was too slow.
    async fn next(&mut self) -> Option<Bytes> {
        if let Some(first) = self.first.take() {
            return Some(first);
        }
        tokio::select! {
            frames = tokio::time::timeout(HEARTBEAT, self.subscription.next()) => frames.unwrap_or(Some(HEARTBEAT_FRAME)),
            () = self.closing.cancelled() => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::metrics::counter::Counter;
    use prometheus_client::metrics::gauge::Gauge;
    use tokio::time::Instant;
    use weir_core::Timestamp;
    use weir_core::sale::{Sale, SaleState, Sku, Terms};
    use weir_store::sale::ProductId;

    use super::*;
    use crate::sale::event_ring::{EventRing, Origin};

    fn product(state: SaleState) -> Product {
        let terms = Terms::new("Widget", 5, Timestamp::EPOCH, Timestamp::from_seconds(1)).unwrap();
        let sale = Sale { state, ..Sale::new(terms) };
        Product { id: ProductId(1), sku: Sku::parse("W").unwrap(), sale, created_at: Timestamp::EPOCH }
    }

    fn event_ring() -> Arc<EventRing> {
        Arc::new(EventRing::new(None, Gauge::default(), Counter::default()))
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_stream_sends_a_heartbeat_every_30_seconds() {
        let (events, upcoming) = (event_ring(), product(SaleState::Upcoming));
        let (_, subscription) = events.subscribe(None, None, &upcoming);
        let mut stream =
            SaleEventStream { first: None, subscription, closing: CancellationToken::new(), _permit: None };
        let start = Instant::now();
        for n in 1..=3 {
            assert_eq!(stream.next().await, Some(HEARTBEAT_FRAME));
            assert_eq!(start.elapsed().as_secs(), 30 * n);
        }
        tokio::time::advance(HEARTBEAT / 2).await;
        events.publish(&product(SaleState::Active), upcoming.sale.stage(), Origin::Here);
        let frames = stream.next().await.expect("an event");
        assert!(frames.starts_with(b"event: state-change\n"), "{frames:?}");
        let since = Instant::now();
        assert_eq!(stream.next().await, Some(HEARTBEAT_FRAME));
        assert_eq!(since.elapsed().as_secs(), 30, "after the last event");
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_ends_when_the_server_stops() {
        let (events, closing) = (event_ring(), CancellationToken::new());
        let (_, subscription) = events.subscribe(None, None, &product(SaleState::Upcoming));
        let mut stream =
            SaleEventStream { first: None, subscription, closing: closing.clone(), _permit: None };
        closing.cancel();
        assert_eq!(stream.next().await, None);
        drop(stream);
        assert!(!events.has_subscriptions());
    }
}
