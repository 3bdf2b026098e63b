//! Limits in Redis, shared by all servers: decisions that wait at the same time are one call of a script, by Redis's own clock.
//!
//! Each server also remembers what Redis returned for a key. While Redis does not answer, the server continues from there in
//! its own memory, as each policy says. When Redis has lost a key, the server sends what it remembers. So in an outage nobody
//! gets more than the limit times the number of servers, and a Redis that comes back empty resets no limit.
//!
//! On a cluster, keys with the same text share a hash slot. A decision about other keys makes one call after the other and
//! gives back what it took when a later one denies. Until then other callers may be denied because of it, but nobody exceeds
//! a limit.

mod batch;
mod outage;
mod script_key;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use redis::Value;
use weir_core::tier::{
    BucketLevel, DAILY, Decision, KeyCharge, Limit, LimitDenial, LimitUsage, MINUTE, Rule, ScopedRule,
    TierRule, take_all,
};
use weir_core::{Clock, Timestamp};
use weir_limiter::LocalLimiter;
use weir_store::clock::STEP_MIN;
use weir_store::tier::{LimitCheck, LimitOutcome, LimitStatus, LimitStore, Policy, TierOutcome};
use weir_store::{LaneMetrics, Result};

use self::batch::{DecisionCall, DecisionLanes, DecisionReply};
use self::script_key::{ScriptKey, redis_name};
use crate::client::Redis;

/// The most keys spent in an outage that are remembered for Redis; for further ones Redis continues from its own state.
const UNSYNCED_MAX: usize = 100_000;
/// When to retry a denial that has no reason any more.
const RETRY_AT_ONCE: Duration = Duration::from_millis(1);
/// How often a decision is tried again because the rule of a key in Redis changed meanwhile.
const ATTEMPTS_MAX: usize = 4;

/// Limits in Redis. Clones share them.
#[derive(Clone)]
pub struct RedisLimits {
    shared: Arc<SharedLimits>,
}

struct SharedLimits {
    redis: Redis,
    lanes: DecisionLanes,
    /// Remembers what Redis returned for each key, and decides without Redis.
    local: LocalLimiter,
    /// This server's clock, by which `local` works.
    clock: Arc<dyn Clock>,
    /// The keys that were spent without Redis, which Redis does not know yet.
    unsynced: Mutex<HashSet<Arc<str>>>,
    unsynced_count: AtomicUsize,
    /// The number of decisions without Redis.
    local_decisions: AtomicU64,
}

/// What the script does with the keys of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    Take,
    Peek,
    Charge,
    Give,
    Forget,
}

impl Operation {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Take => "take",
            Self::Peek => "peek",
            Self::Charge => "charge",
            Self::Give => "give",
            Self::Forget => "forget",
        }
    }
}

/// A decision that Redis made.
struct RedisDecision {
    now: Timestamp,
    allowed: bool,
    /// For each key whether this decision spent it, and what is spent of it now.
    each: Vec<(bool, LimitUsage)>,
}

impl RedisLimits {
    /// Starts limits in Redis, with `local` as the fallback. `test_clock` replaces Redis's own clock. At most `capacity`
    /// decisions wait for Redis (on a cluster in each of several lanes); further ones are refused.
    #[must_use]
    pub fn start(
        redis: Redis,
        local: LocalLimiter,
        clock: Arc<dyn Clock>,
        test_clock: Option<Arc<dyn Clock>>,
        capacity: usize,
        metrics: LaneMetrics,
    ) -> Self {
        let shared = SharedLimits {
            lanes: DecisionLanes::start(redis.clone(), test_clock, capacity, metrics),
            redis,
            local,
            clock,
            unsynced: Mutex::default(),
            unsynced_count: AtomicUsize::new(0),
            local_decisions: AtomicU64::new(0),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Returns the distinct keys of a decision, and for each check the index of its key.
    fn script_keys(&self, checks: &[LimitCheck<'_>]) -> (Vec<ScriptKey>, Vec<usize>) {
        let (now, mut keys) = (self.shared.clock.now(), Vec::<ScriptKey>::with_capacity(checks.len()));
        let mut key_of = Vec::with_capacity(checks.len());
        for check in checks {
            let name = policy_key_name(check.policy, check.key);
            let existing = keys.iter().position(|key| key.name == name);
            key_of.push(existing.unwrap_or(keys.len()));
            match existing {
                Some(index) => keys[index].cost = keys[index].cost.saturating_add(check.cost),
                None => {
                    let spent = self.shared.local.usage(check.policy, check.key, now);
                    let key = self.script_key(name, check.policy.spec.limit, spent, check.cost);
                    keys.push(ScriptKey { can_deny: !check.policy.spec.shadow, ..key });
                }
            }
        }
        (keys, key_of)
    }

    fn script_key(&self, name: Arc<str>, limit: Limit, local_spent: LimitUsage, cost: u32) -> ScriptKey {
        let (is_unsynced, local_now) = (self.shared.is_unsynced(&name), self.shared.clock.now());
        ScriptKey {
            name,
            limit,
            cost,
            taken_at: None,
            can_deny: true,
            local_spent,
            local_now,
            is_unsynced,
            adopted: None,
        }
    }

    /// Decides about keys of one hash slot. Returns `None` when Redis does not answer.
    async fn decide(&self, operation: Operation, keys: &mut [ScriptKey]) -> Result<Option<RedisDecision>> {
        for _ in 0..ATTEMPTS_MAX {
            let Some(reply) = self.shared.lanes.submit(DecisionCall::new(operation, keys)).await? else {
                return Ok(None);
            };
            match ParsedReply::parse(reply, keys) {
                None => return Ok(None),
                Some(ParsedReply::Decided(decision)) => {
                    self.shared.mark_synced(keys);
                    return Ok(Some(decision));
                }
                Some(ParsedReply::RuleDiffers(now, stored)) => {
                    for (key, stored) in keys.iter_mut().zip(stored) {
                        // A text that Weir did not write counts as unspent.
                        let adopted = key.adopt(&stored, now).unwrap_or_else(|| key.limit.unspent());
                        key.adopted = (!stored.is_empty()).then_some((stored, adopted));
                    }
                }
            }
        }
        Ok(None)
    }

    /// Decides about keys that may be on several servers of a cluster, one group after the other. What was taken is given back
    /// when a later group denies.
    async fn decide_all(
        &self,
        operation: Operation,
        keys: &mut [ScriptKey],
    ) -> Result<Option<RedisDecision>> {
        let groups = self.shared.redis.group(keys.iter().map(|key| &*key.name));
        if groups.len() == 1 {
            return self.decide(operation, keys).await;
        }
        let mut each = vec![(false, LimitUsage(0, 0, 0)); keys.len()];
        let (mut allowed, mut latest, mut taken) = (true, Timestamp::from_micros(i64::MIN), Vec::new());
        for indices in groups {
            let mut group: Vec<ScriptKey> = indices.iter().map(|index| keys[*index].clone()).collect();
            if !allowed {
                // Denied already: the other groups are only read.
                group.iter_mut().for_each(|key| key.cost = 0);
            }
            let decided = self.decide(operation, &mut group).await;
            let Ok(Some(decision)) = decided else {
                self.undo(&taken).await;
                return decided;
            };
            latest = latest.max(decision.now);
            for ((index, (is_taken, spent)), key) in indices.iter().zip(&decision.each).zip(group) {
                let is_taken = *is_taken && allowed;
                each[*index] = (is_taken, *spent);
                if is_taken {
                    let key = ScriptKey { taken_at: Some(latest), is_unsynced: false, adopted: None, ..key };
                    taken.push((*index, key));
                }
            }
            allowed &= decision.allowed;
        }
        if operation == Operation::Take && !allowed {
            for (index, spent) in self.undo(&taken).await {
                each[index] = (false, spent);
            }
        }
        Ok(Some(RedisDecision { now: latest, allowed, each }))
    }

    /// Gives back what was taken, and returns what is spent of each key now. A key for which Redis does not answer stays spent,
    /// which is safe.
    async fn undo(&self, taken: &[(usize, ScriptKey)]) -> Vec<(usize, LimitUsage)> {
        let mut after = Vec::with_capacity(taken.len());
        for (index, key) in taken {
            if let Ok(Some(decision)) = self.decide(Operation::Give, &mut [key.clone()]).await {
                after.extend(decision.each.first().map(|(_, spent)| (*index, *spent)));
            }
        }
        after
    }

    /// Applies an operation to one key without checking its limit. Returns `None` when Redis does not answer.
    async fn change(
        &self,
        operation: Operation,
        policy: &Arc<Policy>,
        key: &str,
        cost: u32,
        taken_at: Option<Timestamp>,
    ) -> Result<Option<(LimitUsage, Timestamp)>> {
        let local_spent = self.shared.local.usage(policy, key, self.shared.clock.now());
        let name = policy_key_name(policy, key);
        let script_key = self.script_key(name, policy.spec.limit, local_spent, cost);
        let script_key = ScriptKey { taken_at, ..script_key };
        let Some(decision) = self.decide(operation, &mut [script_key]).await? else { return Ok(None) };
        let Some((_, spent)) = decision.each.first().copied() else { return Ok(None) };
        self.shared.remember(policy, key, spent, decision.now);
        Ok(Some((spent, decision.now)))
    }

    async fn take_tier_in_redis(
        &self,
        user: &str,
        rule: &Arc<ScopedRule<TierRule>>,
        cost: u32,
    ) -> Result<Option<TierOutcome>> {
        let local_spent = self.shared.local.tier_usage(user, rule, self.shared.clock.now());
        let script_key = |which: usize, bucket: &str| {
            let limit = Limit::TokenBucket(rule.rule[which]);
            self.script_key(redis_name(rule.scope, bucket, user), limit, local_spent[which].into(), cost)
        };
        let mut keys = [script_key(DAILY, "daily"), script_key(MINUTE, "minute")];
        let Some(decided) = self.decide(Operation::Take, &mut keys).await? else { return Ok(None) };
        // `ParsedReply::parse` has checked that there is one element for each key.
        let spent = [DAILY, MINUTE].map(|which| BucketLevel::from(decided.each[which].1));
        let (now, mut remembered) = (self.shared.clock.now(), spent);
        rule.rule.move_back(&mut remembered, clock_lead(now, decided.now));
        self.shared.local.replace_tier_usage(user, rule, remembered, now);
        let decision = if decided.allowed {
            Decision::Allowed
        } else {
            Decision::Denied(rule.rule.denial(&spent, cost, decided.now))
        };
        Ok(Some(TierOutcome { decision, spent, now: decided.now }))
    }
}

fn policy_key_name(policy: &Policy, key: &str) -> Arc<str> {
    redis_name(policy.scope(), policy.name.as_str(), key)
}

/// Returns how far Redis's clock is ahead of this server's, or 0 for the usual difference between clocks. What Redis returned is
/// moved back by as much before it is remembered: while Redis is unavailable, keys must not be denied until this server's clock
/// has caught up.
fn clock_lead(own: Timestamp, redis: Timestamp) -> Duration {
    let ahead = redis.since(own);
    if ahead > STEP_MIN { ahead } else { Duration::ZERO }
}

impl SharedLimits {
    /// Remembers what is spent of a key at `redis_now`, by Redis's clock.
    fn remember(&self, policy: &Arc<Policy>, key: &str, mut spent: LimitUsage, redis_now: Timestamp) {
        let now = self.clock.now();
        policy.spec.limit.move_back(&mut spent, clock_lead(now, redis_now));
        self.local.replace_usage(policy, key, spent, now);
    }

    fn is_unsynced(&self, name: &Arc<str>) -> bool {
        self.unsynced_count.load(Ordering::Acquire) > 0 && self.unsynced.lock().contains(name)
    }

    /// Records that a key was spent without Redis.
    fn mark_unsynced(&self, name: Arc<str>) {
        let mut unsynced = self.unsynced.lock();
        add_unsynced(&mut unsynced, name);
        self.unsynced_count.store(unsynced.len(), Ordering::Release);
    }

    /// Records that Redis has merged what was spent of these keys without it.
    fn mark_synced(&self, keys: &[ScriptKey]) {
        if keys.iter().any(|key| key.is_unsynced) {
            let mut unsynced = self.unsynced.lock();
            for key in keys.iter().filter(|key| key.is_unsynced) {
                unsynced.remove(&key.name);
            }
            self.unsynced_count.store(unsynced.len(), Ordering::Release);
        }
    }
}

enum ParsedReply {
    Decided(RedisDecision),
    /// A key was spent under another rule. Holds the stored text of every key.
    RuleDiffers(Timestamp, Vec<String>),
}

impl ParsedReply {
    /// Returns `None` for a reply that the script cannot give, and for a decision that failed in the script.
    fn parse(DecisionReply { now, fields }: DecisionReply, keys: &[ScriptKey]) -> Option<Self> {
        let (Value::Int(allowed), fields) = fields.split_first()? else { return None };
        if *allowed < 0 {
            let stored = fields.iter().map(text).collect::<Option<Vec<_>>>()?;
            return (stored.len() == keys.len()).then_some(Self::RuleDiffers(now, stored));
        }
        let (each, rest) = fields.as_chunks::<4>();
        if each.len() != keys.len() || !rest.is_empty() {
            return None;
        }
        let each = each.iter().zip(keys).map(|(fields, key)| {
            let [Value::Int(taken), Value::Int(a), Value::Int(b), Value::Int(c)] = fields else {
                return None;
            };
            Some((*taken == 1, key.spent([*a, *b, *c])))
        });
        let each = each.collect::<Option<_>>()?;
        Some(Self::Decided(RedisDecision { now, allowed: *allowed == 1, each }))
    }
}

fn text(value: &Value) -> Option<String> {
    if let Value::BulkString(bytes) = value { String::from_utf8(bytes.clone()).ok() } else { None }
}

/// Computes the outcome of every check from the decision about its key.
fn outcome(
    checks: &[LimitCheck<'_>],
    keys: &[ScriptKey],
    key_of: &[usize],
    decided: &RedisDecision,
    peek: bool,
) -> LimitOutcome {
    let each_key: Vec<Decision> = keys
        .iter()
        .zip(&decided.each)
        .map(|(key, (taken, spent))| {
            let mut after = *spent;
            if *taken { Decision::Allowed } else { key.limit.take(&mut after, key.cost, decided.now) }
        })
        .collect();
    let each = key_of.iter().map(|index| (each_key[*index], decided.each[*index].1)).collect();
    let decision = match decide_binding(checks, keys, key_of, decided) {
        _ if decided.allowed && !peek => Decision::Allowed,
        // On a cluster there may be room by now where there was none.
        Decision::Allowed if !peek => Decision::Denied(LimitDenial::single(Some(RETRY_AT_ONCE))),
        decision => decision,
    };
    LimitOutcome { decision, each, now: decided.now, decided_alone: false }
}

/// Decides about the keys that bind, from what is spent of them now.
fn decide_binding(
    checks: &[LimitCheck<'_>],
    keys: &[ScriptKey],
    key_of: &[usize],
    decided: &RedisDecision,
) -> Decision {
    let mut spent: Vec<LimitUsage> = decided.each.iter().map(|(_, spent)| *spent).collect();
    let binding: Vec<usize> = (0..keys.len()).filter(|index| keys[*index].can_deny).collect();
    let mut claims: Vec<KeyCharge<'_, Limit>> = keys
        .iter()
        .zip(&mut spent)
        .filter(|(key, _)| key.can_deny)
        .map(|(key, spent)| KeyCharge { rule: &key.limit, spent, cost: key.cost })
        .collect();
    match take_all(&mut claims, decided.now) {
        Decision::Allowed => Decision::Allowed,
        Decision::Denied(refusal) => {
            let key = binding.get(refusal.denied_by).copied().unwrap_or(0);
            let first = (0..checks.len()).find(|check| key_of[*check] == key).unwrap_or(0);
            Decision::Denied(LimitDenial { denied_by: first, ..refusal })
        }
    }
}

#[async_trait]
impl LimitStore for RedisLimits {
    async fn take(&self, checks: &[LimitCheck<'_>], peek: bool) -> Result<LimitOutcome> {
        let (mut keys, key_of) = self.script_keys(checks);
        let operation = if peek { Operation::Peek } else { Operation::Take };
        let Some(decided) = self.decide_all(operation, &mut keys).await? else {
            return self.take_without_redis(checks, peek).await;
        };
        for (check, index) in checks.iter().zip(&key_of) {
            self.shared.remember(check.policy, check.key, decided.each[*index].1, decided.now);
        }
        Ok(outcome(checks, &keys, &key_of, &decided, peek))
    }

    async fn charge(&self, policy: &Arc<Policy>, key: &str, cost: u32) -> Result<(LimitUsage, Timestamp)> {
        match self.change(Operation::Charge, policy, key, cost, None).await? {
            Some(changed) => Ok(changed),
            None => self.charge_without_redis(policy, key, cost).await,
        }
    }

    async fn give_back(
        &self,
        policy: &Arc<Policy>,
        key: &str,
        cost: u32,
        taken_at: Option<Timestamp>,
    ) -> Result<(LimitUsage, Timestamp)> {
        match self.change(Operation::Give, policy, key, cost, taken_at).await? {
            Some((spent, now)) => {
                // `remember` ignores an unspent key, so what was remembered of it before is deleted here.
                if policy.spec.limit.is_unspent(&spent, self.shared.clock.now()) {
                    self.shared.local.reset_usage(policy, key);
                }
                Ok((spent, now))
            }
            // Only here: Redis continues from its own state, which has more spent and is safe.
            None => self.shared.local.give_back(policy, key, cost, taken_at).await,
        }
    }

    async fn forget(&self, policy: &Arc<Policy>, key: &str) -> Result<()> {
        let forgotten = self.change(Operation::Forget, policy, key, 0, None).await;
        self.shared.local.forget(policy, key).await?;
        forgotten?.map(|_| ()).ok_or_else(|| {
            weir_store::Error::unavailable(crate::ENGINE, "did not answer; the key is unchanged")
        })
    }

    async fn take_tier(
        &self,
        user: &str,
        rule: &Arc<ScopedRule<TierRule>>,
        cost: u32,
    ) -> Result<TierOutcome> {
        match self.take_tier_in_redis(user, rule, cost).await? {
            Some(taken) => Ok(taken),
            None => self.take_tier_without_redis(user, rule, cost).await,
        }
    }

    /// Nothing to do: Redis persists by its own settings, and what is spent without it is lost with the process.
    async fn flush(&self) {}

    async fn drain(&self) {
        self.shared.local.drain().await;
    }

    fn status(&self) -> LimitStatus {
        let decided_alone = self.shared.local_decisions.load(Ordering::Relaxed);
        LimitStatus { decided_alone, ..self.shared.local.status() }
    }
}

fn add_unsynced(unsynced: &mut HashSet<Arc<str>>, name: Arc<str>) {
    if unsynced.len() < UNSYNCED_MAX {
        unsynced.insert(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsynced_keys_are_bounded() {
        let mut unsynced = HashSet::new();
        (0..UNSYNCED_MAX + 10).for_each(|n| add_unsynced(&mut unsynced, n.to_string().into()));
        assert_eq!(unsynced.len(), UNSYNCED_MAX);
    }
}
