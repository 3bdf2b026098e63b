//! The limits of one downstream: how many of its calls may be under way, and how many may begin in a second.
//!
//! They decide how many jobs are claimed, so jobs beyond them stay in the store and lose no attempt, and nobody waits behind
//! them. A broker may name more jobs than that: those are returned without a call.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use weir_core::tier::{BucketLevel, Rule, TokenBucket};
use weir_core::{Clock, Timestamp};

use super::concurrency::DownstreamUse;
use crate::request::settings::DownstreamSettings;

const SECOND: Duration = Duration::from_secs(1);

pub(super) struct DownstreamLimits {
    concurrency: usize,
    rate: Option<CallRate>,
    clock: Arc<dyn Clock>,
}

/// At most `per_second` calls a second, and a tenth of that at once, at least one.
struct CallRate {
    bucket: TokenBucket,
    level: Mutex<BucketLevel>,
}

impl DownstreamLimits {
    pub(super) fn new(settings: &DownstreamSettings, clock: &Arc<dyn Clock>) -> Self {
        Self {
            concurrency: settings.concurrency.unwrap_or(usize::MAX),
            rate: settings.per_second.and_then(CallRate::new),
            clock: Arc::clone(clock),
        }
    }

    /// How many jobs to claim while so many calls are under way and other claims may bring so many jobs. Calls of a rate are
    /// offered some at a time, so that a claim is worth its commit.
    pub(super) fn available_calls(&self, used: DownstreamUse) -> usize {
        let by_rate = self.rate.as_ref().map_or(usize::MAX, |rate| rate.available(self.clock.now()));
        self.concurrency.saturating_sub(used.calls).min(by_rate).saturating_sub(used.claimed)
    }

    /// Whether all calls that may be under way are.
    pub(super) const fn is_full(&self, running: usize) -> bool {
        running >= self.concurrency
    }

    /// The time until the rate offers calls again; `None` if it does, or if there is none.
    pub(super) fn pause(&self) -> Option<Duration> {
        self.rate.as_ref()?.pause(self.clock.now())
    }

    /// Counts a call that begins while `running` others are under way. Returns when it may begin at the earliest if it may not
    /// begin now.
    pub(super) fn begin(&self, running: usize) -> Result<(), Timestamp> {
        let now = self.clock.now();
        if self.is_full(running) {
            return Err(now);
        }
        self.rate.as_ref().map_or(Ok(()), |rate| rate.begin(now))
    }
}

impl CallRate {
    fn new(per_second: NonZeroU32) -> Option<Self> {
        let at_once = (per_second.get() / 10).max(1);
        let bucket = TokenBucket::new(at_once, per_second.get(), SECOND).ok()?;
        Some(Self { level: Mutex::new(bucket.unspent()), bucket })
    }

    /// How many calls are worth a claim.
    const fn batch(&self) -> u32 {
        self.bucket.capacity().div_ceil(2)
    }

    fn available(&self, now: Timestamp) -> usize {
        let remaining = self.bucket.limit_state(&self.level.lock(), now).remaining;
        if remaining < self.batch() { 0 } else { remaining as usize }
    }

    fn pause(&self, now: Timestamp) -> Option<Duration> {
        let level = self.level.lock();
        let is_ready = self.bucket.has_room(&level, self.batch(), now);
        if is_ready { None } else { self.bucket.denial(&level, self.batch(), now).retry_after }
    }

    fn begin(&self, now: Timestamp) -> Result<(), Timestamp> {
        let mut level = self.level.lock();
        if self.bucket.has_room(&level, 1, now) {
            self.bucket.charge(&mut level, 1, now);
            return Ok(());
        }
        let wait = self.bucket.denial(&level, 1, now).retry_after;
        Err(now.plus(wait.unwrap_or(SECOND)))
    }
}

#[cfg(test)]
mod tests {
    use weir_core::ManualClock;

    use super::*;
    use crate::settings::Settings;
    use crate::settings::source::Sources;

    fn limits(per_second: Option<u32>, concurrency: Option<usize>, clock: &ManualClock) -> DownstreamLimits {
        let mut settings = Settings::read(Sources::default()).unwrap().request.downstream;
        settings.per_second = per_second.and_then(NonZeroU32::new);
        settings.concurrency = concurrency;
        DownstreamLimits::new(&settings, &(Arc::new(clock.clone()) as Arc<dyn Clock>))
    }

    const fn calls(calls: usize) -> DownstreamUse {
        DownstreamUse { calls, claimed: 0 }
    }

    #[test]
    fn no_second_has_more_calls_than_the_rate_and_a_tenth_and_none_is_wasted() {
        for per_second in [1, 5, 9, 10, 33, 500] {
            let clock = ManualClock::at(Timestamp::from_seconds(1_000));
            let limits = limits(Some(per_second), None, &clock);
            let (mut begun, mut at) = (Vec::new(), 0_u64);
            while at < 5_000_000 {
                for _ in 0..limits.available_calls(calls(7)) {
                    assert_eq!(limits.begin(7), Ok(()));
                    begun.push(at);
                }
                let pause = limits.pause().expect("everything was used");
                assert!(!pause.is_zero());
                clock.advance(pause);
                at += u64::try_from(pause.as_micros()).unwrap();
            }
            let most = u64::from(per_second) + u64::from(per_second / 10).max(1);
            let in_second =
                |from: u64| begun.iter().filter(|at| (from..from + 1_000_000).contains(at)).count();
            assert!(begun.iter().all(|from| in_second(*from) as u64 <= most), "{per_second}");
            assert!(begun.len() as u64 >= u64::from(per_second) * 5 - 1, "{per_second}: {}", begun.len());
        }
    }

    #[test]
    fn calls_beyond_a_limit_do_not_begin_and_say_when_they_may() {
        let clock = ManualClock::at(Timestamp::from_seconds(1_000));
        let rate = limits(Some(4), Some(2), &clock);
        assert_eq!((rate.available_calls(calls(0)), rate.available_calls(calls(2))), (1, 0));
        assert_eq!(rate.begin(2), Err(clock.now()), "two are under way");
        assert_eq!(rate.begin(1), Ok(()));
        assert_eq!(rate.begin(0), Err(clock.now().plus(Duration::from_millis(250))));
        assert_eq!(rate.pause(), Some(Duration::from_millis(250)));
        let free = limits(None, None, &clock);
        assert_eq!(
            (free.available_calls(calls(0)), free.pause(), free.is_full(9)),
            (usize::MAX, None, false)
        );
    }

    #[test]
    fn what_another_claim_may_bring_is_not_claimed_again() {
        let clock = ManualClock::at(Timestamp::from_seconds(1_000));
        let limits = limits(Some(100), Some(20), &clock);
        let claimed = |claimed| DownstreamUse { calls: 4, claimed };
        assert_eq!([0, 7, 10, 30].map(|jobs| limits.available_calls(claimed(jobs))), [10, 3, 0, 0]);
        let few = |jobs| DownstreamUse { calls: 14, claimed: jobs };
        assert_eq!([0, 4, 6].map(|jobs| limits.available_calls(few(jobs))), [6, 2, 0]);
    }
}
