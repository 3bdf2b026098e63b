//! The limits of one process behind the seam of the stores: decided in memory, and kept by a journal for the next start.

use std::sync::Arc;

use async_trait::async_trait;
use weir_core::tier::{Decision, Limit, LimitUsage, Rule, ScopedRule, TierRule};
use weir_core::{Clock, Timestamp};
use weir_store::tier::{LimitCheck, LimitOutcome, LimitStatus, LimitStore, Policy, TierOutcome, TierStore};
use weir_store::{Error, Result};

use crate::journal::Journal;
use crate::memory::{Full, Memory, Options};
use crate::multi_key::Want;

/// The limits of one process. Clones share them.
#[derive(Clone, Debug)]
pub struct LocalLimiter {
    pub(crate) memories: Arc<Memories>,
    journal: Option<Arc<Journal>>,
}

/// What keys have spent, of policies and of tiers.
#[derive(Debug)]
pub(crate) struct Memories {
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) limits: Memory<Limit>,
    pub(crate) tiers: Memory<TierRule>,
    keys_max: usize,
}

impl LocalLimiter {
    /// Limits that end with the process.
    #[must_use]
    pub fn ephemeral(clock: Arc<dyn Clock>, keys_max: usize) -> Self {
        Self { memories: Arc::new(Memories::new(clock, keys_max, false)), journal: None }
    }

    /// Limits that `store` keeps: what it has kept is read first, and from then on what changes is written, a few dozen
    /// times a second.
    /// Fails when the store cannot be read, or has more keys than there may be.
    pub async fn open(store: Arc<dyn TierStore>, clock: Arc<dyn Clock>, keys_max: usize) -> Result<Self> {
        let memories = Arc::new(Memories::new(clock, keys_max, true));
        let journal = Journal::open(store, Arc::clone(&memories)).await?;
        Ok(Self { memories, journal: Some(Arc::new(journal)) })
    }

    /// Takes over what is known of a key from elsewhere, in place of what was known.
    pub fn learn(&self, policy: &Arc<Policy>, key: &str, spent: LimitUsage, now: Timestamp) {
        // Without room for it there is nothing to be known of it.
        let _ = self.memories.limits.restore(&policy.scoped, key, spent, now);
    }

    /// The same of a user.
    pub fn learn_tier(
        &self,
        user: &str,
        rule: &Arc<ScopedRule<TierRule>>,
        spent: <TierRule as Rule>::Usage,
        now: Timestamp,
    ) {
        let _ = self.memories.tiers.restore(rule, user, spent, now);
    }

    /// Takes over that nothing is spent of a key.
    pub fn unlearn(&self, policy: &Arc<Policy>, key: &str) {
        self.memories.limits.forget(&policy.scoped, key);
    }

    /// What is known of a key.
    #[must_use]
    pub fn known(&self, policy: &Arc<Policy>, key: &str, now: Timestamp) -> LimitUsage {
        self.memories.limits.peek(&policy.scoped, key, now)
    }

    /// What is known of a user.
    #[must_use]
    pub fn known_tier(
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
        let options = Options { keys_max, tracks_changes, ..Options::default() };
        Self { clock, limits: Memory::new(options), tiers: Memory::new(options), keys_max }
    }

    fn full(&self, _full: Full) -> Error {
        Error::KeysExhausted { max: self.keys_max }
    }

    /// One key, which is what most decisions are about.
    fn take_one(&self, ask: &LimitCheck<'_>, peek: bool, now: Timestamp) -> Result<(Decision, LimitUsage)> {
        let rule = &ask.policy.scoped;
        if peek {
            let spent = self.limits.peek(rule, ask.key, now);
            let mut after = spent;
            return Ok((rule.rule.take(&mut after, ask.cost, now), spent));
        }
        let taken = self.limits.take(rule, ask.key, ask.cost, now).map_err(|full| self.full(full))?;
        Ok((taken.decision, taken.spent))
    }

    fn take_binding(&self, asks: &[LimitCheck<'_>], peek: bool, now: Timestamp) -> Result<LimitOutcome> {
        if let [ask] = asks {
            let (decision, spent) = self.take_one(ask, peek, now)?;
            return Ok(LimitOutcome { decision, each: vec![(decision, spent)], now });
        }
        let wants: Vec<Want<'_, Limit>> =
            asks.iter().map(|ask| Want { policy: &ask.policy.scoped, id: ask.key, cost: ask.cost }).collect();
        let taken = if peek {
            self.limits.peek_all(&wants, now)
        } else {
            self.limits.take_all(&wants, now).map_err(|full| self.full(full))?
        };
        let each = taken.each.into_iter().map(|taken| (taken.decision, taken.spent)).collect();
        Ok(LimitOutcome { decision: taken.decision, each, now })
    }

    /// Those that bind first; if they have room, each that only observes takes what fits.
    fn take_with_shadows(&self, asks: &[LimitCheck<'_>], peek: bool, now: Timestamp) -> Result<LimitOutcome> {
        let is_shadow = |at: &usize| asks[*at].policy.spec.shadow;
        let (shadows, binding): (Vec<usize>, Vec<usize>) = (0..asks.len()).partition(is_shadow);
        let binding_asks: Vec<LimitCheck<'_>> = binding.iter().map(|at| asks[*at]).collect();
        let taken = if binding.is_empty() {
            LimitOutcome { decision: Decision::Allowed, each: Vec::new(), now }
        } else {
            self.take_binding(&binding_asks, peek, now)?
        };
        let spends = taken.decision.is_allowed() && !peek;
        let mut each = vec![None; asks.len()];
        for (at, told) in binding.iter().zip(taken.each) {
            each[*at] = Some(told);
        }
        for &at in &shadows {
            let is_same = |other: &usize| is_same_key(&asks[*other], &asks[at]);
            each[at] = match shadows.iter().find(|other| is_same(other)) {
                Some(first) if *first < at => each[*first],
                _ => {
                    let costs = shadows.iter().filter(|other| is_same(other)).map(|other| asks[*other].cost);
                    let cost = costs.fold(0, u32::saturating_add);
                    if !spends && !peek {
                        // What was spent under another rule is from now on under this one, as in every decision.
                        let _ = self.take_one(&LimitCheck { cost: 0, ..asks[at] }, false, now)?;
                    }
                    Some(self.take_one(&LimitCheck { cost, ..asks[at] }, !spends, now)?)
                }
            };
        }
        let decision = match taken.decision {
            Decision::Denied(mut refusal) => {
                refusal.denied_by = binding.get(refusal.denied_by).copied().unwrap_or(0);
                Decision::Denied(refusal)
            }
            Decision::Allowed => Decision::Allowed,
        };
        Ok(LimitOutcome { decision, each: each.into_iter().flatten().collect(), now })
    }
}

fn is_same_key(a: &LimitCheck<'_>, b: &LimitCheck<'_>) -> bool {
    (a.policy.scope(), a.key) == (b.policy.scope(), b.key)
}

#[async_trait]
impl LimitStore for LocalLimiter {
    async fn take(&self, asks: &[LimitCheck<'_>], peek: bool) -> Result<LimitOutcome> {
        let now = self.memories.clock.now();
        if asks.iter().any(|ask| ask.policy.spec.shadow) {
            self.memories.take_with_shadows(asks, peek, now)
        } else {
            self.memories.take_binding(asks, peek, now)
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
            journal.keep().await;
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
