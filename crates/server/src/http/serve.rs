//! The listeners: connections are accepted up to a number, served by hyper, and closed in order.
//!
//! When all of them are taken, a few more are accepted, each for one request to an operations route, so that monitoring still
//! sees the server. What a connection asks for is only known once its head is read, so requests to other routes that get one
//! of these places are answered with 503, unless an ordinary place has become free. The reserve serves all its connections at
//! once and each for a few seconds only: callers that send or read slowly cannot hold its places.
//!
//! Each core has a thread with a listener and a single-threaded runtime of its own, so that a request is read, answered and
//! written without a switch between threads. The lanes of the embedded engine run there, too; stores and workers on the process's
//! other runtime.

use std::error::Error;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use axum::response::{IntoResponse, Response};
use http::header::CONTENT_LENGTH;
use http::{Request, StatusCode};
use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use hyper::server::conn::http1::Builder;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::net::sockopt::set_socket_reuseport;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpSocket};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::error::ApiError;
use super::event_stream::{Detached, detach, write_head};
use super::lingering_close::linger;
use super::request_scope::{REQUEST_ID, answer, new_request_id};
use super::router::Router;
use super::tracked_body::TrackedBody;
use crate::app::App;
use crate::buffer_budget::{BudgetSpent, BufferBudget};
use crate::peer::{Peer, Place};
use crate::settings::http::HttpSettings;
use crate::shutdown::Shutdown;
use crate::telemetry::metrics::{Metrics, Shortage};

/// The pause after the system could give no connection (no file descriptors left, say).
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(50);
/// Connections that may come in a burst before they are accepted.
const BACKLOG: u32 = 4_096;
/// Connections beyond `http.max_connections`, for operations.
const RESERVE: usize = 64;
/// How long a connection of the reserve may take to send its head.
const RESERVE_READ_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a connection of the reserve may take in all, until its response is written.
const RESERVE_TIMEOUT: Duration = Duration::from_secs(5);
/// The largest head of a request.
const HEAD_MAX: usize = 32 * 1024;
/// The most that hyper buffers of a request, and of a response.
const BUFFER_MAX: usize = 64 * 1024;

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
    reserve_builder: Builder,
    places: Arc<Semaphore>,
    reserve: Arc<Semaphore>,
    budget: BufferBudget,
    shutdown: Shutdown,
    connections: TaskTracker,
}

impl HttpServer {
    /// Starts the threads, which serve nothing yet.
    /// Fails when the system gives no thread or runtime.
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
    pub(crate) fn serve(&self, listeners: Vec<std::net::TcpListener>, router: Router, app: &App) {
        let settings = app.settings.http;
        let places = Arc::new(Semaphore::new(settings.max_connections));
        let (router, reserve) = (Arc::new(router), Arc::new(Semaphore::new(RESERVE)));
        for (listener, thread) in listeners.into_iter().zip(&self.threads) {
            let acceptor = Acceptor {
                router: Arc::clone(&router),
                metrics: Arc::clone(&app.metrics),
                builder: connection_builder(settings),
                reserve_builder: reserve_builder(settings),
                places: Arc::clone(&places),
                reserve: Arc::clone(&reserve),
                budget: app.buffers.clone(),
                shutdown: app.shutdown.clone(),
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
        .writev(false)
        .max_header_size(HEAD_MAX)
        .max_buf_size(BUFFER_MAX);
    builder
}

/// Serves one request, which has to come at once.
fn reserve_builder(settings: HttpSettings) -> Builder {
    let mut builder = connection_builder(settings);
    builder.keep_alive(false).header_read_timeout(settings.read_timeout.min(RESERVE_READ_TIMEOUT));
    builder
}

impl Acceptor {
    /// Accepts connections until the server stops, then waits until every request under way is answered or cut off.
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
                    let place = self.place().await?;
                    // Answers are written whole; waiting to fill a packet only delays them.
                    let _ = stream.set_nodelay(true);
                    let (budget, metrics) = (self.budget.clone(), Arc::clone(&self.metrics));
                    return Some(Peer::new(stream, address, place, budget, metrics));
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(PAUSE_AFTER_ERROR).await;
                }
            }
        }
    }

    /// An ordinary place for a connection; when there is none, one of the reserve; when there is none either, whichever
    /// becomes free first.
    async fn place(&self) -> Option<Place> {
        let places = || Arc::clone(&self.places);
        if let Ok(permit) = places().try_acquire_owned() {
            return Some(Place::ordinary(permit));
        }
        self.metrics.connections_held.inc();
        tokio::select! {
            biased;
            permit = places().acquire_owned() => permit.ok().map(Place::ordinary),
            permit = Arc::clone(&self.reserve).acquire_owned() => {
                permit.ok().map(|permit| Place::in_reserve(permit, places()))
            }
        }
    }

    /// Serves a connection, and closes it in a way that lets the caller read its last response.
    async fn serve_connection(self: Arc<Self>, peer: Peer) {
        match limit_in_reserve(&peer, self.serve_to_end(&peer)).await {
            Some(true) => linger(&peer, &self.shutdown).await,
            Some(false) => {}
            None => tracing::debug!(peer = %peer.address(), "a connection of the reserve timed out"),
        }
    }

    /// Serves a connection to its end. Returns whether the caller may still be sending after its last response.
    async fn serve_to_end(&self, peer: &Peer) -> bool {
        match self.serve_requests(peer).await {
            Ok(()) => peer.has_unread_body(),
            Err(error) if has_cause::<Detached>(&error) => false,
            Err(error) if is_over_budget(&error) => {
                self.metrics.record_shortage(Shortage::Memory);
                // Between two responses: a head is only read when the one before it is written (`peer.rs`).
                refuse_head(peer).await.is_ok()
            }
            Err(error) => {
                tracing::debug!(peer = %peer.address(), %error, "the connection to a caller failed");
                // A head that is not HTTP, or too large, was answered before all of it was read.
                error.is_parse() || peer.has_unread_body()
            }
        }
    }

    /// Has hyper serve a connection to its end, or until the server's stop cuts it.
    async fn serve_requests(&self, peer: &Peer) -> hyper::Result<()> {
        let service = service_fn(|request| self.answer(peer, request));
        let builder = if peer.is_in_reserve() { &self.reserve_builder } else { &self.builder };
        let io = TokioIo::new(peer.stream());
        let mut connection = pin!(builder.serve_connection(io, service).with_upgrades());
        tokio::select! {
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
        }
    }

    async fn answer(&self, peer: &Peer, request: Request<Incoming>) -> Result<Response, Detached> {
        let method = request.method().clone();
        peer.begin_request(!request.body().is_end_stream(), || head_length(&request));
        let request = request.map(|body| TrackedBody::new(body, peer));
        let response = answer(&self.router, &self.metrics, peer, request).await;
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            peer.become_tunnel();
        }
        detach(response, &method, peer, &self.connections, &self.shutdown)
    }
}

/// Serves a connection; for as long as it is in the reserve, no longer than [`RESERVE_TIMEOUT`].
async fn limit_in_reserve<T>(peer: &Peer, serving: impl Future<Output = T>) -> Option<T> {
    let timeout = async {
        if peer.is_in_reserve() {
            tokio::time::sleep(RESERVE_TIMEOUT).await;
            if peer.is_in_reserve() {
                return;
            }
        }
        std::future::pending().await
    };
    tokio::select! {
        biased;
        served = serving => Some(served),
        () = timeout => None,
    }
}

/// The approximate length of a request's head.
fn head_length<B>(request: &Request<B>) -> usize {
    let line = request.method().as_str().len() + request.uri().to_string().len() + " HTTP/1.1\r\n\r\n".len();
    let lines =
        request.headers().iter().map(|(name, value)| name.as_str().len() + value.len() + ": \r\n".len());
    line + lines.sum::<usize>()
}

fn has_cause<E: Error + 'static>(error: &hyper::Error) -> bool {
    error.source().is_some_and(|cause| cause.is::<E>())
}

fn is_over_budget(error: &hyper::Error) -> bool {
    let cause = error.source().and_then(|cause| cause.downcast_ref::<io::Error>());
    cause.and_then(io::Error::get_ref).is_some_and(|cause| cause.is::<BudgetSpent>())
}

/// Answers a head for which there was no memory left; hyper has given up on it.
async fn refuse_head(peer: &Peer) -> io::Result<()> {
    let mut response = ApiError::out_of_memory().into_response();
    let body = std::mem::take(response.body_mut()).collect().await.map_err(io::Error::other)?.to_bytes();
    response.headers_mut().insert(REQUEST_ID, new_request_id());
    response.headers_mut().insert(CONTENT_LENGTH, body.len().into());
    let mut socket = peer.stream();
    socket.write_all(&write_head(&response)).await?;
    socket.write_all(&body).await?;
    socket.shutdown().await
}

/// Binds the address, with a listener for each thread. Linux spreads connections over them by their addresses and ports;
/// elsewhere the threads share one.
/// Fails when the address is in use or not this machine's.
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
/// Fails when the address is in use or not this machine's.
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
    use crate::peer::fixtures::{connect, ordinary_place};

    #[tokio::test(start_paused = true)]
    async fn a_place_of_the_reserve_is_held_for_seconds_and_an_ordinary_one_as_long_as_it_takes() {
        let places = Arc::new(Semaphore::new(1));
        let in_reserve = || {
            let permit = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
            Place::in_reserve(permit, Arc::clone(&places))
        };
        let budget = BufferBudget::new(0);
        let an_hour = || tokio::time::sleep(Duration::from_secs(3_600));
        let (_client, peer) = connect(ordinary_place(), budget.clone()).await;
        assert_eq!(limit_in_reserve(&peer, an_hour()).await, Some(()));
        let (_client, peer) = connect(in_reserve(), budget.clone()).await;
        assert_eq!(limit_in_reserve(&peer, an_hour()).await, None);
        assert_eq!(limit_in_reserve(&peer, tokio::time::sleep(RESERVE_READ_TIMEOUT)).await, Some(()));
        let leaving = async {
            assert!(peer.leave_reserve());
            an_hour().await;
        };
        assert_eq!(limit_in_reserve(&peer, leaving).await, Some(()), "it has an ordinary place now");
    }

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
