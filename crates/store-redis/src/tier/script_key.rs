//! One key of a decision in the script's numbers, which are below 2⁵³, since Lua has only doubles.
//!
//! A bucket's level is a count of ticks that may exceed that. The script gets whole microseconds and a fraction, counted in
//! 1/refill of a microsecond. A cost is converted here. A bucket that takes
//! longer than a century to fill has more microseconds than Lua can hold: they are counted in steps.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use weir_core::Timestamp;
use weir_core::tier::{BucketLevel, FixedWindow, Limit, LimitUsage, Rule, SlidingWindow, TokenBucket};

/// A step is 2⁵² microseconds, some 142 years: the sum of two numbers below it is below 2⁵³.
const STEP_BITS: u32 = 52;
/// The most steps that are sent: more are debts for longer than anybody waits.
const STEPS_MAX: u128 = 1 << 31;

/// One key of a decision. A key that occurs several times in a decision is one `ScriptKey` with the sum of the costs.
#[derive(Clone, Debug)]
pub(super) struct ScriptKey {
    /// The Redis key.
    pub(super) name: Arc<str>,
    pub(super) limit: Limit,
    pub(super) cost: u32,
    pub(super) taken_at: Option<Timestamp>,
    /// Whether it can deny. A shadow policy cannot.
    pub(super) can_deny: bool,
    /// What this server remembers as spent.
    pub(super) local_spent: LimitUsage,
    /// This server's time.
    pub(super) local_now: Timestamp,
    /// Whether it was spent without Redis, so that `local_spent` is merged with what Redis has.
    pub(super) is_unsynced: bool,
    /// The text in Redis, written under another rule, and what is spent in terms of the present rule.
    pub(super) adopted: Option<(String, LimitUsage)>,
}

/// Returns the Redis key of a limit's key. The text in braces decides the hash slot, so keys with the same text share one.
pub(super) fn redis_name(scope: u32, policy: &str, key: &str) -> Arc<str> {
    let mut name = format!("WeirLimit:{scope}:");
    let escape = |name: &mut String, text: &str| {
        for c in text.chars() {
            match c {
                '{' => name.push_str("%7B"),
                '}' => name.push_str("%7D"),
                '%' => name.push_str("%25"),
                c => name.push(c),
            }
        }
    };
    escape(&mut name, policy);
    name.push_str(":{");
    escape(&mut name, key);
    name.push('}');
    name.into()
}

impl ScriptKey {
    /// Appends the script's arguments for this key (see `tier.lua`).
    pub(super) fn add_arguments(&self, arguments: &mut Vec<String>) {
        let (limit, [steps, whole, parts], others) = match &self.limit {
            Limit::TokenBucket(bucket) => {
                let others =
                    bucket.capacity().checked_sub(self.cost).map(|others| refill_time(bucket, others));
                (None, refill_time(bucket, self.cost), others)
            }
            Limit::FixedWindow(window) => (Some(window.limit()), [0; 3], Some([0; 3])),
            Limit::SlidingWindow(window) => (Some(window.limit()), [0; 3], Some([0; 3])),
        };
        let words: [Option<u128>; 12] = [
            Some(self.cost.into()),
            limit.map(u128::from),
            Some(whole),
            Some(parts),
            others.map(|[_, whole, _]| whole),
            others.map(|[_, _, parts]| parts),
            Some(steps),
            others.map(|[steps, ..]| steps),
            self.taken_at.and_then(|at| u128::try_from(at.as_micros()).ok()),
            Some(self.can_deny.into()),
            Some(self.is_unsynced.into()),
            Some(self.adopted.is_some().into()),
        ];
        let mut ask = rule(&self.limit);
        for word in words {
            match word {
                // Writing to a string cannot fail.
                Some(number) => drop(write!(ask, " {number}")),
                None => ask.push_str(" -"),
            }
        }
        arguments.push(ask);
        let local = state(&self.limit, &self.local_spent);
        arguments
            .push(local.map_or_else(String::new, |local| format!("{local} {}", self.local_now.as_micros())));
        if let Some((old, new)) = &self.adopted {
            // Unspent is a bucket that has been full since the epoch, or a window that ended then.
            let new = state(&self.limit, new).unwrap_or_else(|| "0 0 0".to_owned());
            arguments.extend([old.clone(), new]);
        }
    }

    /// Converts the script's three numbers to what is spent of the key.
    pub(super) fn spent(&self, [a, b, c]: [i64; 3]) -> LimitUsage {
        let small = |number: i64| u32::try_from(number).unwrap_or(u32::MAX);
        match &self.limit {
            Limit::TokenBucket(bucket) => {
                let whole = (i128::from(c) << STEP_BITS) + i128::from(a);
                let ticks = whole * i128::from(bucket.refill()) + i128::from(b);
                level(ticks).into()
            }
            _ => LimitUsage(a, small(b), small(c)),
        }
    }

    /// Converts the text in Redis, written under another rule, to what is spent under this one. Returns `None` for a text that
    /// Weir does not write.
    pub(super) fn adopt(&self, stored: &str, now: Timestamp) -> Option<LimitUsage> {
        let (rule, numbers) = stored.split_once(' ')?;
        let mut numbers = numbers.split(' ').map(|number| number.parse().ok());
        let spent = [numbers.next()??, numbers.next()??, numbers.next()??];
        let old = Self { limit: parse_rule(rule)?, ..self.clone() };
        let mut spent = old.spent(spent);
        // Written in the future: Redis's clock was set back since.
        if let Some(Some(written_at)) = numbers.next() {
            old.limit.move_back(&mut spent, Timestamp::from_micros(written_at).since(now));
        }
        Some(self.limit.carry_over(&old.limit, spent, now))
    }
}

/// Returns the time in which a bucket regains `tokens`: steps, microseconds and parts of one.
fn refill_time(bucket: &TokenBucket, tokens: u32) -> [u128; 3] {
    let refill = u128::from(bucket.refill().max(1));
    let ticks = u128::from(tokens) * bucket.period().as_micros();
    let (steps, whole) = split_steps(ticks / refill);
    [steps, whole, ticks % refill]
}

/// Splits microseconds into steps and the rest.
fn split_steps(micros: u128) -> (u128, u128) {
    ((micros >> STEP_BITS).min(STEPS_MAX), micros & ((1 << STEP_BITS) - 1))
}

/// Returns the text of a rule. What was spent stays valid when only a bucket's capacity or a window's limit changes, so these are
/// not part of it.
fn rule(limit: &Limit) -> String {
    match limit {
        Limit::TokenBucket(bucket) => format!("B:{}:{}", bucket.refill(), bucket.period().as_micros()),
        Limit::FixedWindow(window) => format!("F:{}", window.window().as_micros()),
        Limit::SlidingWindow(window) => format!("S:{}", window.window().as_micros()),
    }
}

fn parse_rule(text: &str) -> Option<Limit> {
    let mut words = text.split(':');
    let (kind, first) = (words.next()?, words.next()?.parse::<u64>().ok()?);
    match kind {
        "B" => {
            let period = Duration::from_micros(words.next()?.parse().ok()?);
            TokenBucket::new(1, u32::try_from(first).ok()?, period).ok().map(Limit::TokenBucket)
        }
        "F" => FixedWindow::new(1, Duration::from_micros(first)).ok().map(Limit::FixedWindow),
        "S" => SlidingWindow::new(1, Duration::from_micros(first)).ok().map(Limit::SlidingWindow),
        _ => None,
    }
}

/// Returns the script's numbers for what is spent, or `None` for unspent.
fn state(limit: &Limit, spent: &LimitUsage) -> Option<String> {
    if *spent == limit.unspent() {
        return None;
    }
    match limit {
        Limit::TokenBucket(bucket) => {
            let (upper, low) = BucketLevel::from(*spent).to_parts();
            let (ticks, refill) =
                ((i128::from(upper) << 32) | i128::from(low), i128::from(bucket.refill().max(1)));
            let (whole, parts) = (ticks.div_euclid(refill), ticks.rem_euclid(refill));
            // A level before the epoch is unspent.
            (whole > 0).then(|| {
                let (steps, whole) = split_steps(whole.unsigned_abs());
                format!("{whole} {parts} {steps}")
            })
        }
        _ => {
            let LimitUsage(a, b, c) = spent;
            (*a > 0).then(|| format!("{a} {b} {c}"))
        }
    }
}

fn level(ticks: i128) -> BucketLevel {
    let low = u32::try_from(ticks & i128::from(u32::MAX)).unwrap_or(0);
    BucketLevel::from_parts(i64::try_from(ticks >> 32).unwrap_or(i64::MAX), low)
}
