//! Limits in Redis, shared by all servers: decisions that wait together are one call of a script, by Redis's own clock.
//!
//! Each server also remembers what Redis told it of a key. While Redis does not answer, it goes on from there with buckets of
//! its own, as each policy wants; and when Redis has forgotten a key, it is told what the server knew. So an outage gives
//! nobody more than the limit times the number of servers, and a Redis that comes back empty gives nobody a fresh start.
//!
//! On a cluster, keys of the same text are together. A decision about others takes one call after the other and gives back
//! what it took when a later one denies: until then others may be denied for its sake, and nobody gets past a limit.

mod batch;
mod outage;
mod part;

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

use self::batch::{Question, Questions, Reply};
use self::part::{Part, name};
use crate::client::Redis;

/// Keys spent in an outage that Redis is to be told of; further ones go on from what Redis knew.
const UNTOLD_MAX: usize = 100_000;
/// When to ask again for what there was no room for a moment ago.
const SOON: Duration = Duration::from_millis(1);
/// How often a key that changes its rule under our hands is looked at again.
const TURNS_MAX: usize = 4;

/// Limits in Redis. Clones share them.
#[derive(Clone)]
pub struct RedisLimits {
    inner: Arc<Inner>,
}

struct Inner {
    redis: Redis,
    questions: Questions,
    /// What is known of keys, and what decides without Redis.
    local: LocalLimiter,
    /// This server's, for what it remembers.
    clock: Arc<dyn Clock>,
    /// The keys that were spent without Redis.
    untold: Mutex<HashSet<Arc<str>>>,
    untold_count: AtomicUsize,
    /// How many decisions were made without Redis.
    alone: AtomicU64,
}

/// What a script is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Take,
    Peek,
    Charge,
    Give,
    Forget,
}

impl Mode {
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

/// What Redis answered.
struct ScriptReply {
    now: Timestamp,
    allowed: bool,
    /// For each part whether it was spent, and what has been spent of it now.
    each: Vec<(bool, LimitUsage)>,
}

impl RedisLimits {
    /// Limits in Redis, with `local` for when it does not answer. `test_clock` replaces Redis's own. Of decisions that wait for
    /// Redis there are at most `capacity` (on a cluster in each of several lanes); further ones are refused.
    #[must_use]
    pub fn start(
        redis: Redis,
        local: LocalLimiter,
        clock: Arc<dyn Clock>,
        test_clock: Option<Arc<dyn Clock>>,
        capacity: usize,
        metrics: LaneMetrics,
    ) -> Self {
        let questions = Questions::start(redis.clone(), test_clock, capacity, metrics);
        let (untold, untold_count, alone) = (Mutex::default(), AtomicUsize::new(0), AtomicU64::new(0));
        Self { inner: Arc::new(Inner { redis, questions, local, clock, untold, untold_count, alone }) }
    }

    /// The parts of a decision, each key once, and which of them each ask belongs to.
    fn parts(&self, asks: &[LimitCheck<'_>]) -> (Vec<Part>, Vec<usize>) {
        let (now, mut parts) = (self.inner.clock.now(), Vec::<Part>::with_capacity(asks.len()));
        let mut part_of = Vec::with_capacity(asks.len());
        for ask in asks {
            let name = key_of(ask.policy, ask.key);
            let known = parts.iter().position(|part| part.name == name);
            part_of.push(known.unwrap_or(parts.len()));
            match known {
                Some(at) => parts[at].cost = parts[at].cost.saturating_add(ask.cost),
                None => {
                    let spent = self.inner.local.known(ask.policy, ask.key, now);
                    let part = self.part(name, ask.policy.spec.limit, spent, ask.cost);
                    parts.push(Part { binds: !ask.policy.spec.shadow, ..part });
                }
            }
        }
        (parts, part_of)
    }

    fn part(&self, name: Arc<str>, limit: Limit, known: LimitUsage, cost: u32) -> Part {
        let (counts, known_at) = (self.inner.is_untold(&name), self.inner.clock.now());
        Part { name, limit, cost, taken_at: None, binds: true, known, known_at, counts, adopted: None }
    }

    /// Asks about parts that are together; none when Redis does not answer.
    async fn ask(&self, mode: Mode, parts: &mut [Part]) -> Result<Option<ScriptReply>> {
        for _ in 0..TURNS_MAX {
            let Some(reply) = self.inner.questions.ask(Question::new(mode, parts)).await? else {
                return Ok(None);
            };
            match Outcome::read(reply, parts) {
                None => return Ok(None),
                Some(Outcome::ScriptReply(told)) => {
                    self.inner.tell(parts);
                    return Ok(Some(told));
                }
                Some(Outcome::Differs(now, stored)) => {
                    for (part, stored) in parts.iter_mut().zip(stored) {
                        // What nobody wrote is as good as nothing.
                        let adopted = part.adopt(&stored, now).unwrap_or_else(|| part.limit.unspent());
                        part.adopted = (!stored.is_empty()).then_some((stored, adopted));
                    }
                }
            }
        }
        Ok(None)
    }

    /// The same for parts that may be on several servers of a cluster: one group after the other, and what was taken is
    /// given back when a later one denies.
    async fn ask_all(&self, mode: Mode, parts: &mut [Part]) -> Result<Option<ScriptReply>> {
        let groups = self.inner.redis.group(parts.iter().map(|part| &*part.name));
        if groups.len() == 1 {
            return self.ask(mode, parts).await;
        }
        let mut each = vec![(false, LimitUsage(0, 0, 0)); parts.len()];
        let (mut is_open, mut latest, mut done) = (true, Timestamp::from_micros(i64::MIN), Vec::new());
        for at in groups {
            let mut some: Vec<Part> = at.iter().map(|at| parts[*at].clone()).collect();
            if !is_open {
                // Denied already: what is left is only looked at.
                some.iter_mut().for_each(|part| part.cost = 0);
            }
            let told = self.ask(mode, &mut some).await;
            let Ok(Some(told)) = told else {
                self.undo(&done).await;
                return told;
            };
            latest = latest.max(told.now);
            for ((at, told), part) in at.iter().zip(&told.each).zip(some) {
                each[*at] = (told.0 && is_open, told.1);
                if told.0 && is_open {
                    done.push((*at, Part { taken_at: Some(latest), counts: false, adopted: None, ..part }));
                }
            }
            is_open &= told.allowed;
        }
        if mode == Mode::Take && !is_open {
            for (at, spent) in self.undo(&done).await {
                each[at] = (false, spent);
            }
        }
        Ok(Some(ScriptReply { now: latest, allowed: is_open, each }))
    }

    /// Gives back what was taken. What Redis does not answer for stays spent, which is the safe side.
    async fn undo(&self, done: &[(usize, Part)]) -> Vec<(usize, LimitUsage)> {
        let mut after = Vec::with_capacity(done.len());
        for (at, part) in done {
            if let Ok(Some(told)) = self.ask(Mode::Give, &mut [part.clone()]).await {
                after.extend(told.each.first().map(|(_, spent)| (*at, *spent)));
            }
        }
        after
    }

    /// One key, whatever there is room for; none when Redis does not answer.
    async fn change(
        &self,
        mode: Mode,
        policy: &Arc<Policy>,
        key: &str,
        cost: u32,
        taken_at: Option<Timestamp>,
    ) -> Result<Option<(LimitUsage, Timestamp)>> {
        let known = self.inner.local.known(policy, key, self.inner.clock.now());
        let part = self.part(key_of(policy, key), policy.spec.limit, known, cost);
        let Some(told) = self.ask(mode, &mut [Part { taken_at, ..part }]).await? else { return Ok(None) };
        let Some((_, spent)) = told.each.first().copied() else { return Ok(None) };
        self.inner.learn(policy, key, spent, told.now);
        Ok(Some((spent, told.now)))
    }

    async fn take_tier_there(
        &self,
        user: &str,
        rule: &Arc<ScopedRule<TierRule>>,
        cost: u32,
    ) -> Result<Option<TierOutcome>> {
        let known = self.inner.local.known_tier(user, rule, self.inner.clock.now());
        let part = |which: usize, word: &str| {
            let limit = Limit::TokenBucket(rule.rule[which]);
            self.part(name(rule.scope, word, user), limit, known[which].into(), cost)
        };
        let mut parts = [part(DAILY, "daily"), part(MINUTE, "minute")];
        let Some(told) = self.ask(Mode::Take, &mut parts).await? else { return Ok(None) };
        // One for each part: `Outcome::read` has looked.
        let spent = [DAILY, MINUTE].map(|which| BucketLevel::from(told.each[which].1));
        let (now, mut known) = (self.inner.clock.now(), spent);
        rule.rule.move_back(&mut known, ahead_of(now, told.now));
        self.inner.local.learn_tier(user, rule, known, now);
        let decision = if told.allowed {
            Decision::Allowed
        } else {
            Decision::Denied(rule.rule.denial(&spent, cost, told.now))
        };
        Ok(Some(TierOutcome { decision, spent, now: told.now }))
    }
}

fn key_of(policy: &Policy, key: &str) -> Arc<str> {
    name(policy.scope(), policy.name.as_str(), key)
}

/// How far Redis's clock is ahead of this server's, where that is more than clocks differ by. What Redis told is moved back by as
/// much: while Redis is away, keys must not be kept out until this server's clock has caught up.
fn ahead_of(own: Timestamp, told: Timestamp) -> Duration {
    let ahead = told.since(own);
    if ahead > STEP_MIN { ahead } else { Duration::ZERO }
}

impl Inner {
    /// Remembers what Redis told of a key.
    fn learn(&self, policy: &Arc<Policy>, key: &str, mut spent: LimitUsage, told_at: Timestamp) {
        let now = self.clock.now();
        policy.spec.limit.move_back(&mut spent, ahead_of(now, told_at));
        self.local.learn(policy, key, spent, now);
    }

    fn is_untold(&self, name: &Arc<str>) -> bool {
        self.untold_count.load(Ordering::Acquire) > 0 && self.untold.lock().contains(name)
    }

    /// Takes note of a key that was spent without Redis.
    fn remember_untold(&self, name: Arc<str>) {
        let mut untold = self.untold.lock();
        note_untold(&mut untold, name);
        self.untold_count.store(untold.len(), Ordering::Release);
    }

    /// Redis knows now what was spent without it.
    fn tell(&self, parts: &[Part]) {
        if parts.iter().any(|part| part.counts) {
            let mut untold = self.untold.lock();
            for part in parts.iter().filter(|part| part.counts) {
                untold.remove(&part.name);
            }
            self.untold_count.store(untold.len(), Ordering::Release);
        }
    }
}

/// What a reply of the script says.
enum Outcome {
    ScriptReply(ScriptReply),
    /// Something was spent under another rule: what stands there now.
    Differs(Timestamp, Vec<String>),
}

impl Outcome {
    /// None for a reply that no script of ours gives, and for a decision that failed there.
    fn read(Reply { now, fields }: Reply, parts: &[Part]) -> Option<Self> {
        let (Value::Int(allowed), fields) = fields.split_first()? else { return None };
        if *allowed < 0 {
            let stored = fields.iter().map(text).collect::<Option<Vec<_>>>()?;
            return (stored.len() == parts.len()).then_some(Self::Differs(now, stored));
        }
        let (each, rest) = fields.as_chunks::<4>();
        if each.len() != parts.len() || !rest.is_empty() {
            return None;
        }
        let each = each.iter().zip(parts).map(|(fields, part)| {
            let [Value::Int(taken), Value::Int(a), Value::Int(b), Value::Int(c)] = fields else {
                return None;
            };
            Some((*taken == 1, part.spent([*a, *b, *c])))
        });
        Some(Self::ScriptReply(ScriptReply {
            now,
            allowed: *allowed == 1,
            each: each.collect::<Option<_>>()?,
        }))
    }
}

fn text(value: &Value) -> Option<String> {
    if let Value::BulkString(bytes) = value { String::from_utf8(bytes.clone()).ok() } else { None }
}

/// What each ask is told, from what became of its part.
fn answer(
    asks: &[LimitCheck<'_>],
    parts: &[Part],
    part_of: &[usize],
    told: &ScriptReply,
    peek: bool,
) -> LimitOutcome {
    let alone: Vec<Decision> = parts
        .iter()
        .zip(&told.each)
        .map(|(part, (taken, spent))| {
            let mut after = *spent;
            if *taken { Decision::Allowed } else { part.limit.take(&mut after, part.cost, told.now) }
        })
        .collect();
    let each = part_of.iter().map(|at| (alone[*at], told.each[*at].1)).collect();
    let decision = match decide(asks, parts, part_of, told) {
        _ if told.allowed && !peek => Decision::Allowed,
        // On a cluster there may be room by now where there was none.
        Decision::Allowed if !peek => Decision::Denied(LimitDenial::single(Some(SOON))),
        decision => decision,
    };
    LimitOutcome { decision, each, now: told.now }
}

/// The decision about those that bind, as the rule makes it from what has been spent.
fn decide(asks: &[LimitCheck<'_>], parts: &[Part], part_of: &[usize], told: &ScriptReply) -> Decision {
    let mut spent: Vec<LimitUsage> = told.each.iter().map(|(_, spent)| *spent).collect();
    let binding: Vec<usize> = (0..parts.len()).filter(|at| parts[*at].binds).collect();
    let mut claims: Vec<KeyCharge<'_, Limit>> = parts
        .iter()
        .zip(&mut spent)
        .filter(|(part, _)| part.binds)
        .map(|(part, spent)| KeyCharge { rule: &part.limit, spent, cost: part.cost })
        .collect();
    match take_all(&mut claims, told.now) {
        Decision::Allowed => Decision::Allowed,
        Decision::Denied(refusal) => {
            let part = binding.get(refusal.denied_by).copied().unwrap_or(0);
            let first = (0..asks.len()).find(|at| part_of[*at] == part).unwrap_or(0);
            Decision::Denied(LimitDenial { denied_by: first, ..refusal })
        }
    }
}

#[async_trait]
impl LimitStore for RedisLimits {
    async fn take(&self, asks: &[LimitCheck<'_>], peek: bool) -> Result<LimitOutcome> {
        let (mut parts, part_of) = self.parts(asks);
        let mode = if peek { Mode::Peek } else { Mode::Take };
        let Some(told) = self.ask_all(mode, &mut parts).await? else {
            return self.take_alone(asks, peek).await;
        };
        for (ask, at) in asks.iter().zip(&part_of) {
            self.inner.learn(ask.policy, ask.key, told.each[*at].1, told.now);
        }
        Ok(answer(asks, &parts, &part_of, &told, peek))
    }

    async fn charge(&self, policy: &Arc<Policy>, key: &str, cost: u32) -> Result<(LimitUsage, Timestamp)> {
        match self.change(Mode::Charge, policy, key, cost, None).await? {
            Some(changed) => Ok(changed),
            None => self.charge_alone(policy, key, cost).await,
        }
    }

    async fn give_back(
        &self,
        policy: &Arc<Policy>,
        key: &str,
        cost: u32,
        taken_at: Option<Timestamp>,
    ) -> Result<(LimitUsage, Timestamp)> {
        match self.change(Mode::Give, policy, key, cost, taken_at).await? {
            Some((spent, now)) => {
                self.inner.learn_less(policy, key, spent);
                Ok((spent, now))
            }
            None => self.give_back_alone(policy, key, cost, taken_at).await,
        }
    }

    async fn forget(&self, policy: &Arc<Policy>, key: &str) -> Result<()> {
        let forgotten = self.change(Mode::Forget, policy, key, 0, None).await;
        self.inner.local.forget(policy, key).await?;
        forgotten?.map(|_| ()).ok_or_else(|| {
            weir_store::Error::unavailable(crate::ENGINE, "did not answer; the key is as it was")
        })
    }

    async fn take_tier(
        &self,
        user: &str,
        rule: &Arc<ScopedRule<TierRule>>,
        cost: u32,
    ) -> Result<TierOutcome> {
        match self.take_tier_there(user, rule, cost).await? {
            Some(taken) => Ok(taken),
            None => self.take_tier_alone(user, rule, cost).await,
        }
    }

    /// What Redis has counted it keeps as its own settings say; what is counted without it ends with the process.
    async fn flush(&self) {}

    async fn drain(&self) {
        self.inner.local.drain().await;
    }

    fn status(&self) -> LimitStatus {
        let decided_alone = self.inner.alone.load(Ordering::Relaxed);
        LimitStatus { decided_alone, ..self.inner.local.status() }
    }
}

fn note_untold(untold: &mut HashSet<Arc<str>>, name: Arc<str>) {
    if untold.len() < UNTOLD_MAX {
        untold.insert(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_keys_are_untold_than_the_bound() {
        let mut untold = HashSet::new();
        (0..UNTOLD_MAX + 10).for_each(|n| note_untold(&mut untold, n.to_string().into()));
        assert_eq!(untold.len(), UNTOLD_MAX);
    }
}
