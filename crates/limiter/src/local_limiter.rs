//! Implements the limit store in the memory of one process. A journal saves changes for the next start.

use std::sync::Arc;

use async_trait::async_trait;
use weir_core::tier::{Decision, Limit, LimitUsage, Rule, ScopedRule, TierRule};
use weir_core::{Clock, Timestamp};
use weir_store::tier::{LimitCheck, LimitOutcome, LimitStatus, LimitStore, Policy, TierOutcome, TierStore};
use weir_store::{Error, Result};

use crate::journal::Journal;
use crate::memory::{Memory, MemoryFull, MemoryOptions};
use crate::multi_key::KeyRequest;

/// The limits of one process. Clones share them.
#[derive(Clone, Debug)]
pub struct LocalLimiter {
    pub(crate) memories: Arc<Memories>,
    journal: Option<Arc<Journal>>,
}

/// What keys have spent under policies and under tiers.
#[derive(Debug)]
pub(crate) struct Memories {
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) limits: Memory<Limit>,
    pub(crate) tiers: Memory<TierRule>,
    keys_max: usize,
}

impl LocalLimiter {
    /// Creates limits that are lost when the process ends.
    #[must_use]
    pub fn ephemeral(clock: Arc<dyn Clock>, keys_max: usize) -> Self {
        Self { memories: Arc::new(Memories::new(clock, keys_max, false)), journal: None }
    }

    /// Creates limits that are saved to `store`: loads what was saved, then writes changes a few dozen times per
    /// second. Fails if the store cannot be read or has more than `keys_max` keys.
    pub async fn open(store: Arc<dyn TierStore>, clock: Arc<dyn Clock>, keys_max: usize) -> Result<Self> {
        let memories = Arc::new(Memories::new(clock, keys_max, true));
        let journal = Journal::open(store, Arc::clone(&memories)).await?;
        Ok(Self { memories, journal: Some(Arc::new(journal)) })
    }

    /// Replaces the usage of a key with one from elsewhere.
    pub fn replace_usage(&self, policy: &Arc<Policy>, key: &str, spent: LimitUsage, now: Timestamp) {
        // Without room, the usage is not remembered.
        let _ = self.memories.limits.restore(&policy.scoped, key, spent, now);
    }

    /// Replaces the usage of a user with one from elsewhere.
    pub fn replace_tier_usage(
        &self,
        user: &str,
        rule: &Arc<ScopedRule<TierRule>>,
        spent: <TierRule as Rule>::Usage,
        now: Timestamp,
    ) {
        let _ = self.memories.tiers.restore(rule, user, spent, now);
    }

    /// Resets the usage of a key to nothing.
    pub fn reset_usage(&self, policy: &Arc<Policy>, key: &str) {
        self.memories.limits.forget(&policy.scoped, key);
    }

    /// Returns the usage of a key.
    #[must_use]
    pub fn usage(&self, policy: &Arc<Policy>, key: &str, now: Timestamp) -> LimitUsage {
        self.memories.limits.peek(&policy.scoped, key, now)
    }

    /// Returns the usage of a user.
    #[must_use]
    pub fn tier_usage(
        &self,
        user: &str,
        rule: &Arc<ScopedRule<TierRule>>,
        now: Timestamp,
    ) -> <TierRule as Rule>::Usage {
        self.memories.tiers.peek(rule, user, now)
    }
}

impl Memories {
    pub(crate) fn changed_len(&self) -> usize {
        self.limits.changed_len() + self.tiers.changed_len()
    }

    fn new(clock: Arc<dyn Clock>, keys_max: usize, tracks_changes: bool) -> Self {
        let options = MemoryOptions { keys_max, tracks_changes, ..MemoryOptions::default() };
        Self { clock, limits: Memory::new(options), tiers: Memory::new(options), keys_max }
    }

    fn full(&self, _full: MemoryFull) -> Error {
        Error::KeysExhausted { max: self.keys_max }
    }

    /// Decides for one key, the most frequent case.
    fn take_one(&self, check: &LimitCheck<'_>, peek: bool, now: Timestamp) -> Result<(Decision, LimitUsage)> {
        let rule = &check.policy.scoped;
        if peek {
            let spent = self.limits.peek(rule, check.key, now);
            let mut after = spent;
            return Ok((rule.rule.take(&mut after, check.cost, now), spent));
        }
        let taken = self.limits.take(rule, check.key, check.cost, now).map_err(|full| self.full(full))?;
        Ok((taken.decision, taken.spent))
    }

    fn take_binding(&self, checks: &[LimitCheck<'_>], peek: bool, now: Timestamp) -> Result<LimitOutcome> {
        if let [check] = checks {
            let (decision, spent) = self.take_one(check, peek, now)?;
            return Ok(LimitOutcome { decision, each: vec![(decision, spent)], now, decided_alone: false });
        }
        let requests: Vec<KeyRequest<'_, Limit>> = checks
            .iter()
            .map(|check| KeyRequest { policy: &check.policy.scoped, id: check.key, cost: check.cost })
            .collect();
        let taken = if peek {
            self.limits.peek_all(&requests, now)
        } else {
            self.limits.take_all(&requests, now).map_err(|full| self.full(full))?
        };
        let each = taken.each.into_iter().map(|taken| (taken.decision, taken.spent)).collect();
        Ok(LimitOutcome { decision: taken.decision, each, now, decided_alone: false })
    }

    /// Decides by the binding policies first. If they allow the costs, each shadow policy takes what fits.
    fn take_with_shadows(
        &self,
        checks: &[LimitCheck<'_>],
        peek: bool,
        now: Timestamp,
    ) -> Result<LimitOutcome> {
        let is_shadow = |at: &usize| checks[*at].policy.spec.shadow;
        let (shadows, binding): (Vec<usize>, Vec<usize>) = (0..checks.len()).partition(is_shadow);
        let binding_checks: Vec<LimitCheck<'_>> = binding.iter().map(|at| checks[*at]).collect();
        let taken = if binding.is_empty() {
            LimitOutcome { decision: Decision::Allowed, each: Vec::new(), now, decided_alone: false }
        } else {
            self.take_binding(&binding_checks, peek, now)?
        };
        let spends = taken.decision.is_allowed() && !peek;
        let mut each = vec![None; checks.len()];
        for (at, result) in binding.iter().zip(taken.each) {
            each[*at] = Some(result);
        }
        for &at in &shadows {
            let is_same = |other: &usize| is_same_key(&checks[*other], &checks[at]);
            each[at] = match shadows.iter().find(|other| is_same(other)) {
                Some(first) if *first < at => each[*first],
                _ => {
                    let costs =
                        shadows.iter().filter(|other| is_same(other)).map(|other| checks[*other].cost);
                    let cost = costs.fold(0, u32::saturating_add);
                    if !spends && !peek {
                        // Usage under another rule is carried over to this one, as in every decision.
                        let _ = self.take_one(&LimitCheck { cost: 0, ..checks[at] }, false, now)?;
                    }
                    Some(self.take_one(&LimitCheck { cost, ..checks[at] }, !spends, now)?)
                }
            };
        }
        let decision = match taken.decision {
            Decision::Denied(mut denial) => {
                denial.denied_by = binding.get(denial.denied_by).copied().unwrap_or(0);
                Decision::Denied(denial)
            }
            Decision::Allowed => Decision::Allowed,
        };
        Ok(LimitOutcome { decision, each: each.into_iter().flatten().collect(), now, decided_alone: false })
    }
}

fn is_same_key(a: &LimitCheck<'_>, b: &LimitCheck<'_>) -> bool {
    (a.policy.scope(), a.key) == (b.policy.scope(), b.key)
}

#[async_trait]
impl LimitStore for LocalLimiter {
    async fn take(&self, checks: &[LimitCheck<'_>], peek: bool) -> Result<LimitOutcome> {
        let now = self.memories.clock.now();
        if checks.iter().any(|check| check.policy.spec.shadow) {
            self.memories.take_with_shadows(checks, peek, now)
        } else {
            self.memories.take_binding(checks, peek, now)
        }
    }

    async fn charge(&self, policy: &Arc<Policy>, key: &str, cost: u32) -> Result<(LimitUsage, Timestamp)> {
        let now = self.memories.clock.now();
        let charged = self.memories.limits.charge(&policy.scoped, key, cost, now);
        let spent = charged.map_err(|full| self.memories.full(full))?;
        Ok((spent, now))
    }

    async fn give_back(
        &self,
        policy: &Arc<Policy>,
        key: &str,
        cost: u32,
        taken_at: Option<Timestamp>,
    ) -> Result<(LimitUsage, Timestamp)> {
        let now = self.memories.clock.now();
        Ok((self.memories.limits.give_back(&policy.scoped, key, cost, taken_at, now), now))
    }

    async fn forget(&self, policy: &Arc<Policy>, key: &str) -> Result<()> {
        self.memories.limits.forget(&policy.scoped, key);
        Ok(())
    }

    async fn take_tier(
        &self,
        user: &str,
        rule: &Arc<ScopedRule<TierRule>>,
        cost: u32,
    ) -> Result<TierOutcome> {
        let now = self.memories.clock.now();
        let taken = self.memories.tiers.take(rule, user, cost, now);
        let taken = taken.map_err(|full| self.memories.full(full))?;
        Ok(TierOutcome { decision: taken.decision, spent: taken.spent, now })
    }

    async fn flush(&self) {
        if let Some(journal) = &self.journal {
            journal.wait_until_saved().await;
        }
    }

    async fn drain(&self) {
        if let Some(journal) = &self.journal {
            journal.close().await;
        }
    }

    fn status(&self) -> LimitStatus {
        let journal = self.journal.as_ref();
        LimitStatus {
            keys: self.memories.limits.len() + self.memories.tiers.len(),
            unsaved: journal.map_or(0, |journal| journal.unsaved()),
            unsaved_for: journal.and_then(|journal| journal.unsaved_for()),
            decided_alone: 0,
        }
    }
}
