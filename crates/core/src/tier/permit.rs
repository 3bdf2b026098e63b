//! Concurrency: how much of something may be in use at the same time.
//!
//! What is in use is a permit, which ends when it is given back, or by itself when its time is over: a holder that dies keeps
//! nothing for longer.

use std::time::Duration;

use super::limit::{LimitError, checked_period_us};
use super::rule::{Decision, LimitDenial, LimitState};
use crate::Timestamp;

/// The most that may be in use at the same time, and for how long a permit counts unless it is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Concurrency {
    limit: u32,
    ttl_us: u64,
}

/// A number outside the range of a concurrency limit. The messages complete the sentence "limit …" or "ttl …".
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConcurrencyError {
    #[error("must be an integer from 1 to {}", Concurrency::MAX)]
    Limit,
    #[error(transparent)]
    Ttl(#[from] LimitError),
}

/// A permit that was not given back: its share counts until it expires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenPermit {
    pub expires_at: Timestamp,
    pub cost: u32,
}

/// A stored permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permit {
    pub cost: u32,
    pub expires_at: Timestamp,
    pub is_released: bool,
}

/// The outcome of giving a permit back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum PermitRelease {
    /// It counts no more from now on.
    Released,
    /// It was given back before.
    AlreadyReleased,
    /// It had ended by itself.
    Expired,
}

impl Permit {
    /// Gives the permit back. Once it has been given back in time, the answer stays the same.
    pub fn release(&mut self, now: Timestamp) -> PermitRelease {
        if self.is_released {
            PermitRelease::AlreadyReleased
        } else if now >= self.expires_at {
            PermitRelease::Expired
        } else {
            self.is_released = true;
            PermitRelease::Released
        }
    }
}

impl Concurrency {
    /// The largest limit. Every decision reads all open permits of a key, and there are no more than this.
    pub const MAX: u32 = 10_000;

    pub fn new(limit: u32, ttl: Duration) -> Result<Self, ConcurrencyError> {
        if !(1..=Self::MAX).contains(&limit) {
            return Err(ConcurrencyError::Limit);
        }
        Ok(Self { limit, ttl_us: checked_period_us(ttl)? })
    }

    #[must_use]
    pub const fn limit(&self) -> u32 {
        self.limit
    }

    #[must_use]
    pub const fn ttl(&self) -> Duration {
        Duration::from_micros(self.ttl_us)
    }

    /// Decides whether `cost` more may be in use, beside the open permits of the key. Nothing is always allowed. A denial says
    /// when enough of them will have ended by themselves.
    pub fn decide(&self, open: &[OpenPermit], cost: u32, now: Timestamp) -> Decision {
        let in_use = in_use(open, now);
        let total = in_use.saturating_add(u64::from(cost));
        if cost == 0 || total <= u64::from(self.limit) {
            return Decision::Allowed;
        }
        let Some(room) = self.limit.checked_sub(cost) else {
            return Decision::Denied(LimitDenial::single(None));
        };
        let mut excess = in_use.saturating_sub(u64::from(room));
        let mut open: Vec<_> = open.iter().filter(|permit| permit.expires_at > now).collect();
        open.sort_unstable_by_key(|permit| permit.expires_at);
        let last = open.iter().find(|permit| {
            excess = excess.saturating_sub(u64::from(permit.cost));
            excess == 0
        });
        Decision::Denied(LimitDenial::single(last.map(|permit| permit.expires_at.since(now))))
    }

    /// Returns the state of a key for responses.
    #[must_use]
    pub fn limit_state(&self, open: &[OpenPermit], now: Timestamp) -> LimitState {
        let in_use = u32::try_from(in_use(open, now)).unwrap_or(u32::MAX);
        let remaining = self.limit.saturating_sub(in_use);
        let next_after = match self.decide(open, remaining.saturating_add(1), now) {
            Decision::Denied(LimitDenial { retry_after: Some(wait), .. }) => wait,
            _ => Duration::ZERO,
        };
        let last = open.iter().map(|permit| permit.expires_at).max();
        let reset_after = last.map_or(Duration::ZERO, |last| last.since(now));
        LimitState { limit: self.limit, remaining, next_after, reset_after }
    }
}

/// What counts at `now`.
fn in_use(open: &[OpenPermit], now: Timestamp) -> u64 {
    open.iter().filter(|permit| permit.expires_at > now).map(|permit| u64::from(permit.cost)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(30);

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_seconds(seconds)
    }

    fn open(permits: &[(i64, u32)]) -> Vec<OpenPermit> {
        permits.iter().map(|&(seconds, cost)| OpenPermit { expires_at: at(seconds), cost }).collect()
    }

    #[test]
    fn there_is_room_for_the_limit_and_no_more() {
        let three = Concurrency::new(3, TTL).unwrap();
        assert!(three.decide(&[], 3, at(0)).is_allowed());
        assert_eq!(three.decide(&[], 4, at(0)), Decision::Denied(LimitDenial::single(None)));
        let taken = open(&[(20, 1), (10, 2)]);
        assert!(three.decide(&taken, 0, at(0)).is_allowed());
        let wait = |seconds| Decision::Denied(LimitDenial::single(Some(Duration::from_secs(seconds))));
        assert_eq!(three.decide(&taken, 1, at(0)), wait(10));
        assert_eq!(three.decide(&taken, 2, at(0)), wait(10));
        assert_eq!(three.decide(&taken, 3, at(5)), wait(15));
        assert!(three.decide(&taken, 2, at(10)).is_allowed(), "a permit ends exactly at its time");
        let state = three.limit_state(&taken, at(5));
        assert_eq!((state.remaining, state.next_after.as_secs(), state.reset_after.as_secs()), (0, 5, 15));
        let state = three.limit_state(&taken, at(20));
        assert_eq!((state.remaining, state.next_after.as_secs(), state.reset_after.as_secs()), (3, 0, 0));
    }

    #[test]
    fn a_lowered_limit_denies_until_enough_permits_have_ended() {
        let one = Concurrency::new(1, TTL).unwrap();
        let taken = open(&[(10, 1), (20, 1), (30, 1)]);
        assert_eq!(one.limit_state(&taken, at(0)).remaining, 0);
        let wait = Some(Duration::from_secs(30));
        assert_eq!(one.decide(&taken, 1, at(0)), Decision::Denied(LimitDenial::single(wait)));
    }

    #[test]
    fn a_permit_is_given_back_once_and_not_after_its_time() {
        let mut permit = Permit { cost: 1, expires_at: at(30), is_released: false };
        let mut late = permit;
        assert_eq!(permit.release(at(29)), PermitRelease::Released);
        assert_eq!(permit.release(at(29)), PermitRelease::AlreadyReleased);
        assert_eq!(permit.release(at(31)), PermitRelease::AlreadyReleased, "the same answer");
        assert_eq!(late.release(at(30)), PermitRelease::Expired);
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        assert_eq!(Concurrency::new(0, TTL), Err(ConcurrencyError::Limit));
        assert_eq!(Concurrency::new(Concurrency::MAX + 1, TTL), Err(ConcurrencyError::Limit));
        assert_eq!(Concurrency::new(1, Duration::ZERO), Err(LimitError::Period.into()));
    }
}
