//! The listener: accepts connections up to a number, bounds how slowly a request may come, and closes them in order.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::BoxError;
use http::Request;
use hyper::server::conn::http1::Builder;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

use super::caller::{Bytes, Caller};
use super::endless::leave;
use super::envelope::answer;
use super::router::Routes;
use super::short::{End, Way};
use super::{ai, sale};
use crate::config::http::HttpSettings;
use crate::telemetry::metrics::Metrics;

/// The pause after the system could give no connection (no file descriptors left, say).
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(50);

/// The routes where callers wait for something to happen.
const WAITING: [&str; 2] = ["/v1/requests/", "/admin/queue/claim"];

/// Serves until told to stop, then until every request under way is answered.
pub async fn serve(
    listener: TcpListener,
    routes: Routes,
    settings: HttpSettings,
    metrics: Arc<Metrics>,
    closing: CancellationToken,
) {
    let mut builder = Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(settings.read_timeout)
        // A caller that has said all may still listen. It also spares looking for the end of the connection, one
        // system call a request, while an answer is under way.
        .half_close(true)
        // Answers are small: copying head and body together costs less than having the kernel gather them.
        .writev(false);
    // hyper-util's own does not know connections that may become tunnels.
    let (stopping, stopped) = watch::channel(());
    let permits = Arc::new(Semaphore::new(settings.max_connections));
    loop {
        let caller = tokio::select! {
            accepted = accept(&listener, &permits, &metrics) => accepted,
            () = closing.cancelled() => break,
        };
        let connection = Connection {
            caller,
            routes: routes.clone(),
            metrics: Arc::clone(&metrics),
            builder: builder.clone(),
            read_timeout: settings.read_timeout,
        };
        let stop = stopped.clone();
        tokio::spawn(async move {
            if let Err(error) = connection.serve(&stop).await {
                tracing::debug!(%error, "a connection ended badly");
            }
            // Held until here: this is what the end of serving waits for.
            drop(stop);
        });
    }
    drop((listener, stopped));
    let _ = stopping.send(());
    stopping.closed().await;
}

/// A connection, and what its requests are answered with.
struct Connection {
    caller: Caller,
    routes: Routes,
    metrics: Arc<Metrics>,
    builder: Builder,
    read_timeout: Duration,
}

impl Connection {
    /// Serves it to its end.
    async fn serve(self, stop: &watch::Receiver<()>) -> Result<(), BoxError> {
        let mut bytes = self.caller.bytes();
        let (routes, metrics) = (&self.routes, &self.metrics);
        let way = Way { caller: &self.caller, routes, metrics, read_timeout: self.read_timeout };
        match way.serve(&mut bytes, stop).await? {
            End::Over => Ok(()),
            End::Handed(read) => {
                bytes.unread(read);
                // In memory of its own, and only for those who need it.
                Box::pin(self.hand_over(bytes, stop.clone())).await
            }
        }
    }

    /// Has hyper serve the rest of it.
    async fn hand_over(self, bytes: Bytes, mut stop: watch::Receiver<()>) -> Result<(), BoxError> {
        let Self { caller, routes, metrics, builder, .. } = self;
        let service = service_fn({
            let stop = Arc::new(stop.clone());
            move |mut request| {
                let (routes, metrics, caller) = (routes.clone(), Arc::clone(&metrics), caller.clone());
                let (method, stop) = (request.method().clone(), Arc::clone(&stop));
                introduce(&caller, &mut request);
                async move { leave(answer(routes, &metrics, request).await, &method, &caller, &stop) }
            }
        });
        let mut connection = pin!(builder.serve_connection(TokioIo::new(bytes), service).with_upgrades());
        tokio::select! {
            biased;
            ended = connection.as_mut() => ended?,
            _ = stop.changed() => {
                connection.as_mut().graceful_shutdown();
                connection.await?;
            }
        }
        Ok(())
    }
}

/// Tells the handler who calls, where it wants to know: everywhere else that would be memory for nothing.
pub(super) fn introduce<B>(caller: &Caller, request: &mut Request<B>) {
    let path = request.uri().path();
    let mut prefixes = sale::PREFIXES.iter().chain(&WAITING);
    if path.starts_with(ai::PREFIX) || prefixes.any(|prefix| path.starts_with(prefix)) {
        request.extensions_mut().insert(caller.clone());
    }
}

/// The next connection, once there is room for it.
async fn accept(listener: &TcpListener, permits: &Arc<Semaphore>, metrics: &Arc<Metrics>) -> Caller {
    if permits.available_permits() == 0 {
        metrics.connections_held.inc();
    }
    loop {
        let Ok(permit) = Arc::clone(permits).acquire_owned().await else {
            // The semaphore is never closed.
            std::future::pending::<()>().await;
            continue;
        };
        match listener.accept().await {
            Ok((stream, address)) => {
                // Answers are written whole; waiting to fill a packet only delays them.
                let _ = stream.set_nodelay(true);
                return Caller::new(stream, address, permit, Arc::clone(metrics));
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(PAUSE_AFTER_ERROR).await;
            }
        }
    }
}

/// Binds the address, with a backlog for the connections that come in a burst.
///
/// # Errors
/// When the address is in use or not this machine's.
pub async fn bind(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket =
        if address.is_ipv4() { tokio::net::TcpSocket::new_v4()? } else { tokio::net::TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(4_096)
}
