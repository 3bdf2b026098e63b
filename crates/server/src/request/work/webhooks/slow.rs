//! Receivers that did not answer a moment ago.
//!
//! A receiver that did not answer is not called for some time, so that it takes no places from others meanwhile. Its webhooks
//! are put off until then, which costs them no attempt.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use weir_core::{TenantId, Timestamp};

/// How long a receiver is left alone.
const ALONE_FOR: Duration = Duration::from_secs(30);
/// A tenant with so many such receivers is left alone as a whole: names cost nothing.
const RECEIVERS_MAX: usize = 4;
/// Tenants that are remembered. When there are more, nobody is left alone until some have been forgotten.
const TENANTS_MAX: usize = 10_000;

#[derive(Debug, Default)]
pub(super) struct Slow(Mutex<HashMap<TenantId, Receivers>>);

/// Until when each is left alone.
type Receivers = HashMap<String, Timestamp>;

impl Slow {
    /// How much longer a tenant's receiver is left alone; `None` if it may be called.
    pub(super) fn time_left(&self, tenant: &TenantId, receiver: &str, now: Timestamp) -> Option<Duration> {
        let tenants = self.0.lock();
        let receivers = tenants.get(tenant)?;
        let is_alone = |until: &Timestamp| *until > now;
        let own = receivers.get(receiver).copied().filter(is_alone);
        let all: Vec<Timestamp> = receivers.values().copied().filter(is_alone).collect();
        // The whole tenant is left alone until the first of them may be called again.
        let of_tenant = if all.len() >= RECEIVERS_MAX { all.into_iter().min() } else { None };
        own.max(of_tenant).map(|until| until.since(now))
    }

    /// Leaves a receiver alone that did not answer.
    pub(super) fn add(&self, tenant: &TenantId, receiver: &str, now: Timestamp) {
        let mut tenants = self.0.lock();
        if tenants.len() >= TENANTS_MAX && !tenants.contains_key(tenant) {
            tenants.retain(|_, receivers| receivers.values().any(|until| *until > now));
            if tenants.len() >= TENANTS_MAX {
                return;
            }
        }
        let receivers = tenants.entry(tenant.clone()).or_default();
        receivers.retain(|_, until| *until > now);
        if receivers.len() < RECEIVERS_MAX || receivers.contains_key(receiver) {
            receivers.insert(receiver.to_owned(), now.plus(ALONE_FOR));
        }
    }

    /// Forgets a receiver that answered.
    pub(super) fn remove(&self, tenant: &TenantId, receiver: &str) {
        let mut tenants = self.0.lock();
        let Some(receivers) = tenants.get_mut(tenant) else { return };
        receivers.remove(receiver);
        if receivers.is_empty() {
            tenants.remove(tenant);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(name: &str) -> TenantId {
        TenantId::parse(name).unwrap()
    }

    #[test]
    fn a_receiver_that_did_not_answer_is_left_alone_for_a_while() {
        let (slow, now, acme) = (Slow::default(), Timestamp::EPOCH, tenant("acme"));
        slow.add(&acme, "a:443", now);
        let second = Duration::from_secs(1);
        assert_eq!(slow.time_left(&acme, "a:443", now.plus(second)), Some(ALONE_FOR - second));
        assert_eq!(slow.time_left(&acme, "b:443", now), None, "its others are called");
        assert_eq!(slow.time_left(&tenant("other"), "a:443", now), None, "and those of others");
        assert_eq!(slow.time_left(&acme, "a:443", now.plus(ALONE_FOR)), None);
        slow.remove(&acme, "a:443");
        assert_eq!(slow.time_left(&acme, "a:443", now), None);
        assert!(slow.0.lock().is_empty());
    }

    #[test]
    fn a_tenant_with_many_such_receivers_is_left_alone() {
        let (slow, now, acme) = (Slow::default(), Timestamp::EPOCH, tenant("acme"));
        for n in 0..RECEIVERS_MAX + 10 {
            assert_eq!(slow.time_left(&acme, "new:443", now).is_some(), n >= RECEIVERS_MAX);
            slow.add(&acme, &format!("{n}:443"), now.plus(Duration::from_secs(n as u64)));
        }
        assert_eq!(slow.time_left(&acme, "new:443", now), Some(ALONE_FOR), "until the first may be called");
        assert_eq!(
            slow.0.lock().get(&acme).map(HashMap::len),
            Some(RECEIVERS_MAX),
            "and no more are remembered"
        );
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let (slow, now) = (Slow::default(), Timestamp::EPOCH);
        for n in 0..TENANTS_MAX + 5 {
            slow.add(&tenant(&format!("t{n}")), "a:443", now);
        }
        assert_eq!(slow.0.lock().len(), TENANTS_MAX);
        slow.add(&tenant("late"), "a:443", now.plus(ALONE_FOR));
        assert_eq!(slow.0.lock().len(), 1, "those that are over make room");
    }
}
