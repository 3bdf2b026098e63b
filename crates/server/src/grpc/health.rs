//! The standard health service, with a bound on the streams that watch it: they need no credentials and would never end. A
//! connection may have two at a time, for an hour each; a client that watches on begins again.

use std::time::Duration;

use futures_util::stream::{self, BoxStream, StreamExt as _};
use tonic::{Request, Response, Status};
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};
use tonic_health::server::{HealthReporter, HealthService};

use super::requests::GrpcCaller;

/// How long a stream lasts.
const WATCH_TIME: Duration = Duration::from_secs(3_600);

/// Answers from memory with what a reporter has said, to anybody: it reveals nothing but health.
pub(super) struct BoundedHealth(HealthService);

impl BoundedHealth {
    pub(super) fn server(reporter: &HealthReporter) -> HealthServer<Self> {
        HealthServer::new(Self(HealthService::from_health_reporter(reporter.clone())))
    }
}

#[tonic::async_trait]
impl Health for BoundedHealth {
    type WatchStream = BoxStream<'static, Result<HealthCheckResponse, Status>>;

    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        self.0.check(request).await
    }

    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let caller = request.extensions().get::<GrpcCaller>().cloned().unwrap_or_default();
        let permit = caller.begin_watch().ok_or_else(|| {
            Status::resource_exhausted("this connection watches health twice already; end one of the streams")
        })?;
        let changes = self.0.watch(request).await?.into_inner();
        // The permit is released with the stream, also if its caller ends it before.
        let end = async move {
            tokio::time::sleep(WATCH_TIME).await;
            drop(permit);
        };
        let over =
            stream::once(async { Err(Status::unavailable("health was watched for an hour; watch again")) });
        Ok(Response::new(changes.take_until(end).chain(over).boxed()))
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    async fn watch(
        health: &BoundedHealth,
        caller: &GrpcCaller,
    ) -> Result<BoxStream<'static, Result<HealthCheckResponse, Status>>, Status> {
        let mut request = Request::new(HealthCheckRequest::default());
        request.extensions_mut().insert(caller.clone());
        health.watch(request).await.map(Response::into_inner)
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_of_health_ends_after_an_hour_and_a_connection_has_two() {
        let reporter = HealthReporter::new();
        let health = BoundedHealth(HealthService::from_health_reporter(reporter));
        let [caller, other] = [GrpcCaller::default(), GrpcCaller::default()];
        let mut first = watch(&health, &caller).await.unwrap();
        let second = watch(&health, &caller).await.unwrap();
        let refused = watch(&health, &caller).await.err().expect("a third");
        assert_eq!(refused.code(), Code::ResourceExhausted);
        assert!(watch(&health, &other).await.is_ok(), "another connection");
        drop(second);
        let _second = watch(&health, &caller).await.unwrap();
        let begun = tokio::time::Instant::now();
        assert!(first.next().await.unwrap().is_ok(), "the present status");
        let end = first.next().await.unwrap().unwrap_err();
        assert_eq!((end.code(), begun.elapsed()), (Code::Unavailable, WATCH_TIME));
        assert!(first.next().await.is_none());
        assert!(watch(&health, &caller).await.is_ok(), "its permit is free");
    }
}
