//! Connections to the upstream, and those that wait for another call.
//!
//! One that waits is moved by nobody; it is looked at when it is taken out again. It belongs to neither way of making a call,
//! and the next one may go the other.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, ReadBuf};

use super::alarm::Alarm;
use crate::outbound::connect::Stream;

/// How long a connection waits for another call: shorter than most servers keep one that nobody uses.
const IDLE: Duration = Duration::from_secs(4);

/// How often the pool is swept.
pub(super) const SWEPT_EVERY: Duration = IDLE;

/// A connection over which nothing is under way.
pub(super) struct Line {
    pub(super) stream: Stream,
    /// Whether it has carried a call before.
    pub(super) is_used: bool,
    pub(super) alarm: Alarm,
}

impl Line {
    pub(super) fn new(stream: Stream) -> Self {
        Self { stream, is_used: false, alarm: Alarm::default() }
    }

    /// Whether another call can be made over it: it has not ended, and the upstream has said nothing that nobody asked for.
    fn is_good(&mut self) -> bool {
        if !self.stream.is_plain() {
            // Encrypted, there may be something to read that is nothing to us. It is taken here.
            let context = &mut Context::from_waker(Waker::noop());
            let mut byte = [0];
            if Pin::new(&mut self.stream).poll_read(context, &mut ReadBuf::new(&mut byte)).is_ready() {
                return false;
            }
        }
        self.stream.is_quiet()
    }
}

/// Since when each has waited, the last one last.
type Idle = VecDeque<(Instant, Line)>;

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
    pub(super) fn take(&self, now: Instant) -> Option<Line> {
        loop {
            let (since, mut line) = self.lock().pop_back()?;
            if now.saturating_duration_since(since) < IDLE && line.is_good() {
                return Some(line);
            }
        }
    }

    /// Keeps a connection whose call is over for another one.
    pub(super) fn keep(&self, mut line: Line, now: Instant) {
        line.is_used = true;
        let mut idle = self.lock();
        if idle.len() < self.max {
            idle.push_back((now, line));
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

    /// Whether any waits, good or not.
    #[cfg(test)]
    pub(super) fn has_kept(&self) -> bool {
        !self.lock().is_empty()
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
