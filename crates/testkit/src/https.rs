//! An HTTPS server whose certificate only its own authority vouches for: what clients make of TLS.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

use crate::certificates::Certificates;

/// The server. It ends with this value.
#[derive(Debug)]
pub struct HttpsServer {
    addr: SocketAddr,
    directory: TempDir,
    calls: Arc<AtomicUsize>,
    task: JoinHandle<()>,
}

impl HttpsServer {
    /// Answers every request with 200 and this JSON.
    pub async fn answering(body: &'static str) -> Self {
        let certificates = Certificates::generate();
        let directory = tempfile::tempdir().expect("a directory");
        std::fs::write(directory.path().join("ca.pem"), &certificates.authority).expect("it can be written");
        let acceptor = TlsAcceptor::from(Arc::new(config(&certificates)));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let addr = listener.local_addr().expect("an address");
        let calls = Arc::new(AtomicUsize::new(0));
        let task = tokio::spawn({
            let calls = Arc::clone(&calls);
            async move {
                while let Ok((stream, _)) = listener.accept().await {
                    // A client that does not trust the certificate breaks the connection off.
                    tokio::spawn(answer(acceptor.clone(), stream, body, Arc::clone(&calls)));
                }
            }
        });
        Self { addr, directory, calls, task }
    }

    /// By the name that is in its certificate.
    pub fn url(&self) -> String {
        format!("https://localhost:{}/", self.addr.port())
    }

    /// By its address, which is not.
    pub fn url_by_address(&self) -> String {
        format!("https://{}/", self.addr)
    }

    /// The certificate of its authority.
    pub fn ca_file(&self) -> PathBuf {
        Path::join(self.directory.path(), "ca.pem")
    }

    /// How many requests it has read.
    pub fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }
}

impl Drop for HttpsServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn config(certificates: &Certificates) -> ServerConfig {
    let chain = vec![CertificateDer::from_pem_slice(certificates.server.as_bytes()).expect("PEM")];
    let key = PrivateKeyDer::from_pem_slice(certificates.server_key.as_bytes()).expect("PEM");
    ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("ring supports the default protocol versions")
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .expect("the key belongs to the certificate")
}

async fn answer(
    acceptor: TlsAcceptor,
    stream: TcpStream,
    body: &str,
    calls: Arc<AtomicUsize>,
) -> io::Result<()> {
    let mut stream = BufReader::new(acceptor.accept(stream).await?);
    loop {
        let mut length = 0;
        loop {
            let mut line = String::new();
            if stream.read_line(&mut line).await? == 0 {
                return Ok(());
            }
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().map_err(io::Error::other)?;
            }
            if line == "\r\n" {
                break;
            }
        }
        stream.read_exact(&mut vec![0; length]).await?;
        calls.fetch_add(1, Ordering::SeqCst);
        let head = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(format!("{head}{body}").as_bytes()).await?;
        stream.flush().await?;
    }
}
