//! Calls that Weir makes over HTTP: to downstreams, which the operator has named, and to callback URLs, which a caller has.
//!
//! A call is one POST on HTTP/1.1. It is bounded in time and in what it reads, follows no redirect and knows no proxy:
//! what is named is what is called. Where a caller named it, [`Reach::Public`] keeps the call out of private networks.

pub(crate) mod address;
pub(crate) mod connect;
mod retry_after;

use std::error::Error as StdError;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::{AUTHORIZATION, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Body as _, Incoming};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::capture_connection;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use percent_encoding::percent_decode_str;
use url::Url;

pub(crate) use self::connect::Reach;
use self::connect::{Connector, ForbiddenAddress};

/// How much of an answer that nobody wants is read, so that its connection can be used again.
const DRAINED_BYTES_MAX: usize = 64 * 1024;
/// How long a connection waits for another call: shorter than most servers keep one that nobody uses.
const IDLE: Duration = Duration::from_secs(4);
/// How long the head of an answer may be.
const HEAD_BYTES_MAX: usize = 64 * 1024;

/// What a client may spend on its calls.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutboundLimits {
    /// How long it may take to get a connection, names and TLS included.
    pub connect_timeout: Duration,
    /// How long the whole answer may take from then on.
    pub read_timeout: Duration,
    /// The longest body of a 2xx; of 0, bodies are not read at all.
    pub body_max: usize,
    /// How many connections to one host may wait for another call.
    pub idle_max: usize,
}

/// Makes calls.
#[derive(Clone, Debug)]
pub(crate) struct OutboundClient {
    client: Client<Connector, Full<Bytes>>,
    bounds: OutboundLimits,
}

/// Whom to call.
#[derive(Clone, Debug)]
pub(crate) struct OutboundTarget {
    uri: Uri,
    /// What a user and a password in the URL come to.
    authorization: Option<HeaderValue>,
}

/// What was answered.
#[derive(Clone, Debug)]
pub(crate) struct OutboundResponse {
    /// The status.
    pub status: StatusCode,
    /// How long the other side asks to be left alone.
    pub retry_after: Option<Duration>,
    /// The body of a 2xx; empty for any other.
    pub body: Bytes,
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum OutboundError {
    /// No connection, or no whole answer, in time.
    #[error("there was no answer in time")]
    TimedOut,
    /// No connection.
    #[error("no connection: {0}")]
    Unreachable(String),
    /// The name leads only to addresses that may not be called.
    #[error("the address is private or reserved")]
    ForbiddenAddress,
    /// The answer is not HTTP, or broke off.
    #[error("the answer could not be read: {0}")]
    Unreadable(String),
    /// A 2xx with a longer body than is allowed.
    #[error("the answer is too long")]
    TooLarge,
}

impl OutboundTarget {
    /// Reads a URL; none when it cannot be called.
    #[must_use]
    pub(crate) fn new(url: &Url) -> Option<Self> {
        let is_http = matches!(url.scheme(), "http" | "https") && url.has_host();
        let mut bare = url.clone();
        bare.set_fragment(None);
        let authorization = credentials(url);
        // Neither fails for a URL that has a host.
        bare.set_username("").and_then(|()| bare.set_password(None)).ok().filter(|()| is_http)?;
        Some(Self { uri: bare.as_str().parse().ok()?, authorization })
    }

    /// Where it is.
    #[must_use]
    pub(crate) const fn uri(&self) -> &Uri {
        &self.uri
    }

    /// What it is shown as credentials, if its URL says so.
    #[must_use]
    pub(crate) const fn authorization(&self) -> Option<&HeaderValue> {
        self.authorization.as_ref()
    }
}

/// The user and the password of a URL, where some characters have to be written `%XX`, as they are meant.
fn credentials(url: &Url) -> Option<HeaderValue> {
    let decode = |text: &str| percent_decode_str(text).collect::<Vec<u8>>();
    let (user, password) = (decode(url.username()), decode(url.password().unwrap_or_default()));
    if user.is_empty() && password.is_empty() {
        return None;
    }
    let pair = STANDARD.encode([&user[..], b":", &password].concat());
    let mut value: HeaderValue = format!("Basic {pair}").parse().ok()?;
    value.set_sensitive(true);
    Some(value)
}

impl OutboundClient {
    /// A client that reaches what `reach` allows.
    #[must_use]
    pub(crate) fn new(reach: Reach, bounds: OutboundLimits) -> Self {
        Self::with(Connector::new(reach, bounds.connect_timeout), bounds)
    }

    /// The same that trusts the authorities in a file instead of the system's, if there is one.
    #[must_use]
    pub(crate) fn trusting(file: Option<PathBuf>, reach: Reach, bounds: OutboundLimits) -> Self {
        Self::with(Connector::new(reach, bounds.connect_timeout).trusting(file), bounds)
    }

    fn with(connector: Connector, bounds: OutboundLimits) -> Self {
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(bounds.idle_max)
            .http1_max_buf_size(HEAD_BYTES_MAX)
            .build(connector);
        Self { client, bounds }
    }

    /// Posts a body and waits for the answer, whatever it is.
    /// Fails when there is none.
    pub(crate) async fn post(
        &self,
        target: &OutboundTarget,
        headers: HeaderMap,
        body: Bytes,
    ) -> Result<OutboundResponse, OutboundError> {
        let mut request = Request::post(target.uri.clone())
            .body(Full::new(body))
            .map_err(|error| OutboundError::Unreachable(error.to_string()))?;
        *request.headers_mut() = headers;
        if let Some(authorization) = &target.authorization {
            request.headers_mut().insert(AUTHORIZATION, authorization.clone());
        }
        let mut connection = capture_connection(&mut request);
        let exchange = self.exchange(request);
        tokio::pin!(exchange);
        // Getting a connection is bounded by the connector; the time to answer begins when there is one.
        tokio::select! {
            biased;
            answer = &mut exchange => return answer,
            _ = connection.wait_for_connection_metadata() => {}
        }
        let answer = tokio::time::timeout(self.bounds.read_timeout, exchange).await;
        answer.unwrap_or(Err(OutboundError::TimedOut))
    }

    async fn exchange(&self, request: Request<Full<Bytes>>) -> Result<OutboundResponse, OutboundError> {
        let response = self.client.request(request).await.map_err(|error| {
            if error.is_connect() { unreachable(&error) } else { OutboundError::Unreadable(causes(&error)) }
        })?;
        let status = response.status();
        let after = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok());
        let retry_after = after.and_then(|text| retry_after::parse(text, SystemTime::now()));
        let body = self.read(response).await?;
        Ok(OutboundResponse { status, retry_after, body })
    }

    async fn read(&self, response: Response<Incoming>) -> Result<Bytes, OutboundError> {
        if self.bounds.body_max == 0 {
            return Ok(Bytes::new());
        }
        if !response.status().is_success() {
            // Only for the sake of the connection: the status says it all.
            let rest = Limited::new(response.into_body(), DRAINED_BYTES_MAX).collect();
            let _ = tokio::time::timeout(self.bounds.read_timeout / 4, rest).await;
            return Ok(Bytes::new());
        }
        if response.body().size_hint().lower() > self.bounds.body_max as u64 {
            return Err(OutboundError::TooLarge);
        }
        let body = Limited::new(response.into_body(), self.bounds.body_max).collect().await;
        body.map(http_body_util::Collected::to_bytes).map_err(|error| {
            if error.is::<LengthLimitError>() {
                OutboundError::TooLarge
            } else {
                OutboundError::Unreadable(causes(error.as_ref()))
            }
        })
    }
}

fn unreachable(error: &(dyn StdError + 'static)) -> OutboundError {
    let system = chain(error).find_map(|cause| cause.downcast_ref::<std::io::Error>());
    match system {
        Some(error) if error.get_ref().is_some_and(|inner| inner.is::<ForbiddenAddress>()) => {
            OutboundError::ForbiddenAddress
        }
        Some(error) if error.kind() == std::io::ErrorKind::TimedOut => OutboundError::TimedOut,
        _ => OutboundError::Unreachable(causes(error)),
    }
}

fn chain<'a>(error: &'a (dyn StdError + 'static)) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |&cause| cause.source())
}

/// What went wrong, and why, and why that.
pub(crate) fn causes(error: &(dyn StdError + 'static)) -> String {
    chain(error).map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

#[cfg(test)]
mod tests;
