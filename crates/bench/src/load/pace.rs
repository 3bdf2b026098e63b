//! When a connection may send its next request: at once (closed loop), or when its ticket is due (open loop).

use std::io;
use std::sync::Arc;
use std::time::Instant;

use super::Run;
use super::schedule::Tickets;

pub(super) enum Pace {
    /// Each response starts the next request.
    Closed,
    /// The schedule starts requests.
    Open { tickets: Arc<Tickets>, alarm: Alarm },
}

/// A request to send now.
#[derive(Clone, Copy)]
pub(super) struct Turn {
    /// The start of its latency.
    pub(super) due: Instant,
    /// The start of its timeout.
    pub(super) sent: Instant,
}

impl Pace {
    pub(super) fn new(run: &Run) -> io::Result<Self> {
        Ok(match &run.tickets {
            None => Self::Closed,
            Some(tickets) => Self::Open { tickets: Arc::clone(tickets), alarm: Alarm::new()? },
        })
    }

    /// Waits for the next turn. Returns `None` when the run is over. `now` is when the last response arrived.
    pub(super) async fn next(&mut self, run: &Run, now: Instant) -> Option<Turn> {
        if run.is_over(now) {
            return None;
        }
        let Self::Open { tickets, alarm } = self else {
            return Some(Turn { due: now, sent: now });
        };
        let due = tickets.take();
        if due >= run.end {
            return None;
        }
        alarm.wait_until(due, now).await;
        Some(Turn { due, sent: Instant::now() })
    }
}

/// A timer with the kernel's precision. The runtime's timer rounds to a millisecond, more than what is measured.
#[cfg(target_os = "linux")]
pub(super) struct Alarm {
    timer: tokio::io::unix::AsyncFd<std::os::fd::OwnedFd>,
}

#[cfg(target_os = "linux")]
impl Alarm {
    fn new() -> io::Result<Self> {
        use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        #[expect(deprecated, reason = "its successor is unsafe; an OwnedFd is what makes this one sound")]
        let timer = tokio::io::unix::AsyncFd::new(timer)?;
        Ok(Self { timer })
    }

    async fn wait_until(&mut self, due: Instant, now: Instant) {
        use rustix::time::{Itimerspec, TimerfdTimerFlags, Timespec, timerfd_settime};
        let wait = due.saturating_duration_since(now);
        let Ok(it_value) = Timespec::try_from(wait) else {
            return;
        };
        if wait.is_zero() {
            return;
        }
        let it_interval = Timespec { tv_sec: 0, tv_nsec: 0 };
        let spec = Itimerspec { it_interval, it_value };
        // Neither call fails on a valid timer. If one did, the request would be sent early, not lost.
        if timerfd_settime(self.timer.get_ref(), TimerfdTimerFlags::empty(), &spec).is_err() {
            return;
        }
        if let Ok(mut fired) = self.timer.readable().await {
            // Setting the timer again resets its count, so there is no need to read it.
            fired.clear_ready();
        }
    }
}

/// Other systems use the runtime's timer.
#[cfg(not(target_os = "linux"))]
pub(super) struct Alarm;

#[cfg(not(target_os = "linux"))]
impl Alarm {
    fn new() -> io::Result<Self> {
        Ok(Self)
    }

    async fn wait_until(&mut self, due: Instant, _now: Instant) {
        tokio::time::sleep_until(due.into()).await;
    }
}
