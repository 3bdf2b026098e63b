//! Client and server sides of a connection that a test controls byte by byte, to test what is sent and when. Every call
//! waits until it is complete and panics on timeout.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

/// Timeout of each step, far longer than any step takes.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A server that the test itself plays.
pub struct Listener {
    addr: SocketAddr,
    accepted: Arc<AtomicUsize>,
    connections: mpsc::UnboundedReceiver<RawConnection>,
    task: tokio::task::JoinHandle<()>,
}

impl Listener {
    pub async fn start() -> Self {
        Self::start_on(0).await
    }

    pub async fn start_on(port: u16) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await.expect("a port");
        let addr = listener.local_addr().expect("an address");
        let (found, connections) = mpsc::unbounded_channel();
        let accepted = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&accepted);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::SeqCst);
                if found.send(RawConnection::new(stream)).is_err() {
                    return;
                }
            }
        });
        Self { addr, accepted, connections, task }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The number of connections so far.
    pub fn accepted(&self) -> usize {
        self.accepted.load(Ordering::SeqCst)
    }

    pub async fn next(&mut self) -> RawConnection {
        let next = tokio::time::timeout(TIMEOUT, self.connections.recv()).await;
        next.expect("a client must connect").expect("the listener is running")
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// One side of a connection, read and written byte by byte.
pub struct RawConnection {
    stream: TcpStream,
    /// Bytes that were received but not read yet.
    buffer: Vec<u8>,
}

/// The head of a request or response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head(pub String);

impl Head {
    /// The request or status line.
    pub fn line(&self) -> &str {
        self.0.split("\r\n").next().unwrap_or_default()
    }

    /// All values of a header.
    pub fn all(&self, name: &str) -> Vec<&str> {
        let lines = self.0.split("\r\n").skip(1).filter_map(|line| line.split_once(": "));
        lines.filter(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value).collect()
    }

    /// The value of a header; panics if there are several.
    pub fn get(&self, name: &str) -> Option<&str> {
        match self.all(name)[..] {
            [] => None,
            [value] => Some(value),
            _ => panic!("{name} occurs more than once in {}", self.0),
        }
    }
}

impl RawConnection {
    fn new(stream: TcpStream) -> Self {
        stream.set_nodelay(true).expect("a connection");
        Self { stream, buffer: Vec::new() }
    }

    pub async fn connect(addr: SocketAddr) -> Self {
        Self::new(TcpStream::connect(addr).await.unwrap_or_else(|error| panic!("{addr}: {error}")))
    }

    /// Sends bytes unchanged. A closed connection is only noticed by reading.
    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        let _ = tokio::time::timeout(TIMEOUT, self.stream.write_all(bytes.as_ref()))
            .await
            .expect("the other side must read");
    }

    /// Sends one chunk of a chunked body.
    pub async fn send_chunk(&mut self, bytes: impl AsRef<[u8]>) {
        let bytes = bytes.as_ref();
        self.send([format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat()).await;
    }

    /// Reads the next head.
    pub async fn head(&mut self) -> Head {
        let end = loop {
            if let Some(at) = self.buffer.windows(4).position(|window| window == b"\r\n\r\n") {
                break at + 4;
            }
            assert!(
                self.read_more().await > 0,
                "the connection ended within a head: {:?}",
                String::from_utf8_lossy(&self.buffer)
            );
        };
        let head = self.buffer.drain(..end).collect::<Vec<u8>>();
        Head(String::from_utf8(head).expect("text").trim_end().to_owned())
    }

    /// Reads the next head; `None` if the connection ends before it.
    pub async fn next_head(&mut self) -> Option<Head> {
        if self.buffer.is_empty() && self.read_more().await == 0 {
            return None;
        }
        Some(self.head().await)
    }

    /// Reads exactly `count` bytes.
    pub async fn bytes(&mut self, count: usize) -> Vec<u8> {
        while self.buffer.len() < count {
            assert!(
                self.read_more().await > 0,
                "the connection ended after {} of {count} bytes",
                self.buffer.len()
            );
        }
        self.buffer.drain(..count).collect()
    }

    /// Reads as many bytes as `expected` has; they must be equal.
    pub async fn expect(&mut self, expected: impl AsRef<[u8]>) {
        let expected = expected.as_ref();
        let received = self.bytes(expected.len()).await;
        assert_eq!(String::from_utf8_lossy(&received), String::from_utf8_lossy(expected));
    }

    /// Reads the next chunk of a chunked body; the last one is empty.
    pub async fn chunk(&mut self) -> Vec<u8> {
        let end = loop {
            if let Some(at) = self.buffer.windows(2).position(|window| window == b"\r\n") {
                break at;
            }
            assert!(self.read_more().await > 0, "the connection ended within the size of a chunk");
        };
        let line = String::from_utf8(self.buffer.drain(..end + 2).collect()).expect("text");
        let size = usize::from_str_radix(line.trim(), 16).unwrap_or_else(|error| panic!("{line:?}: {error}"));
        if size == 0 {
            return Vec::new();
        }
        let chunk = self.bytes(size).await;
        self.expect("\r\n").await;
        chunk
    }

    /// Reads a chunked body of `count` bytes without trailers, in chunks of any size.
    pub async fn chunked(&mut self, count: usize) -> Vec<u8> {
        let mut body = Vec::with_capacity(count);
        loop {
            let chunk = self.chunk().await;
            if chunk.is_empty() {
                break;
            }
            body.extend(chunk);
        }
        self.expect("\r\n").await;
        assert_eq!(body.len(), count);
        body
    }

    /// Reads to the end of the connection.
    pub async fn rest(&mut self) -> Vec<u8> {
        while self.read_more().await > 0 {}
        std::mem::take(&mut self.buffer)
    }

    /// Closes the sending side; reading is still possible.
    pub async fn finish(&mut self) {
        let _ = self.stream.shutdown().await;
    }

    /// Reads more bytes into the buffer. Returns 0 at the end of the connection, orderly or not.
    async fn read_more(&mut self) -> usize {
        let read = tokio::time::timeout(TIMEOUT, self.stream.read_buf(&mut self.buffer)).await;
        read.expect("the other side must send something or close").unwrap_or(0)
    }
}
