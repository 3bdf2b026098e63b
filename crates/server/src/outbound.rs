//! HTTP calls that Weir makes: to downstreams and providers, which the operator configures, and to callback URLs, which callers
//! supply.
//!
//! A call is one GET or POST on HTTP/1.1. It is bounded in time and in the bytes that it reads. It follows no redirects and uses no
//! proxy, so it reaches exactly the given target. [`Reach::Public`] keeps calls to callers' URLs out of private networks.

pub(crate) mod address;
pub(crate) mod breaker;
pub(crate) mod connect;
use std::error::Error as StdError;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, RETRY_AFTER, USER_AGENT};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Body as _, Incoming};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::capture_connection;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use percent_encoding::percent_decode_str;
use url::Url;
use weir_core::request::retry::CallOutcome;
use weir_core::{Timestamp, webhook};

use self::connect::ForbiddenAddress;
pub use self::connect::{Connector, OutboundStream, Reach, Trust};

/// The most that is read of a body that is not used, so that its connection can be reused.
const DRAIN_BYTES_MAX: usize = 64 * 1024;
/// How long an idle connection is kept: shorter than most servers do.
const IDLE_TIMEOUT: Duration = Duration::from_secs(4);
/// The largest head of a response.
const HEAD_BYTES_MAX: usize = 64 * 1024;

/// The `User-Agent` of calls.
pub(crate) const AGENT: HeaderValue = HeaderValue::from_static("weir");

const WEBHOOK_ID: HeaderName = HeaderName::from_static("webhook-id");
const WEBHOOK_TIMESTAMP: HeaderName = HeaderName::from_static("webhook-timestamp");
const WEBHOOK_SIGNATURE: HeaderName = HeaderName::from_static("webhook-signature");

/// The headers of a webhook with a JSON body, signed at `now`, with room for those of a trace.
pub(crate) fn webhook_headers(id: &str, now: Timestamp, signature: &str) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(7);
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(USER_AGENT, AGENT);
    write_signature(&mut headers, id, now, signature);
    headers
}

/// Writes the headers of a signed message, as Standard Webhooks names them.
pub(crate) fn write_signature(headers: &mut HeaderMap, id: &str, now: Timestamp, signature: &str) {
    let timestamp = webhook::timestamp(now);
    for (header, value) in [(WEBHOOK_ID, id), (WEBHOOK_TIMESTAMP, &timestamp), (WEBHOOK_SIGNATURE, signature)]
    {
        // Digits, hyphens and base64 are always a header's value.
        if let Ok(value) = HeaderValue::try_from(value) {
            headers.insert(header, value);
        }
    }
}

/// The limits of a client's calls.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutboundLimits {
    /// The time to connect, including name resolution and TLS.
    pub connect_timeout: Duration,
    /// The time for the whole response, once connected.
    pub read_timeout: Duration,
    /// The largest body of a 2xx response. With 0, bodies are not read.
    pub body_max: usize,
    /// The most idle connections to one host.
    pub idle_max: usize,
}

#[derive(Clone, Debug)]
pub(crate) struct OutboundClient {
    client: Client<Connector, Full<Bytes>>,
    limits: OutboundLimits,
}

/// The URL of a call. User and password of the URL become its `Authorization`.
#[derive(Clone, Debug)]
pub(crate) struct OutboundTarget {
    uri: Uri,
    authorization: Option<HeaderValue>,
}

#[derive(Clone, Debug)]
pub(crate) struct OutboundResponse {
    pub status: StatusCode,
    pub retry_after: Option<Duration>,
    /// The body of a 2xx response; empty for any other.
    pub body: Bytes,
}

/// Why a call has no response.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum OutboundError {
    /// Connecting or the response took too long.
    #[error("there was no answer in time")]
    TimedOut,
    #[error("no connection: {0}")]
    Unreachable(String),
    /// The host resolves only to addresses that may not be called.
    #[error("the address is private or reserved")]
    ForbiddenAddress,
    /// The response is not HTTP, or was cut off.
    #[error("the answer could not be read: {0}")]
    Unreadable(String),
    /// The body of a 2xx response is larger than allowed.
    #[error("the answer is too long")]
    TooLarge,
}

impl OutboundError {
    /// What the failure says about the service that was called.
    pub(crate) const fn outcome(&self) -> CallOutcome {
        match self {
            Self::TimedOut => CallOutcome::TimedOut,
            Self::Unreachable(_) | Self::ForbiddenAddress => CallOutcome::Unreachable,
            Self::Unreadable(_) => CallOutcome::Unreadable,
            Self::TooLarge => CallOutcome::TooLarge,
        }
    }
}

impl OutboundTarget {
    /// Returns `None` if the URL cannot be called.
    #[must_use]
    pub(crate) fn new(url: &Url) -> Option<Self> {
        let is_http = matches!(url.scheme(), "http" | "https") && url.has_host();
        let mut bare = url.clone();
        bare.set_fragment(None);
        let authorization = credentials(url);
        // Both succeed for every URL that has a host.
        bare.set_username("").and_then(|()| bare.set_password(None)).ok().filter(|()| is_http)?;
        Some(Self { uri: bare.as_str().parse().ok()?, authorization })
    }

    /// The URL without user and password.
    #[must_use]
    pub(crate) const fn uri(&self) -> &Uri {
        &self.uri
    }

    #[must_use]
    pub(crate) const fn authorization(&self) -> Option<&HeaderValue> {
        self.authorization.as_ref()
    }
}

/// Returns user and password of a URL, percent-decoded, as a `Basic` authorization.
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
    #[must_use]
    pub(crate) fn new(reach: Reach, limits: OutboundLimits) -> Self {
        Self::trusting(None, reach, limits)
    }

    /// Creates a client that trusts the certificate authorities in a file instead of the system's, if a file is given.
    #[must_use]
    pub(crate) fn trusting(file: Option<PathBuf>, reach: Reach, limits: OutboundLimits) -> Self {
        let connector = Connector::new(reach, limits.connect_timeout)
            .trusting(file.map_or(Trust::System, Trust::Authorities));
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_TIMEOUT)
            .pool_max_idle_per_host(limits.idle_max)
            .http1_max_buf_size(HEAD_BYTES_MAX)
            .build(connector);
        Self { client, limits }
    }

    /// Posts a body and waits for the response, whatever its status.
    pub(crate) async fn post(
        &self,
        target: &OutboundTarget,
        headers: HeaderMap,
        body: Bytes,
    ) -> Result<OutboundResponse, OutboundError> {
        self.call(Method::POST, target, headers, body).await
    }

    /// Gets a resource, whatever the status of the response.
    pub(crate) async fn get(
        &self,
        target: &OutboundTarget,
        headers: HeaderMap,
    ) -> Result<OutboundResponse, OutboundError> {
        self.call(Method::GET, target, headers, Bytes::new()).await
    }

    async fn call(
        &self,
        method: Method,
        target: &OutboundTarget,
        headers: HeaderMap,
        body: Bytes,
    ) -> Result<OutboundResponse, OutboundError> {
        let mut request = Request::builder()
            .method(method)
            .uri(target.uri.clone())
            .body(Full::new(body))
            .map_err(|error| OutboundError::Unreachable(error.to_string()))?;
        *request.headers_mut() = headers;
        if let Some(authorization) = &target.authorization {
            request.headers_mut().insert(AUTHORIZATION, authorization.clone());
        }
        let mut connection = capture_connection(&mut request);
        let exchange = self.exchange(request);
        tokio::pin!(exchange);
        // The connector bounds the time to connect; the read timeout begins once there is a connection.
        tokio::select! {
            biased;
            response = &mut exchange => return response,
            _ = connection.wait_for_connection_metadata() => {}
        }
        let response = tokio::time::timeout(self.limits.read_timeout, exchange).await;
        response.unwrap_or(Err(OutboundError::TimedOut))
    }

    async fn exchange(&self, request: Request<Full<Bytes>>) -> Result<OutboundResponse, OutboundError> {
        let response = self.client.request(request).await.map_err(|error| {
            if error.is_connect() { unreachable(&error) } else { OutboundError::Unreadable(causes(&error)) }
        })?;
        let status = response.status();
        let after = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok());
        let retry_after = after.and_then(|text| parse_retry_after(text, SystemTime::now()));
        let body = self.read(response).await?;
        Ok(OutboundResponse { status, retry_after, body })
    }

    async fn read(&self, response: Response<Incoming>) -> Result<Bytes, OutboundError> {
        if self.limits.body_max == 0 {
            return Ok(Bytes::new());
        }
        if !response.status().is_success() {
            // The body is drained only to reuse the connection.
            let rest = Limited::new(response.into_body(), DRAIN_BYTES_MAX).collect();
            let _ = tokio::time::timeout(self.limits.read_timeout / 4, rest).await;
            return Ok(Bytes::new());
        }
        if response.body().size_hint().lower() > self.limits.body_max as u64 {
            return Err(OutboundError::TooLarge);
        }
        let body = Limited::new(response.into_body(), self.limits.body_max).collect().await;
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

/// Formats an error with its chain of causes.
pub(crate) fn causes(error: &(dyn StdError + 'static)) -> String {
    chain(error).map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// Parses `Retry-After`: a number of seconds, or a date. A date in the past is no wait.
fn parse_retry_after(text: &str, now: SystemTime) -> Option<Duration> {
    let text = text.trim();
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        // A number that overflows becomes the largest wait.
        return Some(Duration::from_secs(text.parse().unwrap_or(u64::MAX)));
    }
    let date = httpdate::parse_http_date(text).ok()?;
    Some(date.duration_since(now).unwrap_or_default())
}

#[cfg(test)]
mod tests;
