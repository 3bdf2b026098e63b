//! The gRPC face: Envoy's rate limit service and health checks, on an address of their own.

mod accept;
mod codec;
mod decide;
pub mod message;
mod service;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tonic::Status;
use tonic::metadata::MetadataMap;
use tonic::transport::Server;
use tonic_health::ServingStatus;

use self::message::SERVICE_NAME;
use self::service::rate_limit_server;
use crate::app::App;
use crate::auth::admin;
use crate::auth::credentials::{Credentials, LIMITS_CHECK};

/// Questions of one connection under way at once.
const STREAMS_MAX: u32 = 1_024;
/// How often a silent connection is asked whether it is still there, and how long it may take to say so.
const PING_EVERY: Duration = Duration::from_secs(30);
const PONG_WITHIN: Duration = Duration::from_secs(20);
/// The longest question about health: the name of a service.
const HEALTH_BYTES_MAX: usize = 1_024;
/// How long a stop waits for answers: they take milliseconds, but whoever watches health never ends.
const GRACE: Duration = Duration::from_secs(2);

/// Serves until told to stop, then until every question under way is answered.
pub async fn serve(listener: TcpListener, app: Arc<App>) {
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_service_status(SERVICE_NAME, ServingStatus::Serving).await;
    let is_local = listener.local_addr().is_ok_and(|address| is_loopback(address.ip()));
    let gate = Gate { is_open: is_local || app.settings.auth.allow_anonymous, app: Arc::clone(&app) };
    let incoming = accept::connections(listener, app.settings.http.max_connections);
    let closing = app.shutdown.closing().clone();
    let stop = async {
        closing.cancelled().await;
        for name in ["", SERVICE_NAME] {
            reporter.set_service_status(name, ServingStatus::NotServing).await;
        }
    };
    let server = Server::builder()
        .max_concurrent_streams(STREAMS_MAX)
        .http2_keepalive_interval(Some(PING_EVERY))
        .http2_keepalive_timeout(Some(PONG_WITHIN))
        // Nobody needs credentials for it, and it is answered from memory: whoever checks learns nothing else and costs nothing.
        .add_service(health.max_decoding_message_size(HEALTH_BYTES_MAX))
        .add_service(rate_limit_server(gate))
        .serve_with_incoming_shutdown(incoming, stop);
    let end = async {
        closing.cancelled().await;
        // Whichever comes first: a stop may have less time than that.
        let _ = tokio::time::timeout(GRACE, app.shutdown.ending().cancelled()).await;
    };
    tokio::select! {
        served = server => if let Err(error) = served {
            tracing::error!(%error, "gRPC is no longer served");
        },
        () = end => {}
    }
}

/// Who may ask.
#[derive(Clone)]
struct Gate {
    app: Arc<App>,
    /// Whether those may who bring no credentials: on this machine alone, unless the settings say otherwise.
    is_open: bool,
}

impl Gate {
    fn admit(&self, metadata: &MetadataMap) -> Result<(), Status> {
        let brings = |name: &str| metadata.contains_key(name);
        if self.is_open && !brings(admin::HEADER) && !brings(http::header::AUTHORIZATION.as_str()) {
            return Ok(());
        }
        let headers = metadata.clone().into_headers();
        match self.app.auth.authorize(Credentials::OperatorOrScope(LIMITS_CHECK), &headers) {
            Ok(_) => Ok(()),
            Err(error) if error.is_forbidden() => Err(Status::permission_denied(error.to_string())),
            Err(error) => Err(Status::unauthenticated(error.to_string())),
        }
    }
}

fn is_loopback(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}
