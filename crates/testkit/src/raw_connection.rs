//! A conversation over one connection, byte by byte, from either side: for tests of what passes between two others, and
//! when. Every step waits until it has happened and fails when it does not; nothing is read ahead of what was asked for.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

/// Far beyond anything that has to happen.
const PATIENCE: Duration = Duration::from_secs(60);

/// A server of which the test plays the part.
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

    /// How many connections there have been.
    pub fn accepted(&self) -> usize {
        self.accepted.load(Ordering::SeqCst)
    }

    /// The next connection.
    pub async fn next(&mut self) -> RawConnection {
        let next = tokio::time::timeout(PATIENCE, self.connections.recv()).await;
        next.expect("somebody must connect").expect("the listener goes on")
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// One side of a connection.
pub struct RawConnection {
    stream: TcpStream,
    /// What came and was not asked for yet.
    ahead: Vec<u8>,
}

/// The head of a request or an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head(pub String);

impl Head {
    /// The first line.
    pub fn line(&self) -> &str {
        self.0.split("\r\n").next().unwrap_or_default()
    }

    /// The values of a header, one for each line of it.
    pub fn all(&self, name: &str) -> Vec<&str> {
        let lines = self.0.split("\r\n").skip(1).filter_map(|line| line.split_once(": "));
        lines.filter(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value).collect()
    }

    /// The value of a header that stands there once.
    pub fn get(&self, name: &str) -> Option<&str> {
        match self.all(name)[..] {
            [] => None,
            [value] => Some(value),
            _ => panic!("{name} is there more than once in {}", self.0),
        }
    }
}

impl RawConnection {
    fn new(stream: TcpStream) -> Self {
        stream.set_nodelay(true).expect("a connection");
        Self { stream, ahead: Vec::new() }
    }

    pub async fn connect(addr: SocketAddr) -> Self {
        Self::new(TcpStream::connect(addr).await.unwrap_or_else(|error| panic!("{addr}: {error}")))
    }

    /// Sends bytes as they are. Whoever is not there to take them is found out by reading.
    pub async fn say(&mut self, bytes: impl AsRef<[u8]>) {
        let _ = tokio::time::timeout(PATIENCE, self.stream.write_all(bytes.as_ref())).await.expect("room");
    }

    /// Sends one chunk of a chunked body.
    pub async fn say_chunk(&mut self, bytes: impl AsRef<[u8]>) {
        let bytes = bytes.as_ref();
        self.say([format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat()).await;
    }

    /// The next head.
    pub async fn head(&mut self) -> Head {
        let end = loop {
            if let Some(at) = self.ahead.windows(4).position(|window| window == b"\r\n\r\n") {
                break at + 4;
            }
            assert!(
                self.more().await > 0,
                "it ended within a head: {:?}",
                String::from_utf8_lossy(&self.ahead)
            );
        };
        let head = self.ahead.drain(..end).collect::<Vec<u8>>();
        Head(String::from_utf8(head).expect("text").trim_end().to_owned())
    }

    /// The next head; none, when the connection ends before one begins.
    pub async fn next_head(&mut self) -> Option<Head> {
        if self.ahead.is_empty() && self.more().await == 0 {
            return None;
        }
        Some(self.head().await)
    }

    /// The next bytes, exactly so many.
    pub async fn bytes(&mut self, count: usize) -> Vec<u8> {
        while self.ahead.len() < count {
            assert!(self.more().await > 0, "it ended after {} of {count} bytes", self.ahead.len());
        }
        self.ahead.drain(..count).collect()
    }

    /// The next bytes, which must be these.
    pub async fn hear(&mut self, expected: impl AsRef<[u8]>) {
        let expected = expected.as_ref();
        let heard = self.bytes(expected.len()).await;
        assert_eq!(String::from_utf8_lossy(&heard), String::from_utf8_lossy(expected));
    }

    /// The next chunk of a chunked body; the last one is empty.
    pub async fn chunk(&mut self) -> Vec<u8> {
        let end = loop {
            if let Some(at) = self.ahead.windows(2).position(|window| window == b"\r\n") {
                break at;
            }
            assert!(self.more().await > 0, "it ended within the size of a chunk");
        };
        let line = String::from_utf8(self.ahead.drain(..end + 2).collect()).expect("text");
        let size = usize::from_str_radix(line.trim(), 16).unwrap_or_else(|error| panic!("{line:?}: {error}"));
        if size == 0 {
            return Vec::new();
        }
        let chunk = self.bytes(size).await;
        self.hear("\r\n").await;
        chunk
    }

    /// A chunked body of `count` bytes without trailers, however it is cut.
    pub async fn chunked(&mut self, count: usize) -> Vec<u8> {
        let mut body = Vec::with_capacity(count);
        loop {
            let chunk = self.chunk().await;
            if chunk.is_empty() {
                break;
            }
            body.extend(chunk);
        }
        self.hear("\r\n").await;
        assert_eq!(body.len(), count);
        body
    }

    /// Returns everything up to the end of the connection, which must come.
    pub async fn rest(&mut self) -> Vec<u8> {
        while self.more().await > 0 {}
        std::mem::take(&mut self.ahead)
    }

    /// Says that nothing more will be said, and goes on listening.
    pub async fn finish(&mut self) {
        let _ = self.stream.shutdown().await;
    }

    /// How many bytes came; none at the end, whether orderly or not.
    async fn more(&mut self) -> usize {
        let read = tokio::time::timeout(PATIENCE, self.stream.read_buf(&mut self.ahead)).await;
        read.expect("the other side must say something or leave").unwrap_or(0)
    }
}
