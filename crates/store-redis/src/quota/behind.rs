//! Brings the store's counts to what was used: reservations that nobody has taken from for a second are given back,
//! and all of this server's when it stops.
//!
//! Redis lets go of the places first, then the store gets them; what happens in between can only lose them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use weir_core::UserId;
use weir_store::quota::Unused;

use super::{Parts, key, reply};
use crate::client::Item;
use crate::script::Script;

/// How long nobody takes from a reservation before it is given back.
const IDLE_AFTER: Duration = Duration::from_secs(1);
/// How often reservations are looked at.
const LOOK: Duration = Duration::from_millis(500);
/// Users in one commit.
const BATCH: usize = 500;
/// Users whose reservations are known. When there are more, none is waited for.
const TRACKED_MAX: usize = 100_000;

#[derive(Debug)]
pub(crate) struct Behind {
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

impl Behind {
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
        let mut tracked = self.inner.tracked();
        for user in users {
            match tracked.get_mut(user) {
                Some(at) => *at = now,
                None => drop(tracked.insert(user.clone(), now)),
            }
        }
    }

    /// Gives everything back.
    pub(crate) async fn close(&self) {
        self.closing.cancel();
        self.tasks.wait().await;
        let all = self.inner.tracked().drain().map(|(user, _)| user).collect();
        self.inner.settle(all).await;
    }
}

impl Drop for Behind {
    fn drop(&mut self) {
        self.closing.cancel();
    }
}

impl Inner {
    fn tracked(&self) -> MutexGuard<'_, HashMap<UserId, Instant>> {
        self.tracked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn idle(&self) -> Vec<UserId> {
        let mut tracked = self.tracked();
        let is_full = tracked.len() > TRACKED_MAX;
        let idle = tracked.extract_if(|_, at| is_full || at.elapsed() >= IDLE_AFTER);
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
                    Some(Unused { user: user.clone(), window, units })
                })
                .collect();
            if unused.is_empty() {
                continue;
            }
            if let Err(error) = self.parts.store.give_back(unused).await {
                tracing::warn!(error = %error.with_causes(), "unused places stay counted until their windows end");
            }
        }
    }
}
