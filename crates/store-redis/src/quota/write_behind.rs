//! What the store learns later: which reserved units were sent, twice a second; and which were not used, once their user has sent
//! nothing for a while, and of all users when this server stops.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use weir_core::{Timestamp, UserId};
use weir_store::Result;
use weir_store::quota::ReservedUnits;

use super::SharedQuota;
use super::give_back::give_back;

/// How often the store is told what was sent. Its counts are behind by this and the time of a statement.
const RECORD_EVERY: Duration = Duration::from_millis(500);
/// How often idle reservations are looked for.
const SCAN_EVERY: Duration = Duration::from_millis(500);
/// Users in one commit.
const BATCH_MAX: usize = 500;
/// With more tracked users than this, reservations are kept for [`KEEP_WHEN_FULL`] only.
const TRACKED_LONG_MAX: usize = 100_000;
/// How long a reservation is kept without sends while too many are tracked.
const KEEP_WHEN_FULL: Duration = Duration::from_secs(1);
/// The most users that are tracked, since giving back may take long. Of further users unused units stay counted until their
/// windows end, which is safe, and units that were sent are shown as reserved.
const TRACKED_MAX: usize = 2 * TRACKED_LONG_MAX;

#[derive(Debug)]
pub(crate) struct WriteBehind {
    reservations: Arc<Reservations>,
    closing: CancellationToken,
    tasks: TaskTracker,
}

#[derive(Debug)]
struct Reservations {
    shared: Arc<SharedQuota>,
    /// How long a reservation is kept without sends.
    keep: Duration,
    /// When this server last used each user's reservation.
    tracked: Mutex<HashMap<UserId, Instant>>,
    /// What this server has granted and the store does not show as sent yet.
    unrecorded: Mutex<HashMap<UserId, Unrecorded>>,
}

/// Granted units of a window that the store does not show as sent yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Unrecorded {
    /// The start of the window.
    pub(crate) window: Timestamp,
    pub(crate) units: u32,
}

impl Unrecorded {
    /// Adds units. Those of another window replace what is left of the one before, which is over.
    pub(crate) fn add(&mut self, more: Self) {
        if more.units > 0 {
            let before = if self.window == more.window { self.units } else { 0 };
            *self = Self { units: before.saturating_add(more.units), ..more };
        }
    }

    /// Removes units that were recorded.
    fn subtract(&mut self, recorded: Self) {
        if self.window == recorded.window {
            self.units = self.units.saturating_sub(recorded.units);
        }
    }
}

impl WriteBehind {
    pub(crate) fn start(shared: Arc<SharedQuota>, keep: Duration) -> Self {
        let (tracked, unrecorded) = (Mutex::default(), Mutex::default());
        let reservations = Arc::new(Reservations { shared, keep, tracked, unrecorded });
        let (closing, tasks) = (CancellationToken::new(), TaskTracker::new());
        let record = record_periodically(Arc::clone(&reservations));
        tasks.spawn(closing.clone().run_until_cancelled_owned(record));
        let scan = {
            let (reservations, closing) = (Arc::clone(&reservations), closing.clone());
            async move {
                // What has left Redis goes to the store, also when this server stops meanwhile.
                while closing.run_until_cancelled(tokio::time::sleep(SCAN_EVERY)).await.is_some() {
                    let (users, idle_for) = reservations.take_idle();
                    reservations.give_back(users, idle_for).await;
                }
            }
        };
        tasks.spawn(scan);
        tasks.close();
        Self { reservations, closing, tasks }
    }

    /// Records that reservations of these users were used just now, and what of them the store has to be told.
    pub(crate) fn track<'a>(&self, users: impl Iterator<Item = (&'a UserId, Unrecorded)>) {
        let now = Instant::now();
        let mut tracked = self.reservations.tracked.lock();
        let mut unrecorded = self.reservations.unrecorded.lock();
        for (user, units) in users {
            if let Some(used_at) = find_or_track(&mut tracked, user, now) {
                *used_at = now;
            }
            if units.units > 0
                && let Some(before) = find_or_track(&mut unrecorded, user, Unrecorded::default())
            {
                before.add(units);
            }
        }
    }

    /// What this server has granted to the user and the store may not show as sent yet.
    pub(crate) fn unrecorded(&self, user: &UserId) -> Unrecorded {
        self.reservations.unrecorded.lock().get(user).copied().unwrap_or_default()
    }

    /// Stops the tasks, records what was sent and gives back all reservations of this server.
    pub(crate) async fn close(&self) {
        self.closing.cancel();
        self.tasks.wait().await;
        if let Err(error) = self.reservations.record().await {
            tracing::warn!(error = %error.with_causes(), "cannot record what was sent; it is shown as reserved until its windows end");
        }
        let all = self.reservations.tracked.lock().drain().map(|(user, _)| user).collect();
        self.reservations.give_back(all, Duration::ZERO).await;
    }
}

impl Drop for WriteBehind {
    fn drop(&mut self) {
        self.closing.cancel();
    }
}

/// What could not be recorded is tried again with the next time.
async fn record_periodically(reservations: Arc<Reservations>) {
    let mut was_recorded = true;
    loop {
        tokio::time::sleep(RECORD_EVERY).await;
        let recorded = reservations.record().await;
        if let Err(error) = &recorded
            && was_recorded
        {
            tracing::warn!(error = %error.with_causes(), "cannot record in the store what Redis has allowed; its counts are behind until it answers");
        }
        was_recorded = recorded.is_ok();
    }
}

impl Reservations {
    /// Shows the units that this server has granted as sent in the store.
    async fn record(&self) -> Result<()> {
        let sent: Vec<_> =
            self.unrecorded.lock().iter().map(|(user, units)| (user.clone(), *units)).collect();
        for sent in sent.chunks(BATCH_MAX) {
            let units = |(user, Unrecorded { window, units }): &(UserId, Unrecorded)| ReservedUnits {
                user: user.clone(),
                window: *window,
                units: *units,
            };
            self.shared.store.record_sent(sent.iter().map(units).collect()).await?;
            let mut unrecorded = self.unrecorded.lock();
            for (user, recorded) in sent {
                if let Some(left) = unrecorded.get_mut(user) {
                    left.subtract(*recorded);
                    if left.units == 0 {
                        unrecorded.remove(user);
                    }
                }
            }
        }
        Ok(())
    }

    /// Removes the users with idle reservations from the tracked ones, and returns them with the time for which nobody may have
    /// used these. It is somewhat shorter than this server's own, since Redis measures it with another clock.
    fn take_idle(&self) -> (Vec<UserId>, Duration) {
        let mut tracked = self.tracked.lock();
        let keep = if tracked.len() > TRACKED_LONG_MAX { self.keep.min(KEEP_WHEN_FULL) } else { self.keep };
        let idle = tracked.extract_if(|_, at| at.elapsed() >= keep);
        (idle.map(|(user, _)| user).collect(), keep - keep / 10)
    }

    /// Gives back unused units that nobody has used for `idle_for`: another server may use the same hash.
    async fn give_back(&self, users: Vec<UserId>, idle_for: Duration) {
        for users in users.chunks(BATCH_MAX) {
            let users: Vec<&UserId> = users.iter().collect();
            give_back(&self.shared, &users, idle_for).await;
        }
    }
}

/// Returns what is tracked of a user, `new` for a new one. `None` if there are too many.
fn find_or_track<'a, T>(tracked: &'a mut HashMap<UserId, T>, user: &UserId, new: T) -> Option<&'a mut T> {
    if !tracked.contains_key(user) {
        if tracked.len() >= TRACKED_MAX {
            return None;
        }
        tracked.insert(user.clone(), new);
    }
    tracked.get_mut(user)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tracked_users_are_bounded() {
        let (mut tracked, now) = (HashMap::new(), Instant::now());
        for n in 0..TRACKED_MAX + 10 {
            find_or_track(&mut tracked, &UserId::parse(n.to_string()).unwrap(), now);
        }
        assert_eq!(tracked.len(), TRACKED_MAX);
    }

    #[test]
    fn units_of_another_window_replace_those_of_the_one_before() {
        let units = |seconds, units| Unrecorded { window: Timestamp::from_seconds(seconds), units };
        let mut unrecorded = Unrecorded::default();
        for (added, sum) in [(units(60, 2), 2), (units(60, 3), 5), (units(120, 0), 5), (units(120, 1), 1)] {
            unrecorded.add(added);
            assert_eq!(unrecorded.units, sum);
        }
        unrecorded.subtract(units(60, 5));
        assert_eq!(unrecorded, units(120, 1), "what is recorded of a window before is not of this one");
    }
}
