//! A small HTTP client for the server's own API: one connection for each call that is under way.

use anyhow::Context;
use bytes::Bytes;
use http::{Method, Request};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;

type Connections = hyper_util::client::legacy::Client<HttpConnector, Full<Bytes>>;

#[derive(Clone, Debug)]
pub(crate) struct Client {
    connections: Connections,
    base: String,
    admin_key: Option<String>,
}

impl Client {
    pub(crate) fn new(url: &str) -> anyhow::Result<Self> {
        let base = url.trim_end_matches('/').to_owned();
        let parsed: http::Uri = base.parse().with_context(|| format!("--url {url} is not a URL"))?;
        anyhow::ensure!(
            parsed.scheme_str() == Some("http") && parsed.host().is_some(),
            "--url {url} must be http://host:port (put TLS in front of both ends if the network needs it)"
        );
        let connections = hyper_util::client::legacy::Client::builder(TokioExecutor::new()).build_http();
        Ok(Self { connections, base, admin_key: None })
    }

    /// The same with the operator's key.
    pub(crate) fn with_admin_key(self, key: String) -> Self {
        Self { admin_key: Some(key), ..self }
    }

    /// The status and the body of the answer.
    pub(crate) async fn post(
        &self,
        path: &str,
        content_type: &str,
        body: Bytes,
    ) -> anyhow::Result<(u16, Bytes)> {
        self.send(Method::POST, path, content_type, body).await
    }

    /// The same for any method, of a call without a body.
    pub(crate) async fn call(&self, method: Method, path: &str) -> anyhow::Result<(u16, Bytes)> {
        self.send(method, path, "application/json", Bytes::new()).await
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        content_type: &str,
        body: Bytes,
    ) -> anyhow::Result<(u16, Bytes)> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.base))
            .header(http::header::CONTENT_TYPE, content_type);
        if let Some(key) = &self.admin_key {
            request = request.header(weir_server::auth::admin::HEADER, key);
        }
        let request = request.body(Full::new(body))?;
        let response = self
            .connections
            .request(request)
            .await
            .with_context(|| format!("no server answers on {}", self.base))?;
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.context("the server broke off its answer")?;
        Ok((status, body.to_bytes()))
    }
}
