//! `envoy.service.ratelimit.v3.RateLimitService` as tonic serves it. Written by hand, so that building Weir takes no
//! compiler of protocols.

use std::convert::Infallible;
use std::task::{Context, Poll};

use axum::body::HttpBody;
use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use prost::Message;
use tonic::body::Body;
use tonic::codec::{Codec, DecodeBuf, Decoder};
use tonic::server::{Grpc, NamedService, UnaryService};
use tonic::{Request, Response, Status};
use tonic_prost::ProstEncoder;

use super::Gate;
use super::decide::should_rate_limit;
use super::message::{RateLimitRequest, RateLimitResponse};

/// The longest question: proxies send a few hundred bytes.
const MESSAGE_BYTES_MAX: usize = 256 * 1024;

/// The path of the one method.
const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// Serves the service.
#[derive(Clone)]
pub(super) struct RateLimitServer(Gate);

impl RateLimitServer {
    /// Its name, also in health checks.
    pub(super) const NAME: &str = "envoy.service.ratelimit.v3.RateLimitService";

    pub(super) const fn new(gate: Gate) -> Self {
        Self(gate)
    }
}

impl NamedService for RateLimitServer {
    const NAME: &'static str = Self::NAME;
}

impl<B> tower::Service<http::Request<B>> for RateLimitServer
where
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Send,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        if request.uri().path() != SHOULD_RATE_LIMIT {
            let unknown = Status::unimplemented("there is no such method").into_http();
            return std::future::ready(Ok(unknown)).boxed();
        }
        let method = ShouldRateLimit(self.0.clone());
        async move {
            let mut grpc = Grpc::new(RateLimitCodec).max_decoding_message_size(MESSAGE_BYTES_MAX);
            Ok(grpc.unary(method, request).await)
        }
        .boxed()
    }
}

/// Reads questions and writes answers.
struct RateLimitCodec;

impl Codec for RateLimitCodec {
    type Encode = RateLimitResponse;
    type Decode = RateLimitRequest;
    type Encoder = ProstEncoder<RateLimitResponse>;
    type Decoder = QuestionDecoder;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::default()
    }

    fn decoder(&mut self) -> Self::Decoder {
        QuestionDecoder
    }
}

/// A message that is none is the caller's fault; the decoder of `tonic-prost` calls it a fault of the server.
struct QuestionDecoder;

impl Decoder for QuestionDecoder {
    type Item = RateLimitRequest;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<RateLimitRequest>, Status> {
        let malformed =
            |error| Status::invalid_argument(format!("the message is not a RateLimitRequest: {error}"));
        RateLimitRequest::decode(buffer).map(Some).map_err(malformed)
    }
}

/// The method.
struct ShouldRateLimit(Gate);

impl UnaryService<RateLimitRequest> for ShouldRateLimit {
    type Response = RateLimitResponse;
    type Future = BoxFuture<'static, Result<Response<RateLimitResponse>, Status>>;

    fn call(&mut self, request: Request<RateLimitRequest>) -> Self::Future {
        let gate = self.0.clone();
        async move {
            gate.admit(request.metadata())?;
            should_rate_limit(&gate.app.tier, request.get_ref()).await.map(Response::new)
        }
        .boxed()
    }
}
