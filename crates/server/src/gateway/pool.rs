//! Connections to an upstream that wait for another call.
//!
//! One that waits is polled by nobody; it is looked at when it is taken out again. Each thread that serves HTTP has its own,
//! because a connection belongs to the runtime that opened it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

use super::connection::UpstreamConnection;

/// How long a connection waits for another call: shorter than most servers keep one that nobody uses.
const IDLE_TIMEOUT: Duration = Duration::from_secs(4);

/// How often the pool is swept.
pub(super) const SWEEP_EVERY: Duration = IDLE_TIMEOUT;

/// Idle connections of one thread with the time each became idle, oldest first.
type Idle = VecDeque<(Instant, Box<UpstreamConnection>)>;

/// Connections that wait for another call.
#[derive(Clone)]
pub(super) struct Pool {
    threads: Arc<[Mutex<Idle>]>,
    /// The most that each thread keeps.
    max: usize,
}

impl Pool {
    pub(super) fn new(max: usize, threads: usize) -> Self {
        Self { threads: (0..threads).map(|_| Mutex::default()).collect(), max: max.div_ceil(threads) }
    }

    /// The connection that this thread used last, of those that can be used again.
    pub(super) fn take(&self) -> Option<Box<UpstreamConnection>> {
        let now = Instant::now();
        loop {
            let (since, mut connection) = self.own().pop_back()?;
            if now.saturating_duration_since(since) < IDLE_TIMEOUT && connection.is_reusable() {
                return Some(connection);
            }
        }
    }

    /// Keeps a connection for another call, if its own is over.
    pub(super) fn put(&self, mut connection: Box<UpstreamConnection>) {
        if !connection.is_finished() {
            return;
        }
        connection.is_used = true;
        let mut idle = self.own();
        if idle.len() < self.max {
            idle.push_back((Instant::now(), connection));
        }
    }

    /// Closes what nobody has used for a while.
    pub(super) fn sweep(&self) {
        for thread in &*self.threads {
            let mut expired = Vec::new();
            let mut idle = thread.lock();
            while idle.front().is_some_and(|(since, _)| since.elapsed() >= IDLE_TIMEOUT) {
                expired.extend(idle.pop_front());
            }
            // Connections are closed without the lock.
            drop(idle);
        }
    }

    /// The connections of this thread.
    fn own(&self) -> MutexGuard<'_, Idle> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        thread_local! {
            static NUMBER: usize = NEXT.fetch_add(1, Ordering::Relaxed);
        }
        let number = NUMBER.with(|number| *number);
        self.threads[number % self.threads.len()].lock()
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("max", &self.max).finish_non_exhaustive()
    }
}
