//! What tiers allow and which policies there are, kept in memory and read anew when they change.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;
use weir_core::tier::{ScopedRule, Tier, TierLimits, TierRule, Tiers};
use weir_store::Result;
use weir_store::tier::{Policy, TIER_SCOPE, TierStore};

use crate::engines::within;

/// What is limited at present.
#[derive(Debug)]
pub(super) struct Snapshot {
    tiers: Tiers,
    rules: [Arc<ScopedRule<TierRule>>; Tier::ALL.len()],
    policies: HashMap<Box<str>, Arc<Policy>>,
    /// Those that are about descriptors, by domain.
    matched: HashMap<Box<str>, Vec<Arc<Policy>>>,
}

impl Snapshot {
    fn new(tiers: Tiers, policies: Vec<Policy>) -> Self {
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
        let policies = policies.into_iter().map(|policy| (policy.name.as_str().into(), policy)).collect();
        Self { tiers, rules, policies, matched }
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

    /// The policies about a descriptor, in order of name, and the key that it spends under.
    pub(super) fn matching(&self, domain: &str, entries: &[(&str, &str)]) -> Vec<(Arc<Policy>, String)> {
        let candidates = self.matched.get(domain).into_iter().flatten();
        let matching = candidates.filter_map(|policy| {
            let key = policy.spec.matches.as_ref()?.key(domain, entries)?;
            Some((Arc::clone(policy), key))
        });
        matching.collect()
    }
}

/// What is limited, and where that is read.
pub(super) struct Definitions {
    store: Arc<dyn TierStore>,
    /// What the settings say of tiers.
    default: Tiers,
    present: RwLock<Arc<Snapshot>>,
    /// Held by whoever reads anew, so that what was read first does not come last.
    reading: tokio::sync::Mutex<()>,
}

impl Definitions {
    pub(super) fn new(store: Arc<dyn TierStore>, default: Tiers) -> Self {
        let present = RwLock::new(Arc::new(Snapshot::new(default, Vec::new())));
        Self { store, default, present, reading: tokio::sync::Mutex::default() }
    }

    pub(super) fn get(&self) -> Arc<Snapshot> {
        Arc::clone(&self.present.read())
    }

    /// Reads everything anew.
    pub(super) async fn load(&self, timeout: Duration) -> Result<()> {
        let _reading = self.reading.lock().await;
        let (set, policies) =
            within(timeout, async { Ok((self.store.tiers().await?, self.store.policies().await?)) }).await?;
        let mut tiers = self.default;
        for (tier, limits) in set {
            tiers.set(tier, limits);
        }
        *self.present.write() = Arc::new(Snapshot::new(tiers, policies));
        Ok(())
    }

    pub(super) async fn put_tier(&self, tier: Tier, limits: TierLimits, timeout: Duration) -> Result<()> {
        let put = within(timeout, self.store.put_tier(tier, limits)).await;
        self.load_after(put, timeout).await
    }

    /// Reads anew after a change. Also after one that failed: it may have been made all the same.
    pub(super) async fn load_after<T>(&self, changed: Result<T>, timeout: Duration) -> Result<T> {
        let loaded = self.load(timeout).await;
        let changed = changed?;
        loaded.map(|()| changed)
    }
}
