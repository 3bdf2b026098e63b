//! A TCP proxy that misbehaves on command, to stand between Weir and an engine or between a caller and Weir.

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
    /// So many more bytes pass, then it is a black hole.
    HalfOpenAfter(usize),
}

struct Control {
    mode: Mode,
    /// How often [`Proxy::cut`] was called: a connection ends when this leaves what it was at its start.
    cuts: u64,
}

/// A running proxy. Modes hold for open and new connections alike, until the next one is set.
pub struct Proxy {
    addr: SocketAddr,
    control: Arc<watch::Sender<Control>>,
    acceptor: JoinHandle<()>,
}

impl Proxy {
    /// Listens on a port of its own and passes everything on.
    pub async fn start(upstream: SocketAddr) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("loopback has a free port");
        let addr = listener.local_addr().expect("a bound listener has an address");
        let control = Arc::new(watch::Sender::new(Control { mode: Mode::Pass, cuts: 0 }));
        let acceptor = tokio::spawn(accept(listener, upstream, Arc::clone(&control)));
        Self { addr, control, acceptor }
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Passes everything on. What a black hole swallowed arrives now, as after a healed partition.
    pub fn pass(&self) {
        self.set(Mode::Pass);
    }

    /// Holds every chunk back for `delay`, in both directions.
    pub fn delay(&self, delay: Duration) {
        self.set(Mode::Delay(delay));
    }

    /// Resets every open connection, once; the mode stays.
    pub fn cut(&self) {
        self.control.send_modify(|control| control.cuts += 1);
    }

    /// Closes new connections at once; open ones go on.
    pub fn refuse(&self) {
        self.set(Mode::Refuse);
    }

    /// Accepts and keeps connections, and forwards nothing either way, not even their end.
    pub fn black_hole(&self) {
        self.set(Mode::BlackHole);
    }

    /// Lets `bytes` more pass, over all connections and both directions together, then becomes a black hole.
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
                    connections.spawn(carry(client, upstream, Arc::clone(&control), cuts));
                }
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

/// One connection, until both sides are done or it is cut.
async fn carry(mut client: TcpStream, upstream: SocketAddr, control: Arc<watch::Sender<Control>>, cuts: u64) {
    let mut server = None;
    tokio::select! {
        // An error on either side has ended the connection; the other side sees it close when this returns.
        _ = exchange(&mut client, &mut server, upstream, &control) => {}
        () = reach(&control, |control| control.cuts != cuts) => {
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
    reach(control, is_open).await;
    let server = server.insert(TcpStream::connect(upstream).await?);
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (from_client, to_client) = client.split();
    let (from_server, to_server) = server.split();
    tokio::try_join!(pump(from_client, to_server, control), pump(from_server, to_client, control))?;
    Ok(())
}

/// One direction of one connection.
async fn pump(
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    control: &watch::Sender<Control>,
) -> io::Result<()> {
    let mut buffer = vec![0; 16 * 1024];
    loop {
        let read = from.read(&mut buffer).await;
        // Before the outcome is looked at: an end or an error must not leak through a black hole either.
        reach(control, is_open).await;
        let count = read?;
        if count == 0 {
            return to.shutdown().await;
        }
        let mode = control.borrow().mode;
        if let Mode::Delay(delay) = mode {
            let _ = tokio::time::timeout(delay, reach(control, |control| control.mode != mode)).await;
        }
        let mut rest = &buffer[..count];
        while !rest.is_empty() {
            reach(control, is_open).await;
            let (now, later) = rest.split_at(allowance(control, rest.len()));
            to.write_all(now).await?;
            rest = later;
        }
    }
}

/// How many of `wanted` bytes may pass now; takes them off what [`Mode::HalfOpenAfter`] has left.
fn allowance(control: &watch::Sender<Control>, wanted: usize) -> usize {
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

async fn reach(control: &watch::Sender<Control>, wanted: impl FnMut(&Control) -> bool) {
    // It fails only without a sender, and here is one.
    let _ = control.subscribe().wait_for(wanted).await;
}

#[cfg(test)]
mod tests;
