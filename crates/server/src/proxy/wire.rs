//! Connections to the upstream, and those that wait for another call.
//!
//! A connection is moved on by whoever waits for its answer, in the same task, and not by a task of its own: a call then
//! costs no switch between tasks, and a caller that is dropped takes the call with it. One that waits in the pool is moved
//! by nobody; it is looked at when it is taken out again.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper_util::rt::TokioIo;

use super::upload::Upload;
use crate::outbound::connect::{Probe, Stream};

/// How long a connection waits for another call: shorter than most servers keep one that nobody uses.
const IDLE: Duration = Duration::from_secs(4);
/// How long the head of an answer may be.
const HEAD_BYTES_MAX: usize = 64 * 1024;

type Sent = Result<Response<Incoming>, TrySendError<Request<Upload>>>;

/// A connection to the upstream.
pub(super) struct Wire {
    sender: SendRequest<Upload>,
    /// None once it has ended.
    connection: Option<BoxFuture<'static, hyper::Result<()>>>,
    probe: Probe,
    /// Whether it has carried a call before.
    pub(super) is_used: bool,
}

impl Wire {
    /// Speaks HTTP/1.1 over a stream.
    pub(super) async fn new(stream: TokioIo<Stream>) -> io::Result<Box<Self>> {
        let probe = stream.inner().probe()?;
        let (sender, connection) = builder().handshake(stream).await.map_err(io::Error::other)?;
        let connection = Some(connection.with_upgrades().boxed());
        Ok(Box::new(Self { sender, connection, probe, is_used: false }))
    }

    /// Reads and writes what there is.
    pub(super) fn drive(&mut self, context: &mut Context<'_>) {
        if let Some(connection) = &mut self.connection
            && let Poll::Ready(ended) = connection.poll_unpin(context)
        {
            if let Err(error) = ended {
                tracing::debug!(%error, "a connection to the upstream ended badly");
            }
            self.connection = None;
        }
    }

    /// Whether there is nothing more to read or write, or somebody else does.
    pub(super) const fn has_ended(&self) -> bool {
        self.connection.is_none()
    }

    /// Sends a request and waits for the head of the answer.
    pub(super) async fn send(&mut self, request: Request<Upload>) -> Sent {
        let mut answer = pin!(self.sender.try_send_request(request));
        poll_fn(|context| {
            if let Poll::Ready(sent) = answer.as_mut().poll(context) {
                return Poll::Ready(sent);
            }
            self.drive(context);
            answer.as_mut().poll(context)
        })
        .await
    }

    /// Whether another call can be made. Looks for the end of the connection.
    fn is_ready(&mut self) -> bool {
        self.drive(&mut Context::from_waker(Waker::noop()));
        self.connection.is_some() && self.sender.is_ready() && !self.probe.has_ended()
    }
}

/// How the upstream is spoken to.
fn builder() -> Builder {
    let mut builder = Builder::new();
    builder.max_buf_size(HEAD_BYTES_MAX);
    builder
}

/// Since when each has waited, the last one last.
type Idle = VecDeque<(Instant, Box<Wire>)>;

/// Connections that wait for another call.
#[derive(Clone)]
pub(super) struct Pool {
    idle: Arc<Mutex<Idle>>,
    max: usize,
}

impl Pool {
    pub(super) fn new(max: usize) -> Self {
        Self { idle: Arc::default(), max }
    }

    /// The connection used last, of those that are still good.
    pub(super) fn take(&self) -> Option<Box<Wire>> {
        loop {
            let (since, mut wire) = self.lock().pop_back()?;
            if since.elapsed() < IDLE && wire.is_ready() {
                return Some(wire);
            }
        }
    }

    /// Keeps a connection for another call, if it can carry one.
    pub(super) fn keep(&self, mut wire: Box<Wire>) {
        if !wire.is_ready() {
            return;
        }
        wire.is_used = true;
        let mut idle = self.lock();
        if idle.len() < self.max {
            idle.push_back((Instant::now(), wire));
        }
    }

    /// Closes what nobody has used for a while.
    pub(super) fn sweep(&self) {
        let mut expired = Vec::new();
        let mut idle = self.lock();
        while idle.front().is_some_and(|(since, _)| since.elapsed() >= IDLE) {
            expired.extend(idle.pop_front());
        }
        drop(idle);
    }

    /// A thread that panicked while it had the lock has left whole connections.
    fn lock(&self) -> MutexGuard<'_, Idle> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("max", &self.max).finish_non_exhaustive()
    }
}

/// How often the pool is swept.
pub(super) const SWEPT_EVERY: Duration = IDLE;
