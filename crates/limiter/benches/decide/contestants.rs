//! The implementations that are compared: Weir's memory in several configurations, and `governor` on `DashMap`.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use governor::clock::Clock;
use governor::state::keyed::DashMapStateStore;
use governor::{Quota, RateLimiter};
use weir_core::Timestamp;
use weir_core::tier::{ScopedRule, TierRule, TokenBucket};
use weir_limiter::{Memory, MemoryOptions};

const START: Timestamp = Timestamp::from_seconds(1_700_000_000);
const DAY: Duration = Duration::from_secs(86_400);

type Governor<C> = RateLimiter<
    String,
    DashMapStateStore<String>,
    C,
    governor::middleware::NoOpMiddleware<<C as Clock>::Instant>,
>;

#[expect(clippy::ptr_arg, reason = "governor requires a String")]
pub(crate) trait Contestant: Send + Sync {
    fn name(&self) -> &'static str;
    fn decide(&self, id: &String) -> bool;
}

/// The two buckets of a tier, with the process's clock or a fixed time.
pub(crate) struct Tier {
    name: &'static str,
    memory: Memory<TierRule>,
    policy: Arc<ScopedRule<TierRule>>,
    started: Option<Instant>,
}

pub(crate) struct Bucket {
    memory: Memory<TokenBucket>,
    policy: Arc<ScopedRule<TokenBucket>>,
}

pub(crate) struct Keyed<C: Clock>(&'static str, Governor<C>);

impl Tier {
    pub(crate) fn new(name: &'static str, started: Option<Instant>, capacity: u32) -> Self {
        Self {
            name,
            memory: Memory::new(MemoryOptions::default()),
            policy: policy([bucket(capacity); 2]),
            started,
        }
    }
}

impl Bucket {
    pub(crate) fn new(capacity: u32) -> Self {
        Self { memory: Memory::new(MemoryOptions::default()), policy: policy(bucket(capacity)) }
    }
}

impl<C: Clock> Keyed<C> {
    pub(crate) fn new(name: &'static str, capacity: u32, clock: C) -> Self {
        let quota = Quota::with_period(DAY).expect("not zero");
        let quota = quota.allow_burst(NonZeroU32::new(capacity).expect("not zero"));
        Self(name, RateLimiter::dashmap_with_clock(quota, clock))
    }
}

impl Contestant for Tier {
    fn name(&self) -> &'static str {
        self.name
    }

    fn decide(&self, id: &String) -> bool {
        let now = self.started.map_or(START, |started| START.plus(started.elapsed()));
        let taken = self.memory.take(&self.policy, id, 1, now);
        taken.is_ok_and(|taken| taken.decision.is_allowed())
    }
}

impl Contestant for Bucket {
    fn name(&self) -> &'static str {
        "weir, one bucket"
    }

    fn decide(&self, id: &String) -> bool {
        let taken = self.memory.take(&self.policy, id, 1, START);
        taken.is_ok_and(|taken| taken.decision.is_allowed())
    }
}

impl<C: Clock + Send + Sync> Contestant for Keyed<C>
where
    C::Instant: Send + Sync,
{
    fn name(&self) -> &'static str {
        self.0
    }

    fn decide(&self, id: &String) -> bool {
        self.1.check_key(id).is_ok()
    }
}

fn policy<R>(rule: R) -> Arc<ScopedRule<R>> {
    Arc::new(ScopedRule { scope: 0, rule })
}

fn bucket(capacity: u32) -> TokenBucket {
    TokenBucket::new(capacity, 1, DAY).expect("in range")
}
