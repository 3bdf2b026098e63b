//! One key of a decision as the script sees it: numbers below 2⁵³ alone, since Lua has no others.
//!
//! A bucket's level is a count of ticks that Lua could not hold. There it is whole microseconds and the parts of one that are
//! left, as many to the microsecond as the bucket gains tokens in a period; what a cost comes to is divided up here. A bucket
//! that takes longer than a century to fill has microseconds that Lua could not hold either: they are counted in steps.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use weir_core::Timestamp;
use weir_core::tier::{BucketLevel, FixedWindow, Limit, LimitUsage, Rule, SlidingWindow, TokenBucket};

/// A step is 2⁵² microseconds, some 142 years: two numbers below it can be added up below 2⁵³.
const STEP_BITS: u32 = 52;
/// The most steps that are told: more are debts for longer than anybody waits.
const STEPS_MAX: u128 = 1 << 31;

/// One key of a decision, once, with everything it asks for.
#[derive(Clone, Debug)]
pub(super) struct Part {
    /// The name of the key in Redis.
    pub(super) name: Arc<str>,
    pub(super) limit: Limit,
    pub(super) cost: u32,
    pub(super) taken_at: Option<Timestamp>,
    /// Whether it can deny.
    pub(super) binds: bool,
    /// What this server knows of it, and what its clock shows.
    pub(super) known: LimitUsage,
    pub(super) known_at: Timestamp,
    /// Whether that counts also where Redis knows something else.
    pub(super) counts: bool,
    /// What stands there under another rule, and what takes its place.
    pub(super) adopted: Option<(String, LimitUsage)>,
}

/// The name of a key in Redis. What stands in braces decides where on a cluster it is, so keys of one text are together.
pub(super) fn name(scope: u32, policy: &str, key: &str) -> Arc<str> {
    let mut name = format!("WeirLimit:{scope}:");
    let plain = |name: &mut String, text: &str| {
        for c in text.chars() {
            match c {
                '{' => name.push_str("%7B"),
                '}' => name.push_str("%7D"),
                '%' => name.push_str("%25"),
                c => name.push(c),
            }
        }
    };
    plain(&mut name, policy);
    name.push_str(":{");
    plain(&mut name, key);
    name.push('}');
    name.into()
}

impl Part {
    /// What the script is told of it.
    pub(super) fn add_arguments(&self, arguments: &mut Vec<String>) {
        let (limit, [steps, whole, parts], others) = match &self.limit {
            Limit::TokenBucket(bucket) => {
                let others = bucket.capacity().checked_sub(self.cost).map(|others| divided(bucket, others));
                (None, divided(bucket, self.cost), others)
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
            Some(self.binds.into()),
            Some(self.counts.into()),
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
        let known = state(&self.limit, &self.known);
        arguments
            .push(known.map_or_else(String::new, |known| format!("{known} {}", self.known_at.as_micros())));
        if let Some((old, new)) = &self.adopted {
            // Nothing spent is a bucket that was full long ago, a window that is long past.
            let new = state(&self.limit, new).unwrap_or_else(|| "0 0 0".to_owned());
            arguments.extend([old.clone(), new]);
        }
    }

    /// What a key has spent, from the script's three numbers.
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

    /// What stands in Redis under another rule, as this one sees it; none for a text that no Weir wrote.
    pub(super) fn adopt(&self, stored: &str, now: Timestamp) -> Option<LimitUsage> {
        let (rule, numbers) = stored.split_once(' ')?;
        let mut numbers = numbers.split(' ').map(|number| number.parse().ok());
        let spent = [numbers.next()??, numbers.next()??, numbers.next()??];
        let old = Self { limit: parse_rule(rule)?, ..self.clone() };
        let mut spent = old.spent(spent);
        // Written at a time that is still to come: the clock there was set back since.
        if let Some(Some(written_at)) = numbers.next() {
            old.limit.move_back(&mut spent, Timestamp::from_micros(written_at).since(now));
        }
        Some(self.limit.carry_over(&old.limit, spent, now))
    }
}

/// So many tokens in steps, microseconds and parts of one, as the bucket regains them.
fn divided(bucket: &TokenBucket, tokens: u32) -> [u128; 3] {
    let refill = u128::from(bucket.refill().max(1));
    let ticks = u128::from(tokens) * bucket.period().as_micros();
    let (steps, whole) = stepped(ticks / refill);
    [steps, whole, ticks % refill]
}

/// Microseconds in steps and the rest.
fn stepped(micros: u128) -> (u128, u128) {
    ((micros >> STEP_BITS).min(STEPS_MAX), micros & ((1 << STEP_BITS) - 1))
}

/// What counts of a rule for what was spent under it: neither how much a bucket holds nor how much fits in a window.
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

/// The script's numbers for what was spent; none when that is nothing.
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
            // A level of long ago is nothing spent.
            (whole > 0).then(|| {
                let (steps, whole) = stepped(whole.unsigned_abs());
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
