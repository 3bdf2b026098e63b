//! A WebSocket: once both sides have agreed to it, bytes are passed on as they come, both ways.

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

use super::connection::UpstreamConnection;
use super::{GatewayError, headers};

/// A WebSocket that the upstream has agreed to.
pub(super) struct Tunnel {
    pub(super) connection: Box<UpstreamConnection>,
    pub(super) inbound: OnUpgrade,
    /// How many there are.
    pub(super) open: Gauge,
    pub(super) idle_timeout: Duration,
    pub(super) stop: CancellationToken,
}

impl Tunnel {
    /// Tells the caller of the upstream's consent, and passes on what follows.
    pub(super) fn open(
        self,
        response: http::Response<Incoming>,
        tunnels: &TaskTracker,
    ) -> Result<Response, GatewayError> {
        let agreed = response.headers().get(UPGRADE).and_then(|value| value.to_str().ok());
        if !agreed.is_some_and(|protocol| protocol.eq_ignore_ascii_case("websocket")) {
            return Err(GatewayError::Unreadable(
                "it switched to another protocol than it was asked to".to_owned(),
            ));
        }
        tunnels.spawn(self.run());
        let (mut parts, _empty) = response.into_parts();
        headers::strip(&mut parts.headers);
        parts.headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        parts.headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
        parts.version = Version::HTTP_11;
        Ok(Response::from_parts(parts, Body::empty()))
    }

    async fn run(self) {
        let Self { connection, inbound, open, idle_timeout, stop } = self;
        let opened = tokio::select! {
            opened = async { tokio::join!(inbound, connection.into_tunnel()) } => opened,
            () = tokio::time::sleep(idle_timeout) => return,
            () = stop.cancelled() => return,
        };
        let (Ok(inbound), (outbound, before)) = opened else { return };
        let activity = Activity::default();
        let mut inbound = Watched::new(TokioIo::new(inbound), Bytes::new(), &activity);
        let mut outbound = Watched::new(outbound, before, &activity);
        open.inc();
        let copied = tokio::select! {
            copied = copy_bidirectional(&mut inbound, &mut outbound) => copied.err(),
            () = activity.silence(idle_timeout) => None,
            () = stop.cancelled() => None,
        };
        open.dec();
        if let Some(error) = copied {
            tracing::debug!(%error, "a tunnel ended badly");
        }
    }
}

/// When something last came, from either side.
#[derive(Clone, Debug)]
struct Activity {
    began: Instant,
    last_ms: Arc<AtomicU64>,
}

impl Default for Activity {
    fn default() -> Self {
        Self { began: Instant::now(), last_ms: Arc::default() }
    }
}

impl Activity {
    fn note(&self) {
        let elapsed = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_ms.store(elapsed, Ordering::Relaxed);
    }

    /// Returns once nothing has come for so long.
    async fn silence(&self, span: Duration) {
        loop {
            let until = self.began + Duration::from_millis(self.last_ms.load(Ordering::Relaxed)) + span;
            if until <= Instant::now() {
                return;
            }
            sleep_until(until).await;
        }
    }
}

/// One side of a tunnel.
struct Watched<S> {
    stream: S,
    /// What was read of it already.
    before: Bytes,
    activity: Activity,
}

impl<S> Watched<S> {
    fn new(stream: S, before: Bytes, activity: &Activity) -> Self {
        Self { stream, before, activity: activity.clone() }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let this = self.get_mut();
        if !this.before.is_empty() {
            let count = this.before.len().min(buffer.remaining());
            buffer.put_slice(&this.before.split_to(count));
            return Poll::Ready(Ok(()));
        }
        let read = Pin::new(&mut this.stream).poll_read(context, buffer);
        if read.is_ready() {
            this.activity.note();
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
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
