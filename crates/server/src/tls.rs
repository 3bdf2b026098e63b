//! TLS on the listeners: loads certificate, key and authorities, and loads them again when a file changes. New connections
//! get the new certificate; open ones go on with theirs. Files that cannot be used change nothing.
//!
//! Files are looked at by their content every few seconds: names of mounted secrets often stay, and what they lead to changes.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;
use ring::digest::{SHA256, digest};
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::{Error as PemError, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{Error as TlsError, RootCertStore, ServerConfig};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;

use crate::settings::source::SettingError;
use crate::settings::tls::{CERT, CLIENT_CA, KEY, TlsSettings};

/// The pause between two looks at the files. A change holds within 10 s.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// The largest file. Those of whole systems' authorities have 200 kB.
const FILE_BYTES_MAX: u64 = 1 << 20;
const HTTP_2: &[u8] = b"h2";
const HTTP_1: &[u8] = b"http/1.1";

/// The protocols that a connection may choose from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocols {
    /// HTTP/2, or HTTP/1.1 for callers that prefer it or offer nothing.
    Http,
    /// HTTP/1.1 alone.
    Http1,
    /// HTTP/2 alone.
    Grpc,
}

/// What the listeners present and require. Clones share it, so a change holds for all.
#[derive(Clone)]
pub struct Tls {
    settings: Arc<TlsSettings>,
    current: Arc<RwLock<Configs>>,
}

#[derive(Clone)]
struct Configs {
    files: FilesDigest,
    http: Arc<ServerConfig>,
    http1: Arc<ServerConfig>,
    grpc: Arc<ServerConfig>,
}

/// A digest of the files' contents. The key itself stays in memory only where it is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FilesDigest([u8; 32]);

/// The files' contents.
struct Files {
    cert: Vec<u8>,
    key: Vec<u8>,
    client_ca: Option<Vec<u8>>,
}

impl Tls {
    /// Loads the files.
    /// Fails with the setting and the file that cannot be used.
    pub(crate) fn load(settings: TlsSettings) -> Result<Self, SettingError> {
        let configs = Files::read(&settings)?.configs(&settings)?;
        Ok(Self { settings: Arc::new(settings), current: Arc::new(RwLock::new(configs)) })
    }

    /// Returns what a new connection is accepted with.
    pub(crate) fn acceptor(&self, protocols: Protocols) -> TlsAcceptor {
        let configs = self.current.read();
        let config = match protocols {
            Protocols::Http => &configs.http,
            Protocols::Http1 => &configs.http1,
            Protocols::Grpc => &configs.grpc,
        };
        TlsAcceptor::from(Arc::clone(config))
    }

    /// Loads the files again whenever they have changed, until the server stops.
    pub(crate) async fn follow_files(self, closing: CancellationToken) {
        let mut refused = Refused::default();
        while closing.run_until_cancelled(tokio::time::sleep(POLL_INTERVAL)).await.is_some() {
            let tls = self.clone();
            // Reading may block, for example on a file system that does not answer.
            let reload = tokio::task::spawn_blocking(move || tls.reload());
            match closing.run_until_cancelled(reload).await {
                Some(Ok(reloaded)) => refused.log(reloaded),
                Some(Err(panic)) => {
                    tracing::error!(error = %panic, "cannot look for new TLS certificates; trying again");
                }
                None => {}
            }
        }
    }

    /// Loads the files if their contents have changed. Returns whether they have.
    fn reload(&self) -> Result<bool, SettingError> {
        let files = Files::read(&self.settings)?;
        if files.digest() == self.current.read().files {
            return Ok(false);
        }
        let configs = files.configs(&self.settings)?;
        *self.current.write() = configs;
        Ok(true)
    }
}

/// What was wrong with the files at the last look.
#[derive(Debug, Default)]
struct Refused {
    problem: Option<String>,
    is_logged: bool,
}

impl Refused {
    /// Logs new certificates, and files that cannot be used: once, and only if they are still the same at the next look,
    /// because certificate and key are often written one after the other.
    fn log(&mut self, reloaded: Result<bool, SettingError>) {
        let problem = match reloaded {
            Ok(has_changed) => {
                if has_changed {
                    tracing::info!("the TLS files have changed; new connections get the new certificate");
                }
                *self = Self::default();
                return;
            }
            Err(problem) => problem.to_string(),
        };
        if self.problem.as_ref() != Some(&problem) {
            *self = Self { problem: Some(problem), is_logged: false };
        } else if !self.is_logged {
            self.is_logged = true;
            tracing::error!(
                "the changed TLS files are not used, connections get the old certificate: {problem}"
            );
        }
    }
}

impl Files {
    fn read(settings: &TlsSettings) -> Result<Self, SettingError> {
        Ok(Self {
            cert: read_file(CERT, &settings.cert)?,
            key: read_file(KEY, &settings.key)?,
            client_ca: settings.client_ca.as_deref().map(|path| read_file(CLIENT_CA, path)).transpose()?,
        })
    }

    fn digest(&self) -> FilesDigest {
        let of = |bytes: &[u8]| digest(&SHA256, bytes).as_ref().to_vec();
        let all = [Some(&self.cert), Some(&self.key), self.client_ca.as_ref()];
        let all: Vec<u8> = all.into_iter().flatten().flat_map(|file| of(file)).collect();
        let mut bytes = [0; 32];
        bytes.copy_from_slice(digest(&SHA256, &all).as_ref());
        FilesDigest(bytes)
    }

    fn configs(&self, settings: &TlsSettings) -> Result<Configs, SettingError> {
        let chain = certificates(CERT, &settings.cert, &self.cert)?;
        let key = PrivateKeyDer::from_pem_slice(&self.key).map_err(|error| match error {
            PemError::NoItemsFound => {
                unusable(KEY, &settings.key, "it has no unencrypted private key in PEM")
            }
            error => unusable(KEY, &settings.key, error),
        })?;
        let versions = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| unusable(CERT, &settings.cert, error))?;
        let builder = match (&settings.client_ca, &self.client_ca) {
            (Some(path), Some(pem)) => versions.with_client_cert_verifier(client_verifier(path, pem)?),
            _ => versions.with_no_client_auth(),
        };
        let config = builder.with_single_cert(chain, key).map_err(|error| match error {
            TlsError::InconsistentKeys(_) => {
                let reason = format!("it is not the key of the certificate in {}", settings.cert.display());
                unusable(KEY, &settings.key, reason)
            }
            TlsError::InvalidCertificate(_) => unusable(CERT, &settings.cert, error),
            error => unusable(KEY, &settings.key, error),
        })?;
        let with = |protocols: &[&[u8]]| {
            let mut config = config.clone();
            config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
            Arc::new(config)
        };
        Ok(Configs {
            files: self.digest(),
            http: with(&[HTTP_2, HTTP_1]),
            http1: with(&[HTTP_1]),
            grpc: with(&[HTTP_2]),
        })
    }
}

/// Reads a file that is not too large to be one of certificates.
fn read_file(setting: &str, path: &Path) -> Result<Vec<u8>, SettingError> {
    let refused = |error: std::io::Error| unusable(setting, path, error);
    // Opening a pipe would wait for its writer.
    if !std::fs::metadata(path).map_err(refused)?.is_file() {
        return Err(unusable(setting, path, "it is not a file"));
    }
    let mut bytes = Vec::new();
    File::open(path).map_err(refused)?.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(refused)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(unusable(setting, path, "it is larger than 1 MiB"));
    }
    Ok(bytes)
}

fn certificates(
    setting: &str,
    path: &Path,
    pem: &[u8],
) -> Result<Vec<CertificateDer<'static>>, SettingError> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match all {
        Ok(all) if all.is_empty() => Err(unusable(setting, path, "it has no certificate in PEM")),
        all => all.map_err(|error| unusable(setting, path, error)),
    }
}

/// Requires a certificate that an authority in `pem` has signed.
fn client_verifier(path: &Path, pem: &[u8]) -> Result<Arc<dyn ClientCertVerifier>, SettingError> {
    let mut roots = RootCertStore::empty();
    for authority in certificates(CLIENT_CA, path, pem)? {
        roots.add(authority).map_err(|error| unusable(CLIENT_CA, path, error))?;
    }
    let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::new(default_provider()));
    builder.build().map_err(|error| unusable(CLIENT_CA, path, error))
}

fn unusable(setting: &str, path: &Path, reason: impl std::fmt::Display) -> SettingError {
    SettingError::unusable(setting, path.display(), reason)
}

/// Whether a handshake has agreed on HTTP/2.
pub(crate) fn is_http2<S: AsyncRead + AsyncWrite>(stream: &TlsStream<S>) -> bool {
    stream.get_ref().1.alpn_protocol() == Some(HTTP_2)
}
