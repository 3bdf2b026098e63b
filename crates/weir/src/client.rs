//! A small HTTP client for the server's own API, with one connection per concurrent call.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use bytes::Bytes;
use clap::Args;
use http::{Method, Request};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioExecutor;
use weir_server::auth::secrets::ADMIN_KEY;
use weir_server::outbound::{Connector, Reach, Trust};
use weir_server::settings::Settings;
use weir_server::settings::source::Sources;

use crate::health::reachable;

/// How long connecting may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

type Connections = hyper_util::client::legacy::Client<Connector, Full<Bytes>>;

/// The options of a call to a server with TLS.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct TlsArgs {
    /// With an https:// server: the authorities that its certificate must come from [default: those of the system]
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// With a server that requires certificates: the one to present
    #[arg(long, value_name = "FILE", requires = "key")]
    cert: Option<PathBuf>,
    /// Its private key
    #[arg(long, value_name = "FILE", requires = "cert")]
    key: Option<PathBuf>,
}

impl TlsArgs {
    fn identity(&self) -> Option<(PathBuf, PathBuf)> {
        Some((self.cert.clone()?, self.key.clone()?))
    }
}

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
    pub(crate) fn new(url: Option<&str>, tls: &TlsArgs) -> anyhow::Result<Self> {
        let Some(url) = url else {
            let settings = Settings::read(Sources::from_process(BTreeMap::new())?)?;
            // The server's file is here as well, so its certificate need not name the address that is called.
            let trust =
                settings.tls.as_ref().map_or(Trust::System, |tls| Trust::Certificate(tls.cert.clone()));
            return Ok(Self::for_settings(&settings, tls, trust));
        };
        let base = url.trim_end_matches('/');
        let parsed: http::Uri = base.parse().with_context(|| format!("--url {url} is not a URL"))?;
        anyhow::ensure!(
            matches!(parsed.scheme_str(), Some("http" | "https")) && parsed.host().is_some(),
            "--url {url} must be http://host:port or https://host:port"
        );
        Ok(Self::connecting_to(base.to_owned(), tls, Trust::System, tls.identity()))
    }

    /// Creates a client for the server that has these settings. `trust` applies unless the caller names authorities.
    pub(crate) fn for_settings(settings: &Settings, tls: &TlsArgs, trust: Trust) -> Self {
        let scheme = if settings.tls.is_some() { "https" } else { "http" };
        let base = format!("{scheme}://{}", reachable(settings.process.listen));
        // The server's own certificate often comes from the authority that it requires of callers.
        let own = settings.tls.as_ref().filter(|tls| tls.client_ca.is_some());
        let own = own.map(|tls| (tls.cert.clone(), tls.key.clone()));
        Self::connecting_to(base, tls, trust, tls.identity().or(own))
    }

    fn connecting_to(
        base: String,
        tls: &TlsArgs,
        trust: Trust,
        identity: Option<(PathBuf, PathBuf)>,
    ) -> Self {
        let trust = tls.ca.clone().map_or(trust, Trust::Authorities);
        let connector = Connector::new(Reach::Anywhere, CONNECT_TIMEOUT).trusting(trust).presenting(identity);
        let connections = hyper_util::client::legacy::Client::builder(TokioExecutor::new()).build(connector);
        Self { connections, base, admin_key: None, buyer: None }
    }

    /// Creates a client with the admin key from the settings or from the data directory.
    pub(crate) fn for_operator(url: Option<&str>, data: Option<&str>, tls: &TlsArgs) -> anyhow::Result<Self> {
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
        Ok(Self { admin_key: Some(key.trim().to_owned()), ..Self::new(url, tls)? })
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
