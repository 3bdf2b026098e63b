//! How long a wait for the upstream may last.
//!
//! Most calls are answered at once. So no timer is set for each of them: a connection has one, which runs out some time after
//! it was set, and is set anew only then. Nor does every call listen for the end of the server: only one that has lasted for
//! a while does, and until then it is looked for as often as that.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::time::Sleep;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// A wait that lasts longer is a long one.
const SOON: Duration = Duration::from_millis(100);

/// Why a wait is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Over {
    /// It has lasted long enough.
    Late,
    /// The server stops.
    Stopping,
}

/// Ends waits.
#[derive(Default)]
pub(super) struct Alarm {
    /// None until the first wait.
    wait: Option<Wait>,
    timer: Option<Pin<Box<Sleep>>>,
    /// There once a call has waited for long.
    stopping: Option<Pin<Box<WaitForCancellationFutureOwned>>>,
}

#[derive(Clone, Copy)]
struct Wait {
    since: Instant,
    until: Instant,
}

impl Alarm {
    /// Begins with another call.
    pub(super) fn begin(&mut self, since: Instant, limit: Duration) {
        self.stopping = None;
        self.prolong(since, limit);
    }

    /// Goes on with a call: it waits for something else now.
    pub(super) fn prolong(&mut self, since: Instant, limit: Duration) {
        self.wait = Some(Wait { since, until: since + limit });
    }

    /// Ready when the wait is over.
    pub(super) fn poll(&mut self, context: &mut Context<'_>, stop: &CancellationToken) -> Poll<Over> {
        let Some(Wait { since, until }) = self.wait else { return Poll::Pending };
        if self.poll_stopping(context).is_ready() {
            return Poll::Ready(Over::Stopping);
        }
        let soon = (since + SOON).min(until);
        let mut next = if self.stopping.is_some() { until } else { soon };
        let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(next.into())));
        if timer.deadline() > next.into() {
            timer.as_mut().reset(next.into());
        }
        while timer.as_mut().poll(context).is_ready() {
            let now = Instant::now();
            if now >= until {
                return Poll::Ready(Over::Late);
            }
            if now >= soon && self.stopping.is_none() {
                let mut stopping = Box::pin(stop.clone().cancelled_owned());
                if stopping.as_mut().poll(context).is_ready() {
                    return Poll::Ready(Over::Stopping);
                }
                self.stopping = Some(stopping);
                next = until;
            }
            timer.as_mut().reset(next.into());
        }
        Poll::Pending
    }

    fn poll_stopping(&mut self, context: &mut Context<'_>) -> Poll<()> {
        self.stopping.as_mut().map_or(Poll::Pending, |stopping| stopping.as_mut().poll(context))
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    async fn over(alarm: &mut Alarm, stop: &CancellationToken) -> Over {
        poll_fn(|context| alarm.poll(context, stop)).await
    }

    #[tokio::test]
    async fn a_wait_ends_when_its_time_has_come_whatever_was_waited_for_before() {
        let (mut alarm, stop) = (Alarm::default(), CancellationToken::new());
        let idle = Duration::from_millis(1);
        // A timer that is set for later than this wait may last.
        for limit in [LIMIT, idle, LIMIT, idle] {
            alarm.begin(Instant::now(), limit);
            if limit == idle {
                assert_eq!(over(&mut alarm, &stop).await, Over::Late);
            } else {
                let polled = poll_fn(|context| Poll::Ready(alarm.poll(context, &stop))).await;
                assert_eq!(polled, Poll::Pending);
            }
        }
    }

    #[tokio::test]
    async fn a_stop_ends_a_wait_that_has_begun_and_one_that_begins() {
        let (mut alarm, stop) = (Alarm::default(), CancellationToken::new());
        alarm.begin(Instant::now(), LIMIT);
        let ended = poll_fn(|context| {
            let polled = alarm.poll(context, &stop);
            if alarm.stopping.is_some() {
                // It listens, and is told.
                stop.cancel();
            }
            polled
        })
        .await;
        assert_eq!(ended, Over::Stopping);
        alarm.begin(Instant::now(), LIMIT);
        assert_eq!(over(&mut alarm, &stop).await, Over::Stopping);
    }

    #[tokio::test]
    async fn a_wait_that_is_prolonged_lasts_until_its_last_limit() {
        let (mut alarm, stop) = (Alarm::default(), CancellationToken::new());
        let began = Instant::now();
        alarm.begin(began, Duration::from_millis(20));
        let _pending = poll_fn(|context| Poll::Ready(alarm.poll(context, &stop))).await;
        alarm.prolong(began, Duration::from_millis(300));
        assert_eq!(over(&mut alarm, &stop).await, Over::Late);
        assert!(began.elapsed() >= Duration::from_millis(300));
    }
}
