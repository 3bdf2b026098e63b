//! Terminates TLS in front of a plaintext server of a test.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use crate::certificates::Certificates;

/// A TLS terminator with a certificate for `localhost` from its own authority.
pub struct Terminator {
    port: u16,
    directory: TempDir,
    handshakes: Arc<AtomicUsize>,
    task: tokio::task::JoinHandle<()>,
}

impl Terminator {
    /// Accepts connections on a free port and forwards them to `target`.
    pub async fn start(target: SocketAddr) -> Self {
        let certificates = Certificates::generate();
        let directory = tempfile::tempdir().expect("a directory");
        std::fs::write(directory.path().join("ca.pem"), &certificates.authority).expect("a file");
        let acceptor = TlsAcceptor::from(Arc::new(server_config(&certificates)));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let handshakes = Arc::new(AtomicUsize::new(0));
        let task = tokio::spawn(accept(listener, acceptor, target, Arc::clone(&handshakes)));
        Self { port, directory, handshakes, task }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// The file with the authority's certificate.
    pub fn ca_file(&self) -> PathBuf {
        self.directory.path().join("ca.pem")
    }

    /// The number of completed handshakes.
    pub fn handshakes(&self) -> usize {
        self.handshakes.load(Ordering::SeqCst)
    }
}

impl Drop for Terminator {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn server_config(certificates: &Certificates) -> ServerConfig {
    let chain =
        CertificateDer::from_pem_slice(certificates.server.as_bytes()).expect("the testkit generated PEM");
    let key =
        PrivateKeyDer::from_pem_slice(certificates.server_key.as_bytes()).expect("the testkit generated PEM");
    ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("ring supports the default protocol versions")
        .with_no_client_auth()
        .with_single_cert(vec![chain], key)
        .expect("the key belongs to the certificate")
}

async fn accept(
    listener: TcpListener,
    acceptor: TlsAcceptor,
    target: SocketAddr,
    handshakes: Arc<AtomicUsize>,
) {
    while let Ok((stream, _)) = listener.accept().await {
        let (acceptor, handshakes) = (acceptor.clone(), Arc::clone(&handshakes));
        tokio::spawn(async move {
            // A client that does not trust the certificate disconnects, which some tests expect.
            let Ok(mut near) = acceptor.accept(stream).await else { return };
            handshakes.fetch_add(1, Ordering::SeqCst);
            let Ok(mut far) = TcpStream::connect(target).await else { return };
            let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
        });
    }
}
