//! The listeners: they accept connections up to a maximum, hyper serves them, and a stop closes them in order.
//!
//! Beyond the maximum, a reserve of a few connections is accepted, each for one request to an operations route, so that
//! monitoring still reaches the server. The route is only known once the head has been read. A request to any other route on
//! a connection of the reserve is therefore answered 503, unless an ordinary permit has become free. The reserve serves its
//! connections for a few seconds each, so that slow callers cannot occupy it.
//!
//! Each core has a thread with its own listener and its own single-threaded runtime, so that a request is read, answered and
//! written without a switch between threads. The lanes of the embedded engine run there as well; stores and workers run on
//! the process's other runtime.

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
use hyper::server::conn::http2;
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
use super::http2::{CONNECTIONS_MAX as HTTP2_CONNECTIONS_MAX, StreamExecutor, builder as http2_builder};
use super::lingering_close::linger;
use super::router::{REQUEST_ID, Router, new_request_id};
use super::tracked_body::TrackedBody;
use crate::app::App;
use crate::buffer_budget::{BudgetExhausted, BufferBudget};
use crate::peer::transport::{Tcp, Transport};
use crate::peer::{ConnectionPermit, OpenConnection, Peer};
use crate::settings::http::HttpSettings;
use crate::shutdown::Shutdown;
use crate::telemetry::metrics::{Metrics, Shortage};
use crate::tls::Tls;

/// The pause after `accept` failed, for example because no file descriptors are left.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(50);
/// Connections that may wait to be accepted.
const BACKLOG: u32 = 4_096;
/// Connections beyond `http.max_connections`, for operations routes.
const RESERVE: usize = 64;
/// How long a connection of the reserve may take to send the head of its request.
pub(super) const RESERVE_READ_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a connection of the reserve may last, until its response is written.
pub(super) const RESERVE_TIMEOUT: Duration = Duration::from_secs(5);
/// The largest head of a request.
pub(super) const HEAD_MAX: usize = 32 * 1024;
/// The most that hyper buffers of a request and of a response.
pub(super) const BUFFER_MAX: usize = 64 * 1024;

/// The threads that serve HTTP.
pub(crate) struct HttpServer {
    threads: Vec<HttpThread>,
    /// The threads that still serve connections.
    serving: TaskTracker,
    /// Cancelled when the threads may end. Until then lanes, tunnels and tasks that handlers have spawned run on them.
    released: CancellationToken,
}

struct HttpThread {
    thread: JoinHandle<()>,
    runtime: Handle,
}

/// Accepts and serves the connections of one thread.
pub(super) struct Acceptor {
    /// `None` for plain HTTP.
    tls: Option<Tls>,
    pub(super) router: Arc<Router>,
    pub(super) metrics: Arc<Metrics>,
    builder: Builder,
    reserve_builder: Builder,
    pub(super) http2_builder: http2::Builder<StreamExecutor>,
    pub(super) read_timeout: Duration,
    pub(super) permits: Arc<Semaphore>,
    pub(super) reserve: Arc<Semaphore>,
    pub(super) http2_permits: Arc<Semaphore>,
    pub(super) budget: BufferBudget,
    pub(super) shutdown: Shutdown,
    pub(super) connections: TaskTracker,
}

/// A connection that was just accepted.
pub(super) struct Accepted {
    pub(super) tcp: Tcp,
    pub(super) address: SocketAddr,
    pub(super) permit: ConnectionPermit,
    pub(super) open: OpenConnection,
}

impl HttpServer {
    /// Starts the threads. They serve nothing yet.
    /// Fails when the system provides no thread or runtime.
    pub(crate) fn start(threads: usize) -> std::io::Result<Self> {
        let (serving, released) = (TaskTracker::new(), CancellationToken::new());
        let mut server = Self { threads: Vec::new(), serving, released };
        for n in 0..threads {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let (handle, released) = (runtime.handle().clone(), server.released.clone());
            let thread = std::thread::Builder::new().name(format!("weir-http-{n}")).spawn(move || {
                runtime.block_on(released.cancelled());
                // A blocked thread of the runtime must not delay the stop.
                runtime.shutdown_background();
            })?;
            server.threads.push(HttpThread { thread, runtime: handle });
        }
        Ok(server)
    }

    pub(crate) fn runtimes(&self) -> Vec<Handle> {
        self.threads.iter().map(|thread| thread.runtime.clone()).collect()
    }

    /// Serves the connections of the listeners, one listener per thread, until a stop has closed the last connection.
    pub(crate) fn serve(
        &self,
        listeners: Vec<std::net::TcpListener>,
        tls: Option<&Tls>,
        router: Router,
        app: &App,
    ) {
        let settings = app.settings.http;
        let permits = Arc::new(Semaphore::new(settings.max_connections));
        let http2_permits = Arc::new(Semaphore::new(settings.max_connections.min(HTTP2_CONNECTIONS_MAX)));
        let (router, reserve) = (Arc::new(router), Arc::new(Semaphore::new(RESERVE)));
        for (listener, thread) in listeners.into_iter().zip(&self.threads) {
            let acceptor = Acceptor {
                tls: tls.cloned(),
                router: Arc::clone(&router),
                metrics: Arc::clone(&app.metrics),
                builder: connection_builder(settings),
                reserve_builder: reserve_builder(settings),
                http2_builder: http2_builder(),
                read_timeout: settings.read_timeout,
                permits: Arc::clone(&permits),
                reserve: Arc::clone(&reserve),
                http2_permits: Arc::clone(&http2_permits),
                budget: app.buffers.clone(),
                shutdown: app.shutdown.clone(),
                connections: TaskTracker::new(),
            };
            self.serving.spawn_on(acceptor.serve(listener), &thread.runtime);
        }
        self.serving.close();
    }

    /// Waits until a stop has closed every connection.
    pub(crate) async fn wait_until_closed(&self) {
        self.serving.wait().await;
    }

    /// Ends the threads and waits for them.
    pub(crate) async fn stop_threads(mut self) {
        self.released.cancel();
        let threads = std::mem::take(&mut self.threads);
        let join = move || {
            for HttpThread { thread, .. } in threads {
                // A panic has been logged by its thread.
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
        // A caller that has closed its sending side still gets its response. This also saves one system call per
        // request, with which hyper would look for the end of the connection while a response is under way.
        .half_close(true)
        // Responses are small: copying head and body together costs less than a vectored write.
        .writev(false)
        .max_header_size(HEAD_MAX)
        .max_buf_size(BUFFER_MAX);
    builder
}

/// For connections of the reserve: one request, whose head must arrive soon.
fn reserve_builder(settings: HttpSettings) -> Builder {
    let mut builder = connection_builder(settings);
    builder.keep_alive(false).header_read_timeout(settings.read_timeout.min(RESERVE_READ_TIMEOUT));
    builder
}

impl Acceptor {
    /// Accepts connections until the server stops, then waits until every request under way is answered or disconnected.
    async fn serve(self, listener: std::net::TcpListener) {
        let listener = match TcpListener::from_std(listener) {
            Ok(listener) => listener,
            Err(error) => {
                tracing::error!(%error, "cannot register the HTTP listener with its thread's runtime; the thread accepts no connections");
                return;
            }
        };
        let this = Arc::new(self);
        let closing = this.shutdown.closing().clone();
        while let Some(Some(accepted)) = closing.run_until_cancelled(this.accept(&listener)).await {
            if let Some(tls) = &this.tls {
                this.connections.spawn(Arc::clone(&this).serve_encrypted(tls.clone(), accepted));
            } else {
                let Accepted { tcp, address, permit, open } = accepted;
                let transport = Transport::Plain(tcp);
                let peer = Peer::new(transport, address, permit, this.budget.clone(), Some(open));
                this.connections.spawn(Arc::clone(&this).serve_connection(peer));
            }
        }
        drop(listener);
        this.connections.close();
        this.connections.wait().await;
    }

    /// Accepts the next connection and waits for its permit.
    async fn accept(&self, listener: &TcpListener) -> Option<Accepted> {
        loop {
            match listener.accept().await {
                Ok((stream, address)) => {
                    let permit = self.acquire_permit().await?;
                    let open = OpenConnection::new(&self.metrics);
                    return Some(Accepted { tcp: Tcp::new(stream), address, permit, open });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept an HTTP connection; trying again");
                    tokio::time::sleep(PAUSE_AFTER_ERROR).await;
                }
            }
        }
    }

    /// Returns an ordinary permit, or else one of the reserve. If neither is free, waits for whichever is released first.
    async fn acquire_permit(&self) -> Option<ConnectionPermit> {
        let ordinary = || Arc::clone(&self.permits);
        if let Ok(permit) = ordinary().try_acquire_owned() {
            return Some(ConnectionPermit::ordinary(permit));
        }
        self.metrics.connections_held.inc();
        tokio::select! {
            biased;
            permit = ordinary().acquire_owned() => permit.ok().map(ConnectionPermit::ordinary),
            permit = Arc::clone(&self.reserve).acquire_owned() => {
                permit.ok().map(|permit| ConnectionPermit::in_reserve(permit, ordinary()))
            }
        }
    }

    /// Serves a connection and closes it in a way that lets the caller read its last response.
    pub(super) async fn serve_connection(self: Arc<Self>, peer: Peer) {
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
                // This falls between two responses: a head is only read once the previous response is written (`peer.rs`).
                refuse(peer, ApiError::out_of_memory()).await.is_ok()
            }
            Err(error) => {
                tracing::debug!(peer = %peer.address(), %error, "the connection of a caller failed");
                // hyper answers a head that is malformed or too large before all of it is read.
                error.is_parse() || peer.has_unread_body()
            }
        }
    }

    /// Has hyper serve a connection to its end, or until a stop closes it.
    async fn serve_requests(&self, peer: &Peer) -> hyper::Result<()> {
        let service = service_fn(|request| self.serve_request(peer, request));
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
                    () = self.shutdown.disconnecting().cancelled() => Ok(()),
                }
            }
        }
    }

    async fn serve_request(&self, peer: &Peer, request: Request<Incoming>) -> Result<Response, Detached> {
        let method = request.method().clone();
        peer.begin_request(!request.body().is_end_stream(), || head_length(&request));
        let request = request.map(|body| TrackedBody::new(body, peer));
        let response = self.router.answer(peer, request).await;
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            peer.leave_http1();
        }
        detach(response, &method, peer, &self.connections, &self.shutdown)
    }
}

/// Runs `serving`, but returns `None` if the connection is still in the reserve after [`RESERVE_TIMEOUT`].
pub(super) async fn limit_in_reserve<T>(peer: &Peer, serving: impl Future<Output = T>) -> Option<T> {
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
pub(super) fn head_length<B>(request: &Request<B>) -> usize {
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
    cause.and_then(io::Error::get_ref).is_some_and(|cause| cause.is::<BudgetExhausted>())
}

/// Writes a refusal on a connection on which hyper writes nothing more, or nothing at all.
pub(super) async fn refuse(peer: &Peer, error: ApiError) -> io::Result<()> {
    let mut response = error.into_response();
    let body = std::mem::take(response.body_mut()).collect().await.map_err(io::Error::other)?.to_bytes();
    response.headers_mut().insert(REQUEST_ID, new_request_id());
    response.headers_mut().insert(CONTENT_LENGTH, body.len().into());
    let mut socket = peer.stream();
    socket.write_all(&write_head(&response)).await?;
    socket.write_all(&body).await?;
    socket.flush().await?;
    socket.shutdown().await
}

/// Binds the address with a listener for each thread. Linux spreads connections over the listeners by address and port; on
/// other systems the threads share one listener.
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
    // The first listener does not share the address, so binding fails where another process listens already. It shares it
    // afterwards with the listeners below, which ask for that from the start. The first listener of another server never does.
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

/// Binds an address with a single listener.
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
    use crate::peer::fixtures::{connect, ordinary_permit};

    #[tokio::test(start_paused = true)]
    async fn a_connection_of_the_reserve_times_out_until_it_gets_an_ordinary_permit() {
        let permits = Arc::new(Semaphore::new(1));
        let in_reserve = || {
            let permit = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
            ConnectionPermit::in_reserve(permit, Arc::clone(&permits))
        };
        let budget = BufferBudget::new(0);
        let an_hour = || tokio::time::sleep(Duration::from_secs(3_600));
        let (_client, peer) = connect(ordinary_permit(), budget.clone()).await;
        assert_eq!(limit_in_reserve(&peer, an_hour()).await, Some(()));
        let (_client, peer) = connect(in_reserve(), budget.clone()).await;
        assert_eq!(limit_in_reserve(&peer, an_hour()).await, None);
        assert_eq!(limit_in_reserve(&peer, tokio::time::sleep(RESERVE_READ_TIMEOUT)).await, Some(()));
        let leaving = async {
            assert!(peer.leave_reserve());
            an_hour().await;
        };
        assert_eq!(limit_in_reserve(&peer, leaving).await, Some(()), "it has an ordinary permit now");
    }

    #[test]
    fn only_one_of_several_servers_that_start_at_once_can_bind_an_address() {
        const SERVERS: usize = 6;
        let bind = |address| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(bind(address, 2))
        };
        for round in 0..200 {
            // A port that was free a moment ago.
            let (listeners, address) = bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
            drop(listeners);
            let barrier = Barrier::new(SERVERS);
            let bound: Vec<_> = std::thread::scope(|scope| {
                let start = || {
                    barrier.wait();
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
