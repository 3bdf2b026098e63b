//! A WebSocket tunnel: once both sides have switched protocols, copies bytes in both directions.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http::header::{CONNECTION, UPGRADE};
use http::{HeaderValue, Version};
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use prometheus_client::metrics::gauge::Gauge;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf, copy_bidirectional};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::events::TunnelFailed;
use super::upstream::UpstreamConnection;
use super::{GatewayError, headers};

/// A WebSocket that the upstream has accepted.
pub(super) struct Tunnel {
    pub(super) connection: Box<UpstreamConnection>,
    pub(super) inbound: OnUpgrade,
    pub(super) open_tunnels: Gauge,
    pub(super) idle_timeout: Duration,
    pub(super) stop: CancellationToken,
}

impl Tunnel {
    /// Returns the 101 response for the caller and copies bytes in a task of its own.
    pub(super) fn open(
        self,
        response: http::Response<Incoming>,
        tunnels: &TaskTracker,
    ) -> Result<Response, GatewayError> {
        let protocol = response.headers().get(UPGRADE).and_then(|value| value.to_str().ok());
        if !protocol.is_some_and(|protocol| protocol.eq_ignore_ascii_case("websocket")) {
            return Err(GatewayError::Unreadable(
                "it switched to a protocol other than websocket".to_owned(),
            ));
        }
        tunnels.spawn(self.run());
        let (mut parts, _empty) = response.into_parts();
        headers::remove_hop_by_hop(&mut parts.headers);
        parts.headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        parts.headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
        parts.version = Version::HTTP_11;
        Ok(Response::from_parts(parts, Body::empty()))
    }

    async fn run(self) {
        let Self { connection, inbound, open_tunnels, idle_timeout, stop } = self;
        let opened = tokio::select! {
            opened = async { tokio::join!(inbound, connection.into_tunnel()) } => opened,
            () = tokio::time::sleep(idle_timeout) => return,
            () = stop.cancelled() => return,
        };
        let (Ok(inbound), (outbound, already_read)) = opened else { return };
        let activity = Activity::default();
        let mut inbound = ActivityStream::new(TokioIo::new(inbound), Bytes::new(), &activity);
        let mut outbound = ActivityStream::new(outbound, already_read, &activity);
        open_tunnels.inc();
        let copied = tokio::select! {
            copied = copy_bidirectional(&mut inbound, &mut outbound) => copied.err(),
            () = activity.wait_until_idle(idle_timeout) => None,
            () = stop.cancelled() => None,
        };
        open_tunnels.dec();
        if let Some(error) = copied {
            TunnelFailed { error: &error }.emit();
        }
    }
}

/// When bytes last came from either side.
#[derive(Clone, Debug)]
struct Activity {
    started: Instant,
    last_ms: Arc<AtomicU64>,
}

impl Default for Activity {
    fn default() -> Self {
        Self { started: Instant::now(), last_ms: Arc::default() }
    }
}

impl Activity {
    fn record(&self) {
        let elapsed = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_ms.store(elapsed, Ordering::Relaxed);
    }

    /// Returns when no bytes have come for `timeout`.
    async fn wait_until_idle(&self, timeout: Duration) {
        loop {
            let deadline =
                self.started + Duration::from_millis(self.last_ms.load(Ordering::Relaxed)) + timeout;
            if deadline <= Instant::now() {
                return;
            }
            sleep_until(deadline).await;
        }
    }
}

/// One side of a tunnel, whose reads are recorded.
struct ActivityStream<S> {
    stream: S,
    /// Bytes that were read before the tunnel opened.
    already_read: Bytes,
    activity: Activity,
}

impl<S> ActivityStream<S> {
    fn new(stream: S, already_read: Bytes, activity: &Activity) -> Self {
        Self { stream, already_read, activity: activity.clone() }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ActivityStream<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let this = self.get_mut();
        if !this.already_read.is_empty() {
            let count = this.already_read.len().min(buffer.remaining());
            buffer.put_slice(&this.already_read.split_to(count));
            return Poll::Ready(Ok(()));
        }
        let read = Pin::new(&mut this.stream).poll_read(context, buffer);
        if read.is_ready() {
            this.activity.record();
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ActivityStream<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}
