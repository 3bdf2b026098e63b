//! `envoy.service.ratelimit.v3.RateLimitService`: credentials first, then the decision.

use tonic::{Request, Response, Status};

use super::Gate;
use super::decide::should_rate_limit;
use super::message::{RateLimitRequest, RateLimitResponse, RateLimitService, RateLimitServiceServer};

/// The longest request: proxies send a few hundred bytes.
const MESSAGE_BYTES_MAX: usize = 256 * 1024;

/// Serves the service behind a gate.
pub(super) fn rate_limit_server(gate: Gate) -> RateLimitServiceServer<Gate> {
    RateLimitServiceServer::new(gate).max_decoding_message_size(MESSAGE_BYTES_MAX)
}

#[tonic::async_trait]
impl RateLimitService for Gate {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        self.admit(request.metadata())?;
        should_rate_limit(&self.app.tier, request.get_ref()).await.map(Response::new)
    }
}
