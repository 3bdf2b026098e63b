//! A small HTTP client for the server's own API, with one connection per concurrent call.

use std::collections::BTreeMap;

use anyhow::Context;
use bytes::Bytes;
use http::{Method, Request};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use weir_server::auth::secrets::ADMIN_KEY;
use weir_server::settings::Settings;
use weir_server::settings::source::Sources;

use crate::health::reachable;

type Connections = hyper_util::client::legacy::Client<HttpConnector, Full<Bytes>>;

#[derive(Clone, Debug)]
pub(crate) struct Client {
    connections: Connections,
    base: String,
    admin_key: Option<String>,
    /// The user id of a simulated buyer.
    buyer: Option<String>,
}

impl Client {
    /// Creates a client for the server at `url`, or for the one in the settings.
    pub(crate) fn new(url: Option<&str>) -> anyhow::Result<Self> {
        let url = match url {
            Some(url) => url.to_owned(),
            None => {
                let settings = Settings::read(Sources::from_process(BTreeMap::new())?)?;
                format!("http://{}", reachable(settings.process.listen))
            }
        };
        let base = url.trim_end_matches('/').to_owned();
        let parsed: http::Uri = base.parse().with_context(|| format!("--url {url} is not a URL"))?;
        anyhow::ensure!(
            parsed.scheme_str() == Some("http") && parsed.host().is_some(),
            "--url {url} must be http://host:port (put TLS in front of both ends if the network needs it)"
        );
        let connections = hyper_util::client::legacy::Client::builder(TokioExecutor::new()).build_http();
        Ok(Self { connections, base, admin_key: None, buyer: None })
    }

    /// Creates a client with the admin key from the settings or from the data directory.
    pub(crate) fn for_operator(url: Option<&str>, data: Option<&str>) -> anyhow::Result<Self> {
        let flags: BTreeMap<_, _> = data.map(|data| ("data", data.to_owned())).into_iter().collect();
        let settings = Settings::read(Sources::from_process(flags)?)?;
        let key = match settings.auth.admin_key {
            Some(key) => key,
            None => {
                let path = settings.process.data.join(ADMIN_KEY.file);
                std::fs::read_to_string(&path).with_context(|| {
                    let path = path.display();
                    format!(
                        "cannot read {path}: pass the server's data directory with --data, or set WEIR_ADMIN_KEY"
                    )
                })?
            }
        };
        Ok(Self { admin_key: Some(key.trim().to_owned()), ..Self::new(url)? })
    }

    pub(crate) fn base(&self) -> &str {
        &self.base
    }

    /// Returns a client for a buyer, without the admin key.
    pub(crate) fn as_buyer(&self, name: String) -> Self {
        Self { admin_key: None, buyer: Some(name), ..self.clone() }
    }

    pub(crate) async fn post(
        &self,
        path: &str,
        content_type: &str,
        body: Bytes,
    ) -> anyhow::Result<(u16, Bytes)> {
        self.send(Method::POST, path, content_type, body).await
    }

    /// Calls without a body.
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
            request = request.header(weir_server::auth::credentials::ADMIN_KEY_HEADER, key);
        }
        if let Some(buyer) = &self.buyer {
            request = request.header("x-user-id", buyer);
        }
        let request = request.body(Full::new(body))?;
        let response = self
            .connections
            .request(request)
            .await
            .with_context(|| format!("cannot reach a server at {}", self.base))?;
        let status = response.status().as_u16();
        let body = response
            .into_body()
            .collect()
            .await
            .context("the server closed the connection before the end of the response")?;
        Ok((status, body.to_bytes()))
    }
}
