//! An identity provider that publishes its keys: an HTTP server whose response tests replace, with TLS in front and a faulty
//! network between.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use crate::proxy::Proxy;
use crate::tls::Terminator;

/// A running provider. Dropping it stops the server.
pub struct KeyServer {
    network: Proxy,
    terminator: Terminator,
    state: Arc<Mutex<State>>,
    task: JoinHandle<()>,
}

struct State {
    status: u16,
    body: String,
    calls: Vec<Instant>,
}

impl KeyServer {
    /// Starts a server that responds to every request with 200 and this body.
    pub async fn start(body: impl Into<String>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let network = Proxy::start(listener.local_addr().expect("an address")).await;
        let terminator = Terminator::start(network.addr()).await;
        let state = Arc::new(Mutex::new(State { status: 200, body: body.into(), calls: Vec::new() }));
        let task = tokio::spawn({
            let state = Arc::clone(&state);
            async move {
                while let Ok((stream, _)) = listener.accept().await {
                    tokio::spawn(respond(stream, Arc::clone(&state)));
                }
            }
        });
        Self { network, terminator, state, task }
    }

    /// The URL of the keys, unencrypted.
    pub fn http_url(&self) -> String {
        format!("http://{}/keys", self.network.addr())
    }

    /// The URL of the keys with the host name that is in the certificate.
    pub fn https_url(&self) -> String {
        format!("https://localhost:{}/keys", self.terminator.port())
    }

    /// The file with the authority's certificate.
    pub fn ca_file(&self) -> PathBuf {
        self.terminator.ca_file()
    }

    /// The network between the server and its callers.
    pub fn network(&self) -> &Proxy {
        &self.network
    }

    /// Responds with this from now on.
    pub fn publish(&self, status: u16, body: impl Into<String>) {
        let mut state = self.state.lock();
        (state.status, state.body) = (status, body.into());
    }

    /// When each request arrived.
    pub fn calls(&self) -> Vec<Instant> {
        self.state.lock().calls.clone()
    }
}

impl Drop for KeyServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Responds to one request and closes the connection.
async fn respond(stream: TcpStream, state: Arc<Mutex<State>>) -> io::Result<()> {
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    while line != "\r\n" {
        line.clear();
        if stream.read_line(&mut line).await? == 0 {
            return Ok(());
        }
    }
    let response = {
        let mut state = state.lock();
        state.calls.push(Instant::now());
        let State { status, body, .. } = &*state;
        let length = body.len();
        format!("HTTP/1.1 {status} X\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}")
    };
    stream.write_all(response.as_bytes()).await?;
    stream.shutdown().await
}
