//! A small JSON client, and raw bytes for requests that no client would send.
//!
//! Every response is `Ok`, whatever its status. Only a request without a response is an error.

use std::net::SocketAddr;
use std::sync::OnceLock;
use std::time::Duration;

use ::http::header::CONTENT_TYPE;
use ::http::{HeaderMap, HeaderName, HeaderValue, Method, Request};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Far longer than every timeout of the product: a request that takes this long hangs.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(120);
const RAW_RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a request got no response.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot connect, or the connection broke before the response began")]
    Transport(#[from] legacy::Error),
    #[error("the connection broke within the response")]
    Body(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("no response within {RESPONSE_TIMEOUT:?}")]
    TimedOut,
}

/// Checks the response to a request with this method and path, and panics if it is wrong.
pub type ResponseCheck = fn(&Method, &str, &Response);

static CHECK: OnceLock<ResponseCheck> = OnceLock::new();

/// Checks every response that a client of this process gets from now on. Only the first call has an effect.
pub fn check_every_response(check: ResponseCheck) {
    let _ = CHECK.set(check);
}

/// Sends requests to one server; clones share its connections.
#[derive(Debug, Clone)]
pub struct Client {
    base_url: String,
    headers: HeaderMap,
    is_checked: bool,
    connections: legacy::Client<HttpConnector, Full<Bytes>>,
}

impl Client {
    /// Paths are appended to `base_url`, such as `http://127.0.0.1:8080`.
    pub fn new(base_url: impl Into<String>) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let connections = legacy::Client::builder(TokioExecutor::new()).build(connector);
        let base_url = base_url.into().trim_end_matches('/').to_owned();
        Self { base_url, headers: HeaderMap::new(), is_checked: true, connections }
    }

    /// Sends this header, such as credentials, with every request.
    #[must_use]
    pub fn with_header(mut self, name: &str, value: &str) -> Self {
        insert(&mut self.headers, name, value);
        self
    }

    /// Turns off the check of responses, for servers other than Weir.
    #[must_use]
    pub fn unchecked(mut self) -> Self {
        self.is_checked = false;
        self
    }

    pub async fn get(&self, path: &str) -> Result<Response, Error> {
        self.request(Method::GET, path, &[], Bytes::new()).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Result<Response, Error> {
        self.send_json(Method::POST, path, body).await
    }

    pub async fn put(&self, path: &str, body: &Value) -> Result<Response, Error> {
        self.send_json(Method::PUT, path, body).await
    }

    pub async fn delete(&self, path: &str) -> Result<Response, Error> {
        self.request(Method::DELETE, path, &[], Bytes::new()).await
    }

    async fn send_json(&self, method: Method, path: &str, body: &Value) -> Result<Response, Error> {
        let headers = [(CONTENT_TYPE.as_str(), "application/json")];
        self.request(method, path, &headers, body.to_string()).await
    }

    /// Sends any request. `headers` replace those of [`with_header`](Self::with_header).
    pub async fn request(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Result<Response, Error> {
        let url = format!("{}{path}", self.base_url);
        let request = Request::builder().method(method.clone()).uri(&url).body(Full::new(body.into()));
        let mut request =
            request.unwrap_or_else(|error| panic!("{url} is not a valid URL ({error}): use http::raw"));
        *request.headers_mut() = self.headers.clone();
        for (name, value) in headers {
            insert(request.headers_mut(), name, value);
        }
        let answer = tokio::time::timeout(RESPONSE_TIMEOUT, self.exchange(request)).await;
        let response = answer.unwrap_or(Err(Error::TimedOut))?;
        if let Some(check) = CHECK.get().filter(|_| self.is_checked) {
            check(&method, path, &response);
        }
        Ok(response)
    }

    async fn exchange(&self, request: Request<Full<Bytes>>) -> Result<Response, Error> {
        let (parts, body) = self.connections.request(request).await?.into_parts();
        let body = body.collect().await.map_err(|error| Error::Body(error.into()))?.to_bytes();
        Ok(Response { status: parts.status.as_u16(), headers: parts.headers, body })
    }
}

fn insert(headers: &mut HeaderMap, name: &str, value: &str) {
    let name =
        HeaderName::try_from(name).unwrap_or_else(|error| panic!("header {name:?}: {error}: use http::raw"));
    let value =
        HeaderValue::try_from(value).unwrap_or_else(|error| panic!("header {name}: {error}: use http::raw"));
    headers.insert(name, value);
}

#[derive(Debug, Clone)]
pub struct Response {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Response {
    /// The body as JSON; panics with the body if it is not JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| {
            panic!("status {} without JSON ({error}): {:?}", self.status, String::from_utf8_lossy(&self.body))
        })
    }

    /// The first value of a header, if it is text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }
}

/// Writes `bytes` unchanged and returns everything that the server sends until it closes or resets the connection or is
/// silent for five seconds. `Connection: close` in a well-formed request avoids that wait.
pub async fn raw(addr: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let stream = TcpStream::connect(addr).await;
    let mut stream = stream.unwrap_or_else(|error| panic!("nothing listens on {addr}: {error}"));
    // A server may respond and close before it has read everything; its response counts, not this error.
    let _ = stream.write_all(bytes).await;
    let mut answer = Vec::new();
    while let Ok(Ok(1..)) = tokio::time::timeout(RAW_RESPONSE_TIMEOUT, stream.read_buf(&mut answer)).await {}
    answer
}

#[cfg(test)]
mod tests;
