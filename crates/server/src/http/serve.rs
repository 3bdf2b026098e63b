//! The listeners: connections are accepted up to a number, served by hyper, and closed in order.
//!
//! Each core has a thread with a listener and a single-threaded runtime of its own, so that a request is read, answered and
//! written without a switch between threads. The lanes of the embedded engine run there, too; stores and workers on the process's
//! other runtime.

use std::error::Error;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use hyper::server::conn::http1::Builder;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::net::sockopt::set_socket_reuseport;
use tokio::net::{TcpListener, TcpSocket};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::event_stream::{Detached, detach};
use super::request_scope::answer;
use super::router::Router;
use crate::config::http::HttpSettings;
use crate::peer::Peer;
use crate::shutdown::Shutdown;
use crate::telemetry::metrics::Metrics;

/// The pause after the system could give no connection (no file descriptors left, say).
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(50);
/// Connections that may come in a burst before they are accepted.
const BACKLOG: u32 = 4_096;

/// The threads that serve HTTP.
pub(crate) struct HttpServer {
    threads: Vec<HttpThread>,
    /// Counts the threads that have connections.
    serving: TaskTracker,
    /// Set when the threads may end. Lanes, tunnels and what handlers have started live on them until then.
    released: CancellationToken,
}

struct HttpThread {
    thread: JoinHandle<()>,
    runtime: Handle,
}

/// What the connections of a thread are served with.
struct Acceptor {
    router: Arc<Router>,
    metrics: Arc<Metrics>,
    builder: Builder,
    permits: Arc<Semaphore>,
    shutdown: Shutdown,
    connections: TaskTracker,
}

impl HttpServer {
    /// Starts the threads, which serve nothing yet.
    ///
    /// # Errors
    /// When the system gives no thread or runtime.
    pub(crate) fn start(threads: usize) -> std::io::Result<Self> {
        let (serving, released) = (TaskTracker::new(), CancellationToken::new());
        let mut server = Self { threads: Vec::new(), serving, released };
        for n in 0..threads {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let (handle, released) = (runtime.handle().clone(), server.released.clone());
            let thread = std::thread::Builder::new().name(format!("weir-http-{n}")).spawn(move || {
                runtime.block_on(released.cancelled());
                // Not kept by whatever blocks one of its threads.
                runtime.shutdown_background();
            })?;
            server.threads.push(HttpThread { thread, runtime: handle });
        }
        Ok(server)
    }

    /// The runtimes of the threads.
    pub(crate) fn runtimes(&self) -> Vec<Handle> {
        self.threads.iter().map(|thread| thread.runtime.clone()).collect()
    }

    /// Serves what comes by the listeners, one for each thread, until the stop has cut the last connection.
    pub(crate) fn serve(
        &self,
        listeners: Vec<std::net::TcpListener>,
        router: Router,
        settings: HttpSettings,
        metrics: &Arc<Metrics>,
        shutdown: &Shutdown,
    ) {
        let (router, permits) = (Arc::new(router), Arc::new(Semaphore::new(settings.max_connections)));
        for (listener, thread) in listeners.into_iter().zip(&self.threads) {
            let acceptor = Acceptor {
                router: Arc::clone(&router),
                metrics: Arc::clone(metrics),
                builder: connection_builder(settings),
                permits: Arc::clone(&permits),
                shutdown: shutdown.clone(),
                connections: TaskTracker::new(),
            };
            self.serving.spawn_on(acceptor.serve(listener), &thread.runtime);
        }
        self.serving.close();
    }

    /// Returns when every connection is closed: some time after a stop has begun.
    pub(crate) async fn ended(&self) {
        self.serving.wait().await;
    }

    /// Lets the threads end, and waits for them.
    pub(crate) async fn release(mut self) {
        self.released.cancel();
        let threads = std::mem::take(&mut self.threads);
        let join = move || {
            for HttpThread { thread, .. } in threads {
                // One that panicked has said so.
                let _ = thread.join();
            }
        };
        let _ = tokio::task::spawn_blocking(join).await;
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        self.released.cancel();
    }
}

fn connection_builder(settings: HttpSettings) -> Builder {
    let mut builder = Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(settings.read_timeout)
        // A caller that has said all may still listen. It also spares looking for the end of the connection, one
        // system call a request, while an answer is under way.
        .half_close(true)
        // Answers are small: copying head and body together costs less than having the kernel gather them.
        .writev(false);
    builder
}

impl Acceptor {
    /// Serves until told to stop, then until every request under way is answered or cut off.
    async fn serve(self, listener: std::net::TcpListener) {
        let listener = match TcpListener::from_std(listener) {
            Ok(listener) => listener,
            Err(error) => {
                tracing::error!(%error, "cannot listen for connections");
                return;
            }
        };
        let this = Arc::new(self);
        let closing = this.shutdown.closing().clone();
        while let Some(Some(peer)) = closing.run_until_cancelled(this.accept(&listener)).await {
            this.connections.spawn(Arc::clone(&this).serve_connection(peer));
        }
        drop(listener);
        this.connections.close();
        this.connections.wait().await;
    }

    /// The next connection, once there is room for it.
    async fn accept(&self, listener: &TcpListener) -> Option<Peer> {
        loop {
            match listener.accept().await {
                Ok((stream, address)) => {
                    if self.permits.available_permits() == 0 {
                        self.metrics.connections_held.inc();
                    }
                    let permit = Arc::clone(&self.permits).acquire_owned().await.ok()?;
                    // Answers are written whole; waiting to fill a packet only delays them.
                    let _ = stream.set_nodelay(true);
                    return Some(Peer::new(stream, address, permit, Arc::clone(&self.metrics)));
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(PAUSE_AFTER_ERROR).await;
                }
            }
        }
    }

    /// Has hyper serve a connection to its end, or until the stop cuts it.
    async fn serve_connection(self: Arc<Self>, peer: Peer) {
        let service = service_fn(|request| {
            let method = request.method().clone();
            let (this, peer) = (&self, &peer);
            async move {
                let response = answer(&this.router, &this.metrics, peer, request).await;
                detach(response, &method, peer, &this.connections, &this.shutdown)
            }
        });
        let io = TokioIo::new(peer.stream());
        let mut connection = pin!(self.builder.serve_connection(io, service).with_upgrades());
        let ended = tokio::select! {
            biased;
            ended = connection.as_mut() => ended,
            () = self.shutdown.closing().cancelled() => {
                connection.as_mut().graceful_shutdown();
                tokio::select! {
                    biased;
                    ended = connection.as_mut() => ended,
                    () = self.shutdown.cutting().cancelled() => Ok(()),
                }
            }
        };
        if let Err(error) = ended
            && !error.source().is_some_and(|cause| cause.is::<Detached>())
        {
            tracing::debug!(peer = %peer.address(), %error, "the connection to a caller failed");
        }
    }
}

/// Binds the address, with a listener for each thread. Linux spreads connections over them by their addresses and ports;
/// elsewhere the threads share one.
///
/// # Errors
/// When the address is in use or not this machine's.
pub(crate) async fn bind(
    address: SocketAddr,
    threads: usize,
) -> std::io::Result<(Vec<std::net::TcpListener>, SocketAddr)> {
    let is_shared = cfg!(target_os = "linux") && threads > 1;
    let listen = |address, reuse_port| {
        let socket = socket(address)?;
        socket.set_reuseport(reuse_port)?;
        socket.bind(address)?;
        socket.listen(BACKLOG)?.into_std()
    };
    // The first one listens alone, which fails where another process listens already. Only then is the address shared, with
    // listeners that ask for that from the start; the first one of another server never does.
    let first = listen(address, false)?;
    let address = first.local_addr()?;
    set_socket_reuseport(&first, is_shared)?;
    let mut listeners = Vec::with_capacity(threads);
    for _ in 1..threads {
        listeners.push(if is_shared { listen(address, true)? } else { first.try_clone()? });
    }
    listeners.push(first);
    Ok((listeners, address))
}

/// Binds an address with one listener.
///
/// # Errors
/// When the address is in use or not this machine's.
pub(crate) async fn bind_one(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = socket(address)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

fn socket(address: SocketAddr) -> std::io::Result<TcpSocket> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn of_servers_that_start_together_on_an_address_one_gets_it() {
        const SERVERS: usize = 6;
        let bind = |address| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(bind(address, 2))
        };
        for round in 0..200 {
            // A port that was free a moment ago.
            let (listeners, address) = bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
            drop(listeners);
            let together = Barrier::new(SERVERS);
            let bound: Vec<_> = std::thread::scope(|scope| {
                let start = || {
                    together.wait();
                    bind(address)
                };
                let servers: Vec<_> = (0..SERVERS).map(|_| scope.spawn(start)).collect();
                servers.into_iter().map(|server| server.join().unwrap()).collect()
            });
            let errors: Vec<_> = bound.iter().filter_map(|bound| bound.as_ref().err()).collect();
            assert_eq!(errors.len(), SERVERS - 1, "round {round}");
            assert!(errors.iter().all(|error| error.kind() == std::io::ErrorKind::AddrInUse), "{errors:?}");
        }
    }
}
