//! An HTTPS server whose certificate only its own authority vouches for: what clients make of TLS.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use crate::tls::Terminator;

/// The server. It ends with this value.
pub struct HttpsServer {
    front: Terminator,
    calls: Arc<AtomicUsize>,
    task: JoinHandle<()>,
}

impl HttpsServer {
    /// Answers every request with 200 and this JSON.
    pub async fn answering(body: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let front = Terminator::start(listener.local_addr().expect("an address")).await;
        let calls = Arc::new(AtomicUsize::new(0));
        let task = tokio::spawn({
            let calls = Arc::clone(&calls);
            async move {
                while let Ok((stream, _)) = listener.accept().await {
                    tokio::spawn(answer(stream, body, Arc::clone(&calls)));
                }
            }
        });
        Self { front, calls, task }
    }

    /// By the name that is in its certificate.
    pub fn url(&self) -> String {
        format!("https://localhost:{}/", self.front.port())
    }

    /// By its address, which is not.
    pub fn url_by_address(&self) -> String {
        format!("https://127.0.0.1:{}/", self.front.port())
    }

    /// The certificate of its authority.
    pub fn ca_file(&self) -> PathBuf {
        self.front.ca_file()
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

async fn answer(stream: TcpStream, body: &str, calls: Arc<AtomicUsize>) -> io::Result<()> {
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
