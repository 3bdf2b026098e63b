//! Gives unused units back to the store: those of reservations that are idle, and all of this server's when it stops. Idle
//! means unused for a second, plus one more for every thousand users who send at the same time: each of them sends less
//! often, and units that are given back too soon have to be reserved again.
//!
//! Redis releases the units first, then the store takes them back. A failure in between can only lose units.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use weir_core::UserId;
use weir_store::quota::UnusedReservation;

use super::reply::parse_release;
use super::{SharedQuota, key};
use crate::client::KeyCall;
use crate::script::Script;

/// How long a reservation is unused before it is given back, while few users send.
const IDLE_AFTER: Duration = Duration::from_secs(1);
/// The upper bound of that time, however many users send.
const IDLE_AFTER_MAX: Duration = Duration::from_secs(30);
/// Each step of this many users adds [`IDLE_AFTER`] once.
const USERS_PER_STEP: usize = 1_000;
/// How often idle reservations are looked for.
const SCAN_EVERY: Duration = Duration::from_millis(500);
/// Users in one commit.
const BATCH_MAX: usize = 500;
/// With more tracked users than this, all reservations are given back at once, idle or not.
const GIVE_BACK_ALL_ABOVE: usize = 100_000;
/// The most users that are tracked, since giving back may take long. Unused units of further users stay counted until their
/// windows end, which is safe.
const TRACKED_MAX: usize = 2 * GIVE_BACK_ALL_ABOVE;

#[derive(Debug)]
pub(crate) struct WriteBehind {
    reservations: Arc<Reservations>,
    closing: CancellationToken,
    tasks: TaskTracker,
}

#[derive(Debug)]
struct Reservations {
    shared: Arc<SharedQuota>,
    /// When this server last used each user's reservation.
    tracked: Mutex<HashMap<UserId, Instant>>,
}

impl WriteBehind {
    pub(crate) fn start(shared: Arc<SharedQuota>) -> Self {
        let reservations = Arc::new(Reservations { shared, tracked: Mutex::default() });
        let (closing, tasks) = (CancellationToken::new(), TaskTracker::new());
        let scan = {
            let reservations = Arc::clone(&reservations);
            async move {
                loop {
                    tokio::time::sleep(SCAN_EVERY).await;
                    reservations.give_back(reservations.take_idle()).await;
                }
            }
        };
        tasks.spawn(closing.clone().run_until_cancelled_owned(scan));
        tasks.close();
        Self { reservations, closing, tasks }
    }

    /// Records that reservations of these users were used just now.
    pub(crate) fn track<'a>(&self, users: impl Iterator<Item = &'a UserId>) {
        let now = Instant::now();
        let mut tracked = self.reservations.tracked.lock();
        users.for_each(|user| track_user(&mut tracked, user, now));
    }

    /// Stops the scan and gives back all reservations of this server.
    pub(crate) async fn close(&self) {
        self.closing.cancel();
        self.tasks.wait().await;
        let all = self.reservations.tracked.lock().drain().map(|(user, _)| user).collect();
        self.reservations.give_back(all).await;
    }
}

impl Drop for WriteBehind {
    fn drop(&mut self) {
        self.closing.cancel();
    }
}

impl Reservations {
    /// Removes the users with idle reservations from the tracked ones and returns them.
    fn take_idle(&self) -> Vec<UserId> {
        let mut tracked = self.tracked.lock();
        let is_full = tracked.len() > GIVE_BACK_ALL_ABOVE;
        let after = idle_after(tracked.len());
        let idle = tracked.extract_if(|_, at| is_full || at.elapsed() >= after);
        idle.map(|(user, _)| user).collect()
    }

    async fn give_back(&self, users: Vec<UserId>) {
        for users in users.chunks(BATCH_MAX) {
            let calls: Vec<_> =
                users.iter().map(|user| KeyCall { key: key(user), arguments: Vec::new() }).collect();
            let epoch = self.shared.epoch();
            let replies = self.shared.redis.call_each(Script::QuotaRelease, &[&epoch], &calls).await;
            let unused: Vec<_> = users
                .iter()
                .zip(replies)
                .filter_map(|(user, reply)| {
                    let (window, units) = parse_release(&reply.ok()?)?;
                    Some(UnusedReservation { user: user.clone(), window, units })
                })
                .collect();
            if unused.is_empty() {
                continue;
            }
            if let Err(error) = self.shared.store.return_unused(unused).await {
                tracing::warn!(error = %error.with_causes(), "cannot give back unused quota; it stays counted until its windows end");
            }
        }
    }
}

fn track_user(tracked: &mut HashMap<UserId, Instant>, user: &UserId, now: Instant) {
    if let Some(at) = tracked.get_mut(user) {
        *at = now;
    } else if tracked.len() < TRACKED_MAX {
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
    fn tracked_users_are_bounded() {
        let (mut tracked, now) = (HashMap::new(), Instant::now());
        for n in 0..TRACKED_MAX + 10 {
            track_user(&mut tracked, &UserId::parse(n.to_string()).unwrap(), now);
        }
        assert_eq!(tracked.len(), TRACKED_MAX);
    }

    #[test]
    fn reservations_are_kept_longer_the_more_users_send() {
        assert_eq!(idle_after(1), Duration::from_secs(1));
        assert_eq!(idle_after(10_000), Duration::from_secs(11));
        assert_eq!(idle_after(1_000_000), IDLE_AFTER_MAX);
    }
}
