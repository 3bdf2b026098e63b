//! A TCP proxy that injects faults between Weir and an engine or between a caller and Weir.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

#[derive(Debug, Clone, Copy, PartialEq)]
enum Mode {
    Pass,
    Delay(Duration),
    Refuse,
    BlackHole,
    /// Forwards this many more bytes, then becomes a black hole.
    HalfOpenAfter(usize),
}

struct Control {
    mode: Mode,
    /// Number of calls of [`Proxy::cut`]; a connection is reset when it changes.
    cuts: u64,
}

/// A running proxy. A mode applies to open and new connections until another one is set.
pub struct Proxy {
    addr: SocketAddr,
    control: Arc<watch::Sender<Control>>,
    acceptor: JoinHandle<()>,
}

impl Proxy {
    /// Listens on a free port and forwards everything.
    pub async fn start(upstream: SocketAddr) -> Self {
        let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        Self::listen(listen, upstream).await.expect("loopback has a free port")
    }

    /// [`start`](Self::start) at this address.
    pub async fn listen(listen: SocketAddr, upstream: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(listen).await?;
        let addr = listener.local_addr()?;
        let control = Arc::new(watch::Sender::new(Control { mode: Mode::Pass, cuts: 0 }));
        let acceptor = tokio::spawn(accept(listener, upstream, Arc::clone(&control)));
        Ok(Self { addr, control, acceptor })
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Forwards everything. Bytes that a black hole held back arrive now, as after a healed partition.
    pub fn pass(&self) {
        self.set(Mode::Pass);
    }

    /// Delays every chunk in both directions.
    pub fn delay(&self, delay: Duration) {
        self.set(Mode::Delay(delay));
    }

    /// Resets every open connection once. The mode stays.
    pub fn cut(&self) {
        self.control.send_modify(|control| control.cuts += 1);
    }

    /// Closes new connections immediately. Open ones are unaffected.
    pub fn refuse(&self) {
        self.set(Mode::Refuse);
    }

    /// Accepts connections but forwards nothing in either direction, not even their end.
    pub fn black_hole(&self) {
        self.set(Mode::BlackHole);
    }

    /// Forwards `bytes` more over all connections and directions together, then becomes a black hole.
    pub fn half_open_after(&self, bytes: usize) {
        self.set(if bytes == 0 { Mode::BlackHole } else { Mode::HalfOpenAfter(bytes) });
    }

    fn set(&self, mode: Mode) {
        self.control.send_modify(|control| control.mode = mode);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // The acceptor owns the connections' tasks, so they end with it.
        self.acceptor.abort();
    }
}

async fn accept(listener: TcpListener, upstream: SocketAddr, control: Arc<watch::Sender<Control>>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((client, _)) = accepted else { continue };
                if control.borrow().mode != Mode::Refuse {
                    let cuts = control.borrow().cuts;
                    connections.spawn(forward_connection(client, upstream, Arc::clone(&control), cuts));
                }
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

/// Forwards one connection until both sides are done or it is cut.
async fn forward_connection(
    mut client: TcpStream,
    upstream: SocketAddr,
    control: Arc<watch::Sender<Control>>,
    cuts: u64,
) {
    let mut server = None;
    tokio::select! {
        // An error on either side has ended the connection; the other side sees it close when this returns.
        _ = exchange(&mut client, &mut server, upstream, &control) => {}
        () = wait_for(&control, |control| control.cuts != cuts) => {
            for stream in [Some(client), server].into_iter().flatten() {
                // Without lingering, closing sends RST instead of FIN.
                let _ = stream.set_zero_linger();
            }
        }
    }
}

async fn exchange(
    client: &mut TcpStream,
    server: &mut Option<TcpStream>,
    upstream: SocketAddr,
    control: &watch::Sender<Control>,
) -> io::Result<()> {
    wait_for(control, is_open).await;
    let server = server.insert(TcpStream::connect(upstream).await?);
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (from_client, to_client) = client.split();
    let (from_server, to_server) = server.split();
    tokio::try_join!(forward(from_client, to_server, control), forward(from_server, to_client, control))?;
    Ok(())
}

/// Forwards one direction of one connection.
async fn forward(
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    control: &watch::Sender<Control>,
) -> io::Result<()> {
    let mut buffer = vec![0; 16 * 1024];
    loop {
        let read = from.read(&mut buffer).await;
        // Before the result is used: a black hole must not forward an end or an error either.
        wait_for(control, is_open).await;
        let count = read?;
        if count == 0 {
            return to.shutdown().await;
        }
        let mode = control.borrow().mode;
        if let Mode::Delay(delay) = mode {
            let _ = tokio::time::timeout(delay, wait_for(control, |control| control.mode != mode)).await;
        }
        let mut rest = &buffer[..count];
        while !rest.is_empty() {
            wait_for(control, is_open).await;
            let (now, later) = rest.split_at(take_allowance(control, rest.len()));
            to.write_all(now).await?;
            rest = later;
        }
    }
}

/// Returns how many of `wanted` bytes may pass now and subtracts them from the rest of [`Mode::HalfOpenAfter`].
fn take_allowance(control: &watch::Sender<Control>, wanted: usize) -> usize {
    let mut allowed = wanted;
    control.send_if_modified(|control| {
        let Mode::HalfOpenAfter(left) = control.mode else {
            if control.mode == Mode::BlackHole {
                allowed = 0;
            }
            return false;
        };
        allowed = wanted.min(left);
        control.mode = if left == allowed { Mode::BlackHole } else { Mode::HalfOpenAfter(left - allowed) };
        true
    });
    allowed
}

fn is_open(control: &Control) -> bool {
    control.mode != Mode::BlackHole
}

async fn wait_for(control: &watch::Sender<Control>, wanted: impl FnMut(&Control) -> bool) {
    // It fails only if the sender is gone, which is borrowed here.
    let _ = control.subscribe().wait_for(wanted).await;
}

#[cfg(test)]
mod tests;
