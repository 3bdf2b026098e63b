//! Outgoing connections. A host name is resolved once, its addresses are checked, and one of these addresses is connected to.
//! There is no second resolution in between, which could return other addresses.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use http::Uri;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::TokioIo;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::address::is_public;

/// The addresses that a client may connect to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// All addresses: the operator has configured the target.
    Anywhere,
    /// Public addresses only: a caller has supplied the target.
    Public,
}

/// Whose certificate a server may present.
#[derive(Clone, Debug, Default)]
pub enum Trust {
    /// One from an authority that the system trusts.
    #[default]
    System,
    /// One from an authority in this file.
    Authorities(PathBuf),
    /// The first one in this file, whatever name it is for.
    Certificate(PathBuf),
    /// Any. Only for calls that carry and change nothing.
    Anyone,
}

impl Reach {
    #[must_use]
    pub(crate) fn allows(self, address: std::net::IpAddr) -> bool {
        self == Self::Anywhere || is_public(address)
    }
}

/// A host resolves only to addresses that may not be called.
#[derive(Debug, thiserror::Error)]
#[error("the address is private or reserved")]
pub(super) struct ForbiddenAddress;

#[derive(Clone, Debug)]
pub struct Connector {
    reach: Reach,
    timeout: Duration,
    trust: Trust,
    /// The files of the certificate to present, and of its key.
    identity: Option<(PathBuf, PathBuf)>,
    tls: Arc<OnceLock<Arc<ClientConfig>>>,
}

impl Connector {
    /// `timeout` bounds name resolution, connecting and the handshake together.
    #[must_use]
    pub fn new(reach: Reach, timeout: Duration) -> Self {
        Self { reach, timeout, trust: Trust::System, identity: None, tls: Arc::default() }
    }

    #[must_use]
    pub fn trusting(self, trust: Trust) -> Self {
        Self { trust, ..self }
    }

    /// Presents the certificate in the first file, with the key in the second, to servers that ask for one.
    #[must_use]
    pub fn presenting(self, identity: Option<(PathBuf, PathBuf)>) -> Self {
        Self { identity, ..self }
    }

    pub(crate) async fn connect(self, uri: Uri) -> io::Result<TokioIo<OutboundStream>> {
        let give_up_at = Instant::now() + self.timeout;
        let opened = tokio::time::timeout(self.timeout, self.open(&uri, give_up_at)).await;
        opened.unwrap_or_else(|_elapsed| Err(io::ErrorKind::TimedOut.into())).map(TokioIo::new)
    }

    async fn open(&self, uri: &Uri, give_up_at: Instant) -> io::Result<OutboundStream> {
        let is_tls = uri.scheme_str() == Some("https");
        let host = uri.host().ok_or(io::ErrorKind::InvalidInput)?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let port = uri.port_u16().unwrap_or(if is_tls { 443 } else { 80 });
        let addresses: Vec<SocketAddr> = tokio::net::lookup_host((host, port)).await?.collect();
        let allowed: Vec<SocketAddr> =
            addresses.iter().copied().filter(|address| self.reach.allows(address.ip())).collect();
        if allowed.is_empty() && !addresses.is_empty() {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, ForbiddenAddress));
        }
        let stream = connect_first(&allowed, give_up_at).await?;
        stream.set_nodelay(true)?;
        if !is_tls {
            return Ok(OutboundStream::Plain(stream));
        }
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        let stream = TlsConnector::from(self.tls()?).connect(name, stream).await?;
        Ok(OutboundStream::Tls(Box::new(stream)))
    }

    /// Returns the TLS configuration, which the first call creates.
    fn tls(&self) -> io::Result<Arc<ClientConfig>> {
        if let Some(config) = self.tls.get() {
            return Ok(Arc::clone(config));
        }
        let config = Arc::new(client_config(&self.trust, self.identity.as_ref())?);
        Ok(Arc::clone(self.tls.get_or_init(|| config)))
    }
}

/// TLS 1.2 or 1.3.
fn client_config(trust: &Trust, identity: Option<&(PathBuf, PathBuf)>) -> io::Result<ClientConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let algorithms = provider.signature_verification_algorithms;
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?;
    let only = |certificate| Arc::new(OnlyCertificate { certificate, algorithms });
    let builder = match trust {
        Trust::System => builder.with_root_certificates(system_roots()?),
        Trust::Authorities(file) => builder.with_root_certificates(roots_of(file)?),
        Trust::Certificate(file) => {
            let certificate = CertificateDer::from_pem_file(file).map_err(|error| unusable(file, error))?;
            builder.dangerous().with_custom_certificate_verifier(only(Some(certificate)))
        }
        Trust::Anyone => builder.dangerous().with_custom_certificate_verifier(only(None)),
    };
    let Some((certificate, key)) = identity else { return Ok(builder.with_no_client_auth()) };
    let chain = CertificateDer::pem_file_iter(certificate).and_then(Iterator::collect);
    let chain = chain.map_err(|error| unusable(certificate, error))?;
    let private = PrivateKeyDer::from_pem_file(key).map_err(|error| unusable(key, error))?;
    builder.with_client_auth_cert(chain, private).map_err(|error| unusable(key, error))
}

fn unusable(file: &Path, error: impl std::fmt::Display) -> io::Error {
    io::Error::other(format!("{} cannot be used: {error}", file.display()))
}

/// Accepts one certificate for any name, or every certificate. The server must prove that it has the key.
#[derive(Debug)]
struct OnlyCertificate {
    certificate: Option<CertificateDer<'static>>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerCertVerifier for OnlyCertificate {
    fn verify_server_cert(
        &self,
        presented: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        match &self.certificate {
            Some(expected) if expected != presented => {
                Err(rustls::CertificateError::ApplicationVerificationFailure.into())
            }
            _ => Ok(ServerCertVerified::assertion()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signature, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

fn roots_of(file: &Path) -> io::Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(file).map_err(io::Error::other)? {
        roots.add(certificate.map_err(io::Error::other)?).map_err(io::Error::other)?;
    }
    Ok(roots)
}

/// Loads the authorities of the system, or of `SSL_CERT_FILE` and `SSL_CERT_DIR`.
fn system_roots() -> io::Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    let loaded = rustls_native_certs::load_native_certs();
    for error in &loaded.errors {
        tracing::warn!(%error, "cannot read some of the system's certificate authorities");
    }
    roots.add_parsable_certificates(loaded.certs);
    if roots.is_empty() {
        let problem =
            "the system has no trusted certificate authorities; name a file of them in SSL_CERT_FILE";
        return Err(io::Error::other(problem));
    }
    Ok(roots)
}

/// Tries one address after the other, each with an equal share of the time left.
async fn connect_first(addresses: &[SocketAddr], give_up_at: Instant) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for (index, address) in addresses.iter().enumerate() {
        let untried = u32::try_from(addresses.len() - index).unwrap_or(u32::MAX);
        let share = give_up_at.saturating_duration_since(Instant::now()) / untried;
        match tokio::time::timeout(share, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => last = error,
            Err(_elapsed) => last = io::ErrorKind::TimedOut.into(),
        }
    }
    Err(last)
}

impl tower::Service<Uri> for Connector {
    type Response = TokioIo<OutboundStream>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<TokioIo<OutboundStream>>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        Box::pin(self.clone().connect(uri))
    }
}

/// A connection, encrypted or not.
#[derive(Debug)]
pub enum OutboundStream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl OutboundStream {
    fn transport(&self) -> &TcpStream {
        match self {
            Self::Plain(stream) => stream,
            Self::Tls(stream) => stream.get_ref().0,
        }
    }

    /// Whether there is nothing to read, not even the end of the connection. This asks the operating system, because the
    /// runtime learns of new bytes only when it next polls all its connections.
    pub(crate) fn is_quiet(&self) -> bool {
        loop {
            match recv(self.transport(), &mut [0_u8; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
                Err(Errno::INTR) => {}
                peeked => return matches!(peeked, Err(Errno::AGAIN)),
            }
        }
    }

    /// Whether the connection is not encrypted.
    pub(crate) const fn is_plain(&self) -> bool {
        matches!(self, Self::Plain(_))
    }
}

impl Connection for OutboundStream {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl AsyncRead for OutboundStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(context, buffer),
            Self::Tls(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for OutboundStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Tls(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(context),
            Self::Tls(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}
