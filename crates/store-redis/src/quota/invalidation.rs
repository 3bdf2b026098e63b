//! Users whose limits have just changed: their hash is not used until it is deleted.
//!
//! Every server is notified of every change and deletes the hash on the Redis that it uses, whichever server made the change
//! and whether or not that server is still alive. Until then the store decides.

use std::collections::HashMap;

use parking_lot::Mutex;
use tokio::sync::Notify;
use weir_core::UserId;

/// The most users that are tracked. When there are more, no user's hash is used.
const USERS_MAX: usize = 10_000;

#[derive(Debug, Default)]
pub(crate) struct Invalidations {
    state: Mutex<InvalidationState>,
    added: Notify,
}

#[derive(Debug, Default)]
struct InvalidationState {
    /// The number of each user's last change.
    users: HashMap<UserId, u64>,
    changes: u64,
    /// Whether more users changed than [`USERS_MAX`].
    has_overflowed: bool,
}

impl Invalidations {
    /// Returns whether a user's hash must not be used.
    pub(crate) fn contains(&self, user: &UserId) -> bool {
        let state = self.state.lock();
        state.has_overflowed || (!state.users.is_empty() && state.users.contains_key(user))
    }

    pub(crate) fn add(&self, user: &UserId) {
        let mut state = self.state.lock();
        state.changes += 1;
        let number = state.changes;
        if state.users.len() < USERS_MAX || state.users.contains_key(user) {
            state.users.insert(user.clone(), number);
        } else {
            state.has_overflowed = true;
        }
        drop(state);
        self.added.notify_one();
    }

    /// Waits until there are users and returns each with the number of its last change. A change while the hash is being
    /// deleted gets a new number, so the user is returned again.
    pub(crate) async fn next(&self) -> Vec<(UserId, u64)> {
        loop {
            let added = self.added.notified();
            let users: Vec<_> =
                self.state.lock().users.iter().map(|(user, number)| (user.clone(), *number)).collect();
            if !users.is_empty() {
                return users;
            }
            added.await;
        }
    }

    /// Removes a user whose hash was deleted, unless there was another change after `change`.
    pub(crate) fn remove(&self, user: &UserId, change: u64) {
        let mut state = self.state.lock();
        if state.users.get(user) == Some(&change) {
            state.users.remove(user);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        let state = self.state.lock();
        !state.has_overflowed && state.users.is_empty()
    }

    /// Returns whether more users changed than can be tracked.
    pub(crate) fn has_overflowed(&self) -> bool {
        self.state.lock().has_overflowed
    }

    /// Ends the overflow, after a new epoch has invalidated every hash.
    pub(crate) fn clear_overflow(&self) {
        self.state.lock().has_overflowed = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_user_is_invalidated_until_the_hash_is_deleted() {
        let (invalidations, user) = (Invalidations::default(), UserId::parse("u").unwrap());
        assert!(!invalidations.contains(&user));
        invalidations.add(&user);
        assert!(invalidations.contains(&user));
        let first = invalidations.next().await;
        invalidations.add(&user);
        invalidations.remove(&first[0].0, first[0].1);
        assert!(invalidations.contains(&user), "the limits have changed again since");
        let second = invalidations.next().await;
        invalidations.remove(&second[0].0, second[0].1);
        assert!(!invalidations.contains(&user));
    }

    #[test]
    fn too_many_changes_invalidate_every_user() {
        let invalidations = Invalidations::default();
        for n in 0..=USERS_MAX {
            invalidations.add(&UserId::parse(n.to_string()).unwrap());
        }
        assert!(invalidations.contains(&UserId::parse("anybody").unwrap()));
        invalidations.clear_overflow();
        assert!(!invalidations.contains(&UserId::parse("anybody").unwrap()));
    }
}
