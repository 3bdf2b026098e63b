//! Users whose limits have just changed: what Redis says of them is not believed until their hash is deleted.
//!
//! Every server hears of every change and deletes the hash on the Redis it uses itself, whoever took the change and
//! whatever became of that server. Until that is done the store decides.

use std::collections::HashMap;

use parking_lot::Mutex;
use tokio::sync::Notify;
use weir_core::UserId;

/// Users in doubt. When there are more, everybody is.
const MAX: usize = 10_000;

#[derive(Debug, Default)]
pub(crate) struct Invalidations {
    state: Mutex<State>,
    added: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Each with the number of its last change.
    users: HashMap<UserId, u64>,
    changes: u64,
    is_everybody: bool,
}

impl Invalidations {
    /// Whether a user's hash must not be used.
    pub(crate) fn has(&self, user: &UserId) -> bool {
        let state = self.state.lock();
        state.is_everybody || (!state.users.is_empty() && state.users.contains_key(user))
    }

    pub(crate) fn add(&self, user: &UserId) {
        let mut state = self.state.lock();
        state.changes += 1;
        let number = state.changes;
        if state.users.len() < MAX || state.users.contains_key(user) {
            state.users.insert(user.clone(), number);
        } else {
            state.is_everybody = true;
        }
        drop(state);
        self.added.notify_one();
    }

    /// Waits until somebody is in doubt, and says who. A change while the hash is being deleted is a doubt of its own.
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

    /// The hash of a user is gone, after the change of this number.
    pub(crate) fn settle(&self, user: &UserId, number: u64) {
        let mut state = self.state.lock();
        if state.users.get(user) == Some(&number) {
            state.users.remove(user);
        }
    }

    /// Whether nobody is in doubt.
    pub(crate) fn is_empty(&self) -> bool {
        let state = self.state.lock();
        !state.is_everybody && state.users.is_empty()
    }

    /// Whether more changed than could be remembered.
    pub(crate) fn is_everybody(&self) -> bool {
        self.state.lock().is_everybody
    }

    /// Every hash is distrusted from now on.
    pub(crate) fn settle_everybody(&self) {
        self.state.lock().is_everybody = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_user_is_in_doubt_until_the_hash_is_gone() {
        let (invalidations, user) = (Invalidations::default(), UserId::parse("u").unwrap());
        assert!(!invalidations.has(&user));
        invalidations.add(&user);
        assert!(invalidations.has(&user));
        let first = invalidations.next().await;
        invalidations.add(&user);
        invalidations.settle(&first[0].0, first[0].1);
        assert!(invalidations.has(&user), "it has changed again since");
        let second = invalidations.next().await;
        invalidations.settle(&second[0].0, second[0].1);
        assert!(!invalidations.has(&user));
    }

    #[test]
    fn when_too_many_change_everybody_is_in_doubt() {
        let invalidations = Invalidations::default();
        for n in 0..=MAX {
            invalidations.add(&UserId::parse(n.to_string()).unwrap());
        }
        assert!(invalidations.has(&UserId::parse("anybody").unwrap()));
        invalidations.settle_everybody();
        assert!(!invalidations.has(&UserId::parse("anybody").unwrap()));
    }
}
