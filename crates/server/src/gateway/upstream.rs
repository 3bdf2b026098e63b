//! The upstream: where it is, what it is shown, and connections to it.

use std::io;

use http::HeaderValue;
use hyper::body::Incoming;

use super::GatewayError;
use super::connection::UpstreamConnection;
use super::pool::Pool;
use super::request_body::RequestBody;
use super::settings::GatewaySettings;
use crate::outbound::connect::{Connector, Reach};
use crate::outbound::{OutboundTarget, causes};

/// Who answers.
#[derive(Debug)]
pub(super) struct Upstream {
    target: OutboundTarget,
    pub(super) host: HeaderValue,
    pub(super) authorization: Option<HeaderValue>,
    connector: Connector,
    pub(super) pool: Pool,
}

impl Upstream {
    pub(super) fn new(url: &url::Url, settings: &GatewaySettings, threads: usize) -> Option<Self> {
        let target = OutboundTarget::new(url)?;
        let own = settings.authorization.as_ref().and_then(|secret| {
            let mut value = HeaderValue::from_str(&secret.0).ok()?;
            value.set_sensitive(true);
            Some(value)
        });
        Some(Self {
            host: HeaderValue::from_str(target.uri().authority()?.as_str()).ok()?,
            authorization: own.or_else(|| target.authorization().cloned()),
            target,
            connector: Connector::new(Reach::Anywhere, settings.connect_timeout),
            pool: Pool::new(settings.max_idle, threads),
        })
    }

    /// Sends a request over a connection that has waited for one, or a new one, and waits for the head of the answer.
    pub(super) async fn exchange(
        &self,
        mut request: http::Request<RequestBody>,
    ) -> Result<(http::Response<Incoming>, Box<UpstreamConnection>), GatewayError> {
        loop {
            let mut connection = match self.pool.take() {
                Some(connection) => connection,
                None => Box::new(self.connect().await?),
            };
            let mut failure = match connection.send(request).await {
                Ok(response) => return Ok((response, connection)),
                Err(failure) => failure,
            };
            match failure.take_message() {
                // It ended while it waited, and nothing was sent: another one will do. There are only so many.
                Some(unsent) if connection.is_used => request = unsent,
                _ => return Err(GatewayError::Unreadable(causes(failure.error()))),
            }
        }
    }

    /// A new connection.
    async fn connect(&self) -> Result<UpstreamConnection, GatewayError> {
        let stream = self.connector.clone().connect(self.target.uri().clone()).await.map_err(|error| {
            if error.kind() == io::ErrorKind::TimedOut {
                GatewayError::TimedOut
            } else {
                GatewayError::Unreachable(error)
            }
        })?;
        let connection = UpstreamConnection::new(stream.into_inner()).await;
        connection.map_err(|error| GatewayError::Unreadable(causes(&error)))
    }
}
