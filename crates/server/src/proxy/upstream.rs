//! The upstream: where it is, what it is shown, and connections to it.

use std::error::Error as StdError;
use std::io;
use std::time::Instant;

use http::HeaderValue;
use hyper::body::Incoming;

use super::Problem;
use super::pool::{Line, Pool};
use super::upload::Upload;
use super::wire::Wire;
use crate::config::ai::AiSettings;
use crate::outbound::Target;
use crate::outbound::connect::{Connector, Reach};

/// Who answers.
#[derive(Debug)]
pub(super) struct Upstream {
    target: Target,
    pub(super) host: HeaderValue,
    pub(super) authorization: Option<HeaderValue>,
    connector: Connector,
    pub(super) pool: Pool,
}

impl Upstream {
    pub(super) fn new(url: &url::Url, settings: &AiSettings) -> Option<Self> {
        let target = Target::new(url)?;
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
            pool: Pool::new(settings.max_idle),
        })
    }

    /// Sends a request by hyper, over a connection that has waited for one or a new one.
    pub(super) async fn exchange(
        &self,
        mut request: http::Request<Upload>,
    ) -> Result<(http::Response<Incoming>, Box<Wire>), Problem> {
        loop {
            let line = match self.pool.take(Instant::now()) {
                Some(line) => line,
                None => self.connect().await?,
            };
            let mut wire = Wire::new(line).await.map_err(|error| Problem::Unreadable(causes(&error)))?;
            let mut failure = match wire.send(request).await {
                Ok(response) => return Ok((response, wire)),
                Err(failure) => failure,
            };
            match failure.take_message() {
                // It ended while it waited, and nothing was sent: another one will do. There are only so many.
                Some(unsent) if wire.is_used => request = unsent,
                _ => return Err(Problem::Unreadable(causes(failure.error()))),
            }
        }
    }

    /// A new connection.
    pub(super) async fn connect(&self) -> Result<Line, Problem> {
        let stream = self.connector.clone().connect(self.target.uri().clone()).await.map_err(|error| {
            if error.kind() == io::ErrorKind::TimedOut {
                Problem::TimedOut
            } else {
                Problem::Unreachable(error)
            }
        })?;
        Ok(Line::new(stream.into_inner()))
    }
}

/// What went wrong, and why, and why that.
fn causes(error: &(dyn StdError + 'static)) -> String {
    let chain = std::iter::successors(Some(error), |&cause| cause.source());
    chain.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
