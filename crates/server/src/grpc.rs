//! The gRPC API: Envoy's rate limit service and health checks, on a separate address. It checks credentials; `decide.rs` asks
//! the policies.
//!
//! Memory is bounded: unfinished requests share a budget (`body.rs`), and HTTP/2 buffers a fixed amount per connection.
//! docs/bounds.md has the sum.

mod accept;
mod body;
mod codec;
mod decide;
mod health;
pub mod message;
mod requests;
mod unread;

use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tonic::body::Body;
use tonic::metadata::MetadataMap;
use tonic::service::LayerExt;
use tonic::transport::Server;
use tonic::{Request, Response, Status};
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;
use tower::util::MapRequestLayer;

use self::body::BodyLimits;
use self::health::BoundedHealth;
use self::message::{
    RateLimitRequest, RateLimitResponse, RateLimitService, RateLimitServiceServer, SERVICE_NAME,
};
use self::requests::{RequestPermits, SHARED_REQUESTS, TrackRequests};
use crate::app::App;
use crate::auth::credentials::{ADMIN_KEY_HEADER, Credentials, LIMITS_CHECK};
use crate::buffer_budget::BufferBudget;
use crate::tls::Tls;

/// The most connections, if `http.max_connections` does not allow fewer. A proxy opens one for each of its threads.
const CONNECTIONS_MAX: usize = 4_096;
/// The most concurrent requests of one connection. Proxies open another connection for more.
const STREAMS_MAX: u32 = 256;
/// The largest head of a request.
const HEAD_BYTES_MAX: u32 = 16 * 1024;
/// The bytes that a request may send before they are read: HTTP/2's own default. Messages have a few hundred bytes.
const STREAM_WINDOW_BYTES: u32 = 65_535;
/// The bytes that a connection may send before they are read. h2 closes a connection when the overhead of unread small frames
/// exceeds half of this; the frames of [`STREAMS_MAX`] requests reach a quarter.
const CONNECTION_WINDOW_BYTES: u32 = 4 * 256 * STREAMS_MAX;
/// The memory for unfinished requests of all connections.
const BUFFERED_MAX: usize = 32 << 20;
/// How often an idle connection is pinged.
const PING_INTERVAL: Duration = Duration::from_secs(30);
/// How long the peer may take to answer a ping.
const PING_TIMEOUT: Duration = Duration::from_secs(20);
/// The largest request of a health check: the name of a service.
const HEALTH_BYTES_MAX: usize = 1_024;
/// The largest rate limit request. Proxies send a few hundred bytes.
const MESSAGE_BYTES_MAX: usize = 256 * 1024;
/// How long a stop waits for responses. They take milliseconds, but the stream of a client that watches health never ends.
const GRACE: Duration = Duration::from_secs(2);

/// Serves until the server stops, then until every request under way is answered.
pub async fn serve(listener: TcpListener, tls: Option<Tls>, app: Arc<App>) {
    let reporter = HealthReporter::new();
    reporter.set_service_status(SERVICE_NAME, ServingStatus::Serving).await;
    let is_open = app.settings.auth.allow_anonymous_grpc;
    let rate_limits = RateLimitServiceServer::new(RateLimitEndpoint { is_open, app: Arc::clone(&app) })
        .max_decoding_message_size(MESSAGE_BYTES_MAX);
    let health = BoundedHealth::server(&reporter).max_decoding_message_size(HEALTH_BYTES_MAX);
    let permits = RequestPermits::new(SHARED_REQUESTS);
    let settings = app.settings.http;
    let limits = BodyLimits { budget: BufferBudget::new(BUFFERED_MAX), timeout: settings.read_timeout };
    let incoming = accept::connections(listener, tls, settings.max_connections.min(CONNECTIONS_MAX));
    let limit_bodies = MapRequestLayer::new(move |request| limits.apply(request).map(Body::new));
    let closing = app.shutdown.closing().clone();
    let stop = async {
        closing.cancelled().await;
        for name in ["", SERVICE_NAME] {
            reporter.set_service_status(name, ServingStatus::NotServing).await;
        }
    };
    let server = Server::builder()
        .max_concurrent_streams(STREAMS_MAX)
        .http2_max_header_list_size(HEAD_BYTES_MAX)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .http2_keepalive_interval(Some(PING_INTERVAL))
        .http2_keepalive_timeout(Some(PING_TIMEOUT))
        .add_service(TrackRequests { service: limit_bodies.named_layer(health), permits: permits.clone() })
        .add_service(TrackRequests { service: limit_bodies.named_layer(rate_limits), permits })
        .serve_with_incoming_shutdown(incoming, stop);
    let end = async {
        closing.cancelled().await;
        // The stop may have less time than the grace period.
        let _ = tokio::time::timeout(GRACE, app.shutdown.giving_up().cancelled()).await;
    };
    tokio::select! {
        served = server => if let Err(error) = served {
            tracing::error!(%error, "the gRPC server failed; gRPC is no longer served until a restart");
        },
        () = end => {}
    }
}

/// `envoy.service.ratelimit.v3.RateLimitService`.
#[derive(Clone)]
struct RateLimitEndpoint {
    app: Arc<App>,
    /// Whether requests without credentials are admitted.
    is_open: bool,
}

#[tonic::async_trait]
impl RateLimitService for RateLimitEndpoint {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        self.admit(request.metadata()).await?;
        decide::should_rate_limit(&self.app.tier, request.get_ref()).await.map(Response::new)
    }
}

impl RateLimitEndpoint {
    async fn admit(&self, metadata: &MetadataMap) -> Result<(), Status> {
        let has = |name: &str| metadata.contains_key(name);
        if self.is_open && !has(ADMIN_KEY_HEADER) && !has(http::header::AUTHORIZATION.as_str()) {
            return Ok(());
        }
        let headers = metadata.clone().into_headers();
        let required = Credentials::OperatorOrScope(LIMITS_CHECK);
        match self.app.auth.authorize(required, &http::Method::POST, &headers).await {
            Ok(_) => Ok(()),
            Err(error) if error.is_forbidden() => Err(Status::permission_denied(error.to_string())),
            Err(error) => Err(Status::unauthenticated(error.to_string())),
        }
    }
}
