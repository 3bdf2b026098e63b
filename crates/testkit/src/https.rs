//! An HTTPS server with a certificate from its own authority, for tests of TLS clients.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use crate::tls::Terminator;

/// A running HTTPS server. Dropping it stops the server.
pub struct HttpsServer {
    terminator: Terminator,
    calls: Arc<AtomicUsize>,
    task: JoinHandle<()>,
}

impl HttpsServer {
    /// Starts a server that responds to every request with 200 and this JSON.
    pub async fn start(body: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let terminator = Terminator::start(listener.local_addr().expect("an address")).await;
        let calls = Arc::new(AtomicUsize::new(0));
        let task = tokio::spawn({
            let calls = Arc::clone(&calls);
            async move {
                while let Ok((stream, _)) = listener.accept().await {
                    tokio::spawn(serve(stream, body, Arc::clone(&calls)));
                }
            }
        });
        Self { terminator, calls, task }
    }

    /// The URL with the host name that is in the certificate.
    pub fn url(&self) -> String {
        format!("https://localhost:{}/", self.terminator.port())
    }

    /// The URL with the IP address, which is not in the certificate.
    pub fn url_by_address(&self) -> String {
        format!("https://127.0.0.1:{}/", self.terminator.port())
    }

    /// The file with the authority's certificate.
    pub fn ca_file(&self) -> PathBuf {
        self.terminator.ca_file()
    }

    /// The number of requests received.
    pub fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }
}

impl Drop for HttpsServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(stream: TcpStream, body: &str, calls: Arc<AtomicUsize>) -> io::Result<()> {
    let mut stream = BufReader::new(stream);
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
