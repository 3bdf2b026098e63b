//! Receivers that did not answer recently. They are not called for some time, so that they take no capacity from others. Their
//! webhooks are deferred until then, which costs no attempt.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use weir_core::{TenantId, Timestamp};

/// How long an unresponsive receiver is not called.
const PAUSE: Duration = Duration::from_secs(30);
/// With this many unresponsive receivers, no receiver of a tenant is called: host names cost nothing.
const RECEIVERS_MAX: usize = 4;
/// The most tenants in memory. No receiver is added beyond them until some have expired.
const TENANTS_MAX: usize = 10_000;

#[derive(Debug, Default)]
pub(super) struct UnresponsiveReceivers(Mutex<HashMap<TenantId, Receivers>>);

/// Until when each receiver is not called.
type Receivers = HashMap<String, Timestamp>;

impl UnresponsiveReceivers {
    /// How much longer a receiver is not called; `None` if it may be called.
    pub(super) fn time_left(&self, tenant: &TenantId, receiver: &str, now: Timestamp) -> Option<Duration> {
        let tenants = self.0.lock();
        let receivers = tenants.get(tenant)?;
        let is_alone = |until: &Timestamp| *until > now;
        let own = receivers.get(receiver).copied().filter(is_alone);
        let all: Vec<Timestamp> = receivers.values().copied().filter(is_alone).collect();
        // No receiver of the tenant is called until the first of them may be called again.
        let of_tenant = if all.len() >= RECEIVERS_MAX { all.into_iter().min() } else { None };
        own.max(of_tenant).map(|until| until.since(now))
    }

    /// Adds a receiver that did not answer.
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
            receivers.insert(receiver.to_owned(), now.plus(PAUSE));
        }
    }

    /// Removes a receiver that answered.
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
    fn an_unresponsive_receiver_is_not_called_for_a_while() {
        let (unresponsive, now, acme) = (UnresponsiveReceivers::default(), Timestamp::EPOCH, tenant("acme"));
        unresponsive.add(&acme, "a:443", now);
        let second = Duration::from_secs(1);
        assert_eq!(unresponsive.time_left(&acme, "a:443", now.plus(second)), Some(PAUSE - second));
        assert_eq!(unresponsive.time_left(&acme, "b:443", now), None, "its others are called");
        assert_eq!(unresponsive.time_left(&tenant("other"), "a:443", now), None, "and those of others");
        assert_eq!(unresponsive.time_left(&acme, "a:443", now.plus(PAUSE)), None);
        unresponsive.remove(&acme, "a:443");
        assert_eq!(unresponsive.time_left(&acme, "a:443", now), None);
        assert!(unresponsive.0.lock().is_empty());
    }

    #[test]
    fn no_receiver_is_called_of_a_tenant_with_many_unresponsive_ones() {
        let (unresponsive, now, acme) = (UnresponsiveReceivers::default(), Timestamp::EPOCH, tenant("acme"));
        for n in 0..RECEIVERS_MAX + 10 {
            assert_eq!(unresponsive.time_left(&acme, "new:443", now).is_some(), n >= RECEIVERS_MAX);
            unresponsive.add(&acme, &format!("{n}:443"), now.plus(Duration::from_secs(n as u64)));
        }
        assert_eq!(
            unresponsive.time_left(&acme, "new:443", now),
            Some(PAUSE),
            "until the first may be called"
        );
        assert_eq!(
            unresponsive.0.lock().get(&acme).map(HashMap::len),
            Some(RECEIVERS_MAX),
            "and no more are remembered"
        );
    }

    #[test]
    fn the_tenants_in_memory_are_bounded() {
        let (unresponsive, now) = (UnresponsiveReceivers::default(), Timestamp::EPOCH);
        for n in 0..TENANTS_MAX + 5 {
            unresponsive.add(&tenant(&format!("t{n}")), "a:443", now);
        }
        assert_eq!(unresponsive.0.lock().len(), TENANTS_MAX);
        unresponsive.add(&tenant("late"), "a:443", now.plus(PAUSE));
        assert_eq!(unresponsive.0.lock().len(), 1, "those that are over make room");
    }
}
