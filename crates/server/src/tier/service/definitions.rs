//! Tiers, policies and the switch of tier, cached in memory and loaded again when they change.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;
use weir_core::tier::{ScopedRule, Tier, TierLimits, TierRule, Tiers};
use weir_store::Result;
use weir_store::tier::{ConcurrencyPolicy, Policy, TIER_SCOPE, TierStore};

use crate::engines::within;

/// All tiers and policies at one time.
#[derive(Debug)]
pub(super) struct DefinitionSnapshot {
    /// Whether AI calls are limited by plan.
    is_enabled: bool,
    tiers: Tiers,
    rules: [Arc<ScopedRule<TierRule>>; Tier::ALL.len()],
    policies: HashMap<Box<str>, Arc<Policy>>,
    /// Those whose name no other policy has.
    concurrency: HashMap<Box<str>, Arc<ConcurrencyPolicy>>,
    /// Policies that match descriptors, by domain.
    matched: HashMap<Box<str>, Vec<Arc<Policy>>>,
}

impl DefinitionSnapshot {
    fn new(
        is_enabled: bool,
        tiers: Tiers,
        policies: Vec<Policy>,
        concurrency: Vec<ConcurrencyPolicy>,
    ) -> Self {
        let rules = Tier::ALL.map(|tier| {
            let rule = tiers.get(tier).rule();
            Arc::new(ScopedRule { scope: TIER_SCOPE, rule })
        });
        let policies: Vec<Arc<Policy>> = policies.into_iter().map(Arc::new).collect();
        let mut matched: HashMap<Box<str>, Vec<Arc<Policy>>> = HashMap::new();
        for policy in &policies {
            if let Some(matches) = &policy.spec.matches {
                matched.entry(matches.domain.as_str().into()).or_default().push(Arc::clone(policy));
            }
        }
        let policies: HashMap<Box<str>, _> =
            policies.into_iter().map(|policy| (policy.name.as_str().into(), policy)).collect();
        let concurrency =
            concurrency.into_iter().filter(|policy| !policies.contains_key(policy.name.as_str()));
        let concurrency = concurrency.map(|policy| (policy.name.as_str().into(), Arc::new(policy))).collect();
        Self { is_enabled, tiers, rules, policies, concurrency, matched }
    }

    pub(super) const fn is_enabled(&self) -> bool {
        self.is_enabled
    }

    pub(super) const fn tiers(&self) -> &Tiers {
        &self.tiers
    }

    pub(super) const fn rule(&self, tier: Tier) -> &Arc<ScopedRule<TierRule>> {
        &self.rules[tier as usize]
    }

    pub(super) fn policy(&self, name: &str) -> Option<&Arc<Policy>> {
        self.policies.get(name)
    }

    pub(super) fn policies(&self) -> impl Iterator<Item = &Arc<Policy>> {
        self.policies.values()
    }

    pub(super) fn concurrency(&self, name: &str) -> Option<&Arc<ConcurrencyPolicy>> {
        self.concurrency.get(name)
    }

    pub(super) fn concurrency_policies(&self) -> impl Iterator<Item = &Arc<ConcurrencyPolicy>> {
        self.concurrency.values()
    }

    /// The policies that match a descriptor, in order of name, each with the key to spend under.
    pub(super) fn matching(&self, domain: &str, entries: &[(&str, &str)]) -> Vec<(Arc<Policy>, String)> {
        let candidates = self.matched.get(domain).into_iter().flatten();
        let matching = candidates.filter_map(|policy| {
            let key = policy.spec.matches.as_ref()?.key(domain, entries)?;
            Some((Arc::clone(policy), key))
        });
        matching.collect()
    }
}

/// The current snapshot, and the store it is loaded from.
pub(super) struct Definitions {
    store: Arc<dyn TierStore>,
    /// The switch and the tiers of the settings.
    default: (bool, Tiers),
    current: RwLock<Arc<DefinitionSnapshot>>,
    /// Held during a load, so that an older load cannot overwrite a newer one.
    loading: tokio::sync::Mutex<()>,
}

impl Definitions {
    pub(super) fn new(store: Arc<dyn TierStore>, is_enabled: bool, tiers: Tiers) -> Self {
        let current =
            RwLock::new(Arc::new(DefinitionSnapshot::new(is_enabled, tiers, Vec::new(), Vec::new())));
        Self { store, default: (is_enabled, tiers), current, loading: tokio::sync::Mutex::default() }
    }

    pub(super) fn snapshot(&self) -> Arc<DefinitionSnapshot> {
        Arc::clone(&self.current.read())
    }

    /// Loads everything from the store.
    pub(super) async fn load(&self, timeout: Duration) -> Result<()> {
        let _loading = self.loading.lock().await;
        let read = async {
            let store = &self.store;
            let policies = (store.policies().await?, store.concurrency_policies().await?);
            Ok((store.limits_enabled().await?, store.tiers().await?, policies))
        };
        let (switched, changed_tiers, (policies, concurrency)) = within(timeout, read).await?;
        let (is_enabled, mut tiers) = self.default;
        for (tier, limits) in changed_tiers {
            tiers.set(tier, limits);
        }
        let is_enabled = switched.unwrap_or(is_enabled);
        let snapshot = DefinitionSnapshot::new(is_enabled, tiers, policies, concurrency);
        *self.current.write() = Arc::new(snapshot);
        Ok(())
    }

    pub(super) async fn put_tier(&self, tier: Tier, limits: TierLimits, timeout: Duration) -> Result<()> {
        let put = within(timeout, self.store.put_tier(tier, limits)).await;
        self.load_after(put, timeout).await
    }

    pub(super) async fn delete_tier(&self, tier: Tier, timeout: Duration) -> Result<()> {
        let deleted = within(timeout, self.store.delete_tier(tier)).await;
        self.load_after(deleted, timeout).await
    }

    pub(super) async fn switch(&self, is_enabled: bool, timeout: Duration) -> Result<()> {
        let switched = within(timeout, self.store.put_limits_enabled(is_enabled)).await;
        self.load_after(switched, timeout).await
    }

    /// Loads everything after a change, also after one that failed: the store may have made it all the same.
    pub(super) async fn load_after<T>(&self, changed: Result<T>, timeout: Duration) -> Result<T> {
        let loaded = self.load(timeout).await;
        let changed = changed?;
        loaded.map(|()| changed)
    }
}
