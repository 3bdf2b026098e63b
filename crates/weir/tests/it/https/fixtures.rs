//! A server with TLS, its files, and callers that choose version, protocol and certificate.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, SupportedProtocolVersion};
use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use weir_testkit::certificates::{Authority, Certificate};
use weir_testkit::process::{Builder, Weir};

use crate::fixtures::{TEST_TIMEOUT, weir_with_long_timeouts};

pub(super) const HTTP_2: &str = "h2";
pub(super) const HTTP_1: &str = "http/1.1";

/// The files of a server's certificate, key and clients' authorities.
pub(super) struct Files {
    directory: TempDir,
    pub(super) authority: Authority,
}

impl Files {
    pub(super) fn new() -> Self {
        let files = Self { directory: tempfile::tempdir().unwrap(), authority: Authority::generate() };
        files.write(&files.authority.issue(&["localhost"]));
        files
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(super) fn write(&self, certificate: &Certificate) {
        std::fs::write(self.path("cert.pem"), &certificate.certificate).unwrap();
        std::fs::write(self.path("key.pem"), &certificate.key).unwrap();
    }

    /// A server with the certificate.
    pub(super) fn server(&self) -> Builder {
        weir_with_long_timeouts()
            .env("WEIR_TLS_CERT", self.path("cert.pem"))
            .env("WEIR_TLS_KEY", self.path("key.pem"))
    }

    pub(super) fn caller(&self) -> Caller {
        Caller::trusting(&self.authority)
    }
}

/// How a caller connects.
#[derive(Clone)]
pub(super) struct Caller {
    authority: String,
    versions: &'static [&'static SupportedProtocolVersion],
    protocols: &'static [&'static str],
    identity: Option<Certificate>,
    /// The bytes of a response that may be sent before they are read, on HTTP/2.
    window: Option<u32>,
}

impl Caller {
    pub(super) fn trusting(authority: &Authority) -> Self {
        let authority = authority.pem();
        Self { authority, versions: rustls::ALL_VERSIONS, protocols: &[], identity: None, window: None }
    }

    pub(super) fn with_versions(self, versions: &'static [&'static SupportedProtocolVersion]) -> Self {
        Self { versions, ..self }
    }

    /// The protocols that the caller offers, by preference.
    pub(super) fn offering(self, protocols: &'static [&'static str]) -> Self {
        Self { protocols, ..self }
    }

    /// How many bytes of each response may be sent before they are read.
    pub(super) fn with_window(self, bytes: u32) -> Self {
        Self { window: Some(bytes), ..self }
    }

    pub(super) fn presenting(self, identity: Certificate) -> Self {
        Self { identity: Some(identity), ..self }
    }

    fn config(&self) -> ClientConfig {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.authority.as_bytes()).unwrap()).unwrap();
        let builder = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_protocol_versions(self.versions)
            .unwrap()
            .with_root_certificates(roots);
        let mut config = match &self.identity {
            None => builder.with_no_client_auth(),
            Some(Certificate { certificate, key }) => {
                let chain = CertificateDer::pem_slice_iter(certificate.as_bytes()).collect::<Result<_, _>>();
                let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
                builder.with_client_auth_cert(chain.unwrap(), key).unwrap()
            }
        };
        config.alpn_protocols = self.protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
        config
    }

    pub(super) async fn connect(&self, address: SocketAddr) -> std::io::Result<TlsStream<TcpStream>> {
        let stream = TcpStream::connect(address).await?;
        let name = ServerName::try_from("localhost").unwrap();
        let connecting = TlsConnector::from(Arc::new(self.config())).connect(name, stream);
        tokio::time::timeout(TEST_TIMEOUT, connecting).await.expect("the handshake ends")
    }

    /// Connects and begins to speak the protocol that the server has chosen.
    pub(super) async fn open(&self, address: SocketAddr) -> std::io::Result<Connection> {
        let stream = self.connect(address).await?;
        let chosen = stream.get_ref().1.alpn_protocol().map(<[u8]>::to_vec);
        let io = TokioIo::new(stream);
        if chosen.as_deref() == Some(HTTP_2.as_bytes()) {
            let mut builder = http2::Builder::new(TokioExecutor::new());
            builder.initial_stream_window_size(self.window);
            let (sender, connection) = builder.handshake(io).await.map_err(std::io::Error::other)?;
            tokio::spawn(connection);
            return Ok(Connection::Http2(sender));
        }
        let (sender, connection) = http1::handshake(io).await.map_err(std::io::Error::other)?;
        tokio::spawn(connection.with_upgrades());
        Ok(Connection::Http1(sender))
    }

    /// The status of one call on a connection of its own, or why there is none.
    pub(super) async fn get(&self, weir: &Weir, path: &str) -> Result<u16, String> {
        let mut connection = self.open(weir.addr()).await.map_err(|error| error.to_string())?;
        let response = connection.get(path).await.map_err(|error| format!("{error:?}"))?;
        Ok(response.status().as_u16())
    }
}

/// A connection on which requests can be sent.
pub(super) enum Connection {
    Http1(http1::SendRequest<Full<Bytes>>),
    Http2(http2::SendRequest<Full<Bytes>>),
}

impl Connection {
    pub(super) async fn send(
        &mut self,
        mut request: Request<Full<Bytes>>,
    ) -> hyper::Result<Response<Incoming>> {
        match self {
            Self::Http1(sender) => {
                request.headers_mut().insert("host", "localhost".parse().unwrap());
                sender.ready().await?;
                sender.send_request(request).await
            }
            Self::Http2(sender) => {
                let path = request.uri().path_and_query().unwrap().as_str();
                *request.uri_mut() = format!("https://localhost{path}").parse().unwrap();
                sender.ready().await?;
                sender.send_request(request).await
            }
        }
    }

    pub(super) async fn get(&mut self, path: &str) -> hyper::Result<Response<Incoming>> {
        self.send(Request::get(path).body(Full::default()).unwrap()).await
    }

    /// Another sender on the same connection, for HTTP/2.
    pub(super) fn share(&self) -> Self {
        match self {
            Self::Http1(_) => panic!("HTTP/1.1 has one request at a time"),
            Self::Http2(sender) => Self::Http2(sender.clone()),
        }
    }
}

/// Reads from a body until it contains this text.
pub(super) async fn read_until(body: &mut Incoming, text: &str) -> String {
    let mut read = String::new();
    while !read.contains(text) {
        let frame = tokio::time::timeout(TEST_TIMEOUT, body.frame()).await.expect("the text arrives");
        let data = frame.expect("the body goes on").expect("the connection lives").into_data();
        read.push_str(std::str::from_utf8(&data.unwrap_or_default()).unwrap());
    }
    read
}

/// Runs a subcommand of `weir` and returns its exit code, its output and its errors.
pub(super) async fn run_weir(
    arguments: &[&str],
    environment: &[(&'static str, &Path)],
) -> (Option<i32>, String, String) {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_weir"));
    let inherited = std::env::vars_os().map(|(name, _)| name);
    for name in inherited.filter(|name| name.as_encoded_bytes().starts_with(b"WEIR_")) {
        command.env_remove(name);
    }
    command.args(arguments).envs(environment.iter().map(|(name, value)| (name, value.as_os_str())));
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}
