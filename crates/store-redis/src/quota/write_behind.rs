//! Brings the store's counts to what was used: reservations that nobody has taken from for a while are given back, and
//! all of this server's when it stops. A while is a second, and one more for every thousand users who send at the same
//! time: they come by less often, and what is given back too soon has to be reserved again.
//!
//! Redis lets go of the places first, then the store gets them; what happens in between can only lose them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use weir_core::UserId;
use weir_store::quota::UnusedReservation;

use super::{Parts, key, reply};
use crate::client::Item;
use crate::script::Script;

/// How long nobody takes from a reservation before it is given back, while few users send.
const IDLE_AFTER: Duration = Duration::from_secs(1);
/// And at most.
const IDLE_AFTER_MAX: Duration = Duration::from_secs(30);
/// Every so many users add [`IDLE_AFTER`] once more.
const USERS_PER_STEP: usize = 1_000;
/// How often reservations are looked at.
const LOOK: Duration = Duration::from_millis(500);
/// Users in one commit.
const BATCH: usize = 500;
/// Users whose reservations are known. When there are more, none is waited for.
const TRACKED_MAX: usize = 100_000;
/// Users that are known while those before them are given back, which may take long. Places of further ones stay counted until
/// their windows end: that is the safe side.
const KNOWN_MAX: usize = 2 * TRACKED_MAX;

#[derive(Debug)]
pub(crate) struct WriteBehind {
    inner: Arc<Inner>,
    closing: CancellationToken,
    tasks: TaskTracker,
}

#[derive(Debug)]
struct Inner {
    parts: Arc<Parts>,
    /// When this server last took a place of a user's reservation.
    tracked: Mutex<HashMap<UserId, Instant>>,
}

impl WriteBehind {
    pub(crate) fn start(parts: Arc<Parts>) -> Self {
        let inner = Arc::new(Inner { parts, tracked: Mutex::default() });
        let (closing, tasks) = (CancellationToken::new(), TaskTracker::new());
        let look = {
            let inner = Arc::clone(&inner);
            async move {
                loop {
                    tokio::time::sleep(LOOK).await;
                    inner.settle(inner.idle()).await;
                }
            }
        };
        tasks.spawn(closing.clone().run_until_cancelled_owned(look));
        tasks.close();
        Self { inner, closing, tasks }
    }

    /// Takes note that places of these users were taken.
    pub(crate) fn track<'a>(&self, users: impl Iterator<Item = &'a UserId>) {
        let now = Instant::now();
        let mut tracked = self.inner.tracked.lock();
        users.for_each(|user| note(&mut tracked, user, now));
    }

    /// Gives everything back.
    pub(crate) async fn close(&self) {
        self.closing.cancel();
        self.tasks.wait().await;
        let all = self.inner.tracked.lock().drain().map(|(user, _)| user).collect();
        self.inner.settle(all).await;
    }
}

impl Drop for WriteBehind {
    fn drop(&mut self) {
        self.closing.cancel();
    }
}

impl Inner {
    fn idle(&self) -> Vec<UserId> {
        let mut tracked = self.tracked.lock();
        let is_full = tracked.len() > TRACKED_MAX;
        let after = idle_after(tracked.len());
        let idle = tracked.extract_if(|_, at| is_full || at.elapsed() >= after);
        idle.map(|(user, _)| user).collect()
    }

    async fn settle(&self, users: Vec<UserId>) {
        for users in users.chunks(BATCH) {
            let items: Vec<_> =
                users.iter().map(|user| Item { key: key(user), arguments: Vec::new() }).collect();
            let epoch = self.parts.epoch();
            let answers = self.parts.redis.call(Script::Release, &[&epoch], &items).await;
            let unused: Vec<_> = users
                .iter()
                .zip(answers)
                .filter_map(|(user, answer)| {
                    let (window, units) = reply::released(&answer.ok()?)?;
                    Some(UnusedReservation { user: user.clone(), window, units })
                })
                .collect();
            if unused.is_empty() {
                continue;
            }
            if let Err(error) = self.parts.store.return_unused(unused).await {
                tracing::warn!(error = %error.with_causes(), "unused places stay counted until their windows end");
            }
        }
    }
}

fn note(tracked: &mut HashMap<UserId, Instant>, user: &UserId, now: Instant) {
    if let Some(at) = tracked.get_mut(user) {
        *at = now;
    } else if tracked.len() < KNOWN_MAX {
        tracked.insert(user.clone(), now);
    }
}

fn idle_after(users: usize) -> Duration {
    let steps = u32::try_from(users / USERS_PER_STEP).unwrap_or(u32::MAX).saturating_add(1);
    IDLE_AFTER.saturating_mul(steps).min(IDLE_AFTER_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_users_are_known_than_the_bound() {
        let (mut tracked, now) = (HashMap::new(), Instant::now());
        for n in 0..KNOWN_MAX + 10 {
            note(&mut tracked, &UserId::parse(n.to_string()).unwrap(), now);
        }
        assert_eq!(tracked.len(), KNOWN_MAX);
    }

    #[test]
    fn the_more_users_send_the_longer_a_reservation_is_kept() {
        assert_eq!(idle_after(1), Duration::from_secs(1));
        assert_eq!(idle_after(10_000), Duration::from_secs(11));
        assert_eq!(idle_after(1_000_000), IDLE_AFTER_MAX);
    }
}
