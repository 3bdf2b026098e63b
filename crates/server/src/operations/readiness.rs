//! Which capabilities this process can serve now, for `/readyz`. `health` checks the engines; of Redis it asks the connection that
//! all capabilities share (`redis.timeout`), not the one that decides sales.

use std::fmt;

use super::health::EngineCheck;
use crate::engines::Engines;
use crate::settings::Settings;
use crate::settings::process::Roles;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Capability {
    Quota,
    Slot,
    Request,
    Tier,
    Sale,
}

impl Capability {
    pub(crate) const ALL: [Self; 5] = [Self::Quota, Self::Slot, Self::Request, Self::Tier, Self::Sale];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Quota => "quota",
            Self::Slot => "slot",
            Self::Request => "request",
            Self::Tier => "tier",
            Self::Sale => "sale",
        }
    }

    pub(crate) fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|capability| capability.name() == name)
    }
}

/// The part of a deployment that determines which engines a capability needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deployment {
    pub(crate) roles: Roles,
    pub(crate) has_redis: bool,
    /// Whether the role `sender` publishes due slots.
    pub(crate) dispatches_slots: bool,
}

/// The engines that a capability needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct NeededEngines {
    store: bool,
    redis: bool,
    kafka: bool,
}

/// Why a capability cannot be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unready {
    Stopping,
    Down { engine: &'static str, reason: Option<&'static str> },
}

impl fmt::Display for Unready {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stopping => f.write_str("this process is stopping"),
            Self::Down { engine, reason: Some(reason) } => write!(f, "{engine}: {reason}"),
            Self::Down { engine, reason: None } => write!(f, "{engine} does not answer"),
        }
    }
}

impl Deployment {
    pub(crate) fn new(settings: &Settings, engines: &Engines) -> Self {
        Self {
            roles: settings.process.roles,
            has_redis: engines.redis.is_some(),
            dispatches_slots: settings.slot.dispatch_topic.is_some(),
        }
    }

    /// The capabilities of this process's roles, each with the reason why it cannot be served now, if any. `checks` begins with
    /// the store.
    pub(crate) fn assess(
        &self,
        checks: &[EngineCheck],
        is_stopping: bool,
    ) -> Vec<(Capability, Option<Unready>)> {
        let assess = |capability| {
            let needs = self.needs(capability)?;
            let unready = if is_stopping { Some(Unready::Stopping) } else { needs.first_down(checks) };
            Some((capability, unready))
        };
        Capability::ALL.into_iter().filter_map(assess).collect()
    }

    /// `None` if no role of this process serves the capability.
    fn needs(&self, capability: Capability) -> Option<NeededEngines> {
        let Roles { api, worker, sender, reconciler } = self.roles;
        let store = NeededEngines { store: true, ..NeededEngines::default() };
        let store_and_kafka = NeededEngines { kafka: true, ..store };
        match capability {
            // A send counts once its message is confirmed.
            Capability::Quota => (api || sender).then_some(store_and_kafka),
            Capability::Slot if api => Some(store),
            Capability::Slot => (sender && self.dispatches_slots).then_some(store_and_kafka),
            // Without Kafka, accepted requests wait in the store for the reconciler.
            Capability::Request if api => Some(store),
            Capability::Request if worker => Some(store_and_kafka),
            Capability::Request => reconciler.then_some(store),
            // Decided in Redis, or in this process while Redis is down.
            Capability::Tier => api.then_some(NeededEngines::default()),
            Capability::Sale if api && self.has_redis => {
                Some(NeededEngines { redis: true, ..NeededEngines::default() })
            }
            Capability::Sale if api => Some(store),
            // With Redis, workers persist purchases and the reconciler compares both.
            Capability::Sale => {
                ((worker || reconciler) && self.has_redis).then_some(NeededEngines { redis: true, ..store })
            }
        }
    }
}

impl NeededEngines {
    fn first_down(self, checks: &[EngineCheck]) -> Option<Unready> {
        let is_needed = |index: usize, check: &EngineCheck| match check.engine {
            _ if index == 0 => self.store,
            weir_store_redis::ENGINE => self.redis,
            _ => self.kafka,
        };
        let mut needed = checks.iter().enumerate().filter(|(index, check)| is_needed(*index, check));
        let (_, down) = needed.find(|(_, check)| !check.up)?;
        Some(Unready::Down { engine: down.engine, reason: down.reason })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const NONE: Roles = Roles { api: false, worker: false, sender: false, reconciler: false };

    fn checks(down: &[&str], engines: &[&'static str]) -> Vec<EngineCheck> {
        let check = |&engine: &&'static str| EngineCheck {
            engine,
            up: !down.contains(&engine),
            latency: Duration::ZERO,
            reason: None,
        };
        engines.iter().map(check).collect()
    }

    fn unready(roles: Roles, engines: &[&'static str], down: &[&str]) -> Vec<&'static str> {
        let has_redis = engines.contains(&"redis");
        let deployment = Deployment { roles, has_redis, dispatches_slots: false };
        let assessed = deployment.assess(&checks(down, engines), false);
        assessed
            .into_iter()
            .filter(|(_, unready)| unready.is_some())
            .map(|(capability, _)| capability.name())
            .collect()
    }

    #[test]
    fn each_outage_takes_exactly_the_capabilities_that_need_the_engine() {
        let all = ["postgresql", "redis", "kafka"];
        let cases: &[(&[&'static str], &[&str], &[&str])] = &[
            (&all, &[], &[]),
            (&all, &["postgresql"], &["quota", "slot", "request"]),
            (&all, &["redis"], &["sale"]),
            (&all, &["kafka"], &["quota"]),
            (&all, &all, &["quota", "slot", "request", "sale"]),
            (&["postgresql"], &["postgresql"], &["quota", "slot", "request", "sale"]),
            (&["sqlite"], &["sqlite"], &["quota", "slot", "request", "sale"]),
            (&["sqlite", "redis"], &["redis"], &["sale"]),
            (&["sqlite", "redis"], &["sqlite"], &["quota", "slot", "request"]),
        ];
        for (engines, down, expected) in cases {
            assert_eq!(unready(Roles::ALL, engines, down), *expected, "{down:?} of {engines:?} down");
        }
    }

    #[test]
    fn a_process_answers_for_the_capabilities_of_its_roles_alone() {
        let engines = ["postgresql", "redis", "kafka"];
        let of = |roles: Roles, dispatches_slots| {
            let deployment = Deployment { roles, has_redis: true, dispatches_slots };
            let assessed = deployment.assess(&checks(&[], &engines), false);
            assessed.into_iter().map(|(capability, _)| capability.name()).collect::<Vec<_>>()
        };
        assert_eq!(of(Roles { api: true, ..NONE }, false), ["quota", "slot", "request", "tier", "sale"]);
        assert_eq!(of(Roles { sender: true, ..NONE }, false), ["quota"]);
        assert_eq!(of(Roles { sender: true, ..NONE }, true), ["quota", "slot"]);
        assert_eq!(of(Roles { worker: true, ..NONE }, false), ["request", "sale"]);
        assert_eq!(of(Roles { reconciler: true, ..NONE }, false), ["request", "sale"]);
    }

    #[test]
    fn workers_require_their_engines() {
        let engines = ["postgresql", "redis", "kafka"];
        let worker = Roles { worker: true, ..NONE };
        assert_eq!(unready(worker, &engines, &["kafka"]), ["request"]);
        assert_eq!(unready(worker, &engines, &["postgresql"]), ["request", "sale"]);
        assert_eq!(unready(Roles { reconciler: true, ..NONE }, &engines, &["kafka"]), [""; 0]);
        assert_eq!(unready(Roles { sender: true, ..NONE }, &engines, &["redis"]), [""; 0]);
    }

    #[test]
    fn nothing_is_ready_while_the_process_stops() {
        let deployment = Deployment { roles: Roles::ALL, has_redis: false, dispatches_slots: false };
        let assessed = deployment.assess(&checks(&[], &["sqlite"]), true);
        assert!(assessed.into_iter().all(|(_, unready)| unready == Some(Unready::Stopping)));
    }
}
