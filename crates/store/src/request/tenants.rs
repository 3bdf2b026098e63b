//! What tenants may have: their weights, how many calls at once, and which of their jobs are express jobs.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;

use weir_core::request::turn::is_express;

use super::Submit;

/// The rule of one tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TenantRule {
    /// How many jobs the tenant gets in its turn.
    pub weight: NonZeroU32,
    /// How many of its calls may run at once on one worker; `None` means as many as there are.
    pub concurrency: Option<usize>,
}

/// The rules of all tenants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantRules {
    /// For tenants without a rule of their own.
    pub default: TenantRule,
    pub named: HashMap<String, TenantRule>,
}

impl Default for TenantRules {
    fn default() -> Self {
        let default = TenantRule { weight: NonZeroU32::MIN, concurrency: None };
        Self { default, named: HashMap::new() }
    }
}

impl TenantRules {
    #[must_use]
    pub fn of(&self, tenant: &str) -> TenantRule {
        self.named.get(tenant).copied().unwrap_or(self.default)
    }
}

/// What a worker may still start for each tenant.
#[derive(Clone, Debug, Default)]
pub struct TenantCapacity {
    rules: Arc<TenantRules>,
    /// Calls that run.
    running: HashMap<String, usize>,
}

impl TenantCapacity {
    #[must_use]
    pub fn new(rules: Arc<TenantRules>) -> Self {
        Self { rules, running: HashMap::new() }
    }

    #[must_use]
    pub fn weight(&self, tenant: &str) -> NonZeroU32 {
        self.rules.of(tenant).weight
    }

    /// How many calls may be started.
    #[must_use]
    pub fn free(&self, tenant: &str) -> usize {
        let running = self.running.get(tenant).copied().unwrap_or_default();
        self.rules.of(tenant).concurrency.map_or(usize::MAX, |most| most.saturating_sub(running))
    }

    /// Counts calls that start.
    pub fn start(&mut self, tenant: &str, calls: usize) {
        if calls > 0 {
            *self.running.entry(tenant.to_owned()).or_default() += calls;
        }
    }

    /// Counts a call that starts, unless the tenant has no capacity left. Returns whether it may start.
    pub fn admit(&mut self, tenant: &str) -> bool {
        let is_free = self.free(tenant) > 0;
        if is_free {
            self.start(tenant, 1);
        }
        is_free
    }

    /// Counts calls that have ended.
    pub fn end(&mut self, tenant: &str, calls: usize) {
        if let Some(running) = self.running.get_mut(tenant) {
            *running = running.saturating_sub(calls);
            if *running == 0 {
                self.running.remove(tenant);
            }
        }
    }

    /// The tenants without capacity: no more than there are calls.
    #[must_use]
    pub fn full(&self) -> Vec<&str> {
        self.running.keys().map(String::as_str).filter(|tenant| self.free(tenant) == 0).collect()
    }

    /// The tenants that get no express jobs: those without capacity, and those with as many calls as express jobs may be. Otherwise
    /// a few large tenants could use all that is kept for small ones.
    #[must_use]
    pub fn without_express(&self) -> Vec<&str> {
        let has_many = |(_, running): &(&String, &usize)| !is_express(**running);
        let many = self.running.iter().filter(has_many).map(|(tenant, _)| tenant.as_str());
        let mut without = self.full();
        without.extend(many);
        without
    }
}

/// Decides for the submissions of a batch which become express jobs: counts the unfinished jobs by tenant and downstream.
#[derive(Debug, Default)]
pub struct ExpressCounts(HashMap<(String, String), usize>);

impl ExpressCounts {
    /// The number of unfinished jobs before this one. `load` counts those in the store, for the first of the batch; it need not
    /// count further than [`EXPRESS_JOBS`](weir_core::request::turn::EXPRESS_JOBS).
    pub fn count<E>(
        &mut self,
        submit: &Submit,
        load: impl FnOnce() -> std::result::Result<usize, E>,
    ) -> std::result::Result<usize, E> {
        let name = (submit.tenant.as_str().to_owned(), submit.downstream.clone());
        let count = match self.0.entry(name) {
            std::collections::hash_map::Entry::Occupied(present) => present.into_mut(),
            std::collections::hash_map::Entry::Vacant(absent) => absent.insert(load()?),
        };
        let before = *count;
        *count += 1;
        Ok(before)
    }

    /// As [`ExpressCounts::count`]: whether this one is an express job.
    pub fn is_express<E>(
        &mut self,
        submit: &Submit,
        load: impl FnOnce() -> std::result::Result<usize, E>,
    ) -> std::result::Result<bool, E> {
        self.count(submit, load).map(is_express)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_has_no_more_calls_than_its_rule_allows() {
        let limited = TenantRule { weight: NonZeroU32::MIN, concurrency: Some(2) };
        let rules =
            TenantRules { named: HashMap::from([("a".to_owned(), limited)]), ..TenantRules::default() };
        let mut capacity = TenantCapacity::new(Arc::new(rules));
        assert_eq!([capacity.admit("a"), capacity.admit("a"), capacity.admit("a")], [true, true, false]);
        assert!((0..100).all(|_| capacity.admit("b")), "others have no limit");
        assert_eq!((capacity.full(), capacity.without_express()), (vec!["a"], vec!["a", "b"]));
        capacity.end("b", 100);
        capacity.end("a", 1);
        assert_eq!((capacity.free("a"), capacity.full().len()), (1, 0));
        capacity.end("a", 1);
        assert!(capacity.running.is_empty(), "nothing is kept of a tenant without calls");
    }
}
