//! Decides what the outcome of a call to the downstream means (done, wait for the callback, retry, or give up) and how
//! long to wait before a retry.
//!
//! A request that the downstream has understood and rejected is not retried. One that it may not have received, or
//! could not or would not execute for now, is retried: the call carries the request's id as its idempotency key, so repeating it is
//! harmless.
//!
//! `state::RequestProgress::report` applies the decision to a request.

use std::fmt;
use std::num::NonZeroU32;
use std::time::Duration;

use super::breaker::DownstreamHealth;

/// The outcome of one call as the HTTP client saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallOutcome {
    /// A complete response. Only its status counts: the body of a 2xx is the result, JSON or not.
    Answered {
        status: u16,
        /// The `Retry-After` header.
        retry_after: Option<Duration>,
    },
    /// No connection or no response in time.
    TimedOut,
    /// No connection: refused, no route, unknown host or TLS failure.
    Unreachable,
    /// A response that is not HTTP or is incomplete.
    Unreadable,
    /// A 2xx whose body is larger than a result may be.
    TooLarge,
}

/// What to do after a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryDecision {
    Complete,
    /// The downstream has accepted the work and will call back.
    AwaitCallback,
    /// Call again if an attempt is left.
    Retry {
        cause: FailureCause,
        /// The shortest wait that the downstream asked for.
        retry_after: Option<Duration>,
    },
    /// Do not call again: it would not help.
    Fail(FailureCause),
}

/// Why a call or a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureCause {
    /// The downstream rejected the request (4xx).
    Rejected(u16),
    /// The downstream asked to be called again later (408, 425, 429).
    Busy(u16),
    /// The downstream redirected the call (3xx). Redirects are not followed: they could lead anywhere.
    Redirected(u16),
    /// The downstream failed (5xx, or a status that does not exist).
    ServerError(u16),
    /// No response in time.
    TimedOut,
    Unreachable,
    /// A response that is not HTTP or is incomplete.
    Unreadable,
    /// The result is larger than allowed.
    TooLarge,
    /// The downstream responded 202 and never called back.
    CallbackMissing,
    WorkerLost,
}

impl FailureCause {
    /// Returns the `failureCode` of a request that failed for this reason.
    #[must_use]
    pub const fn code(self) -> &'static str {
        match self {
            Self::Rejected(_) => "DOWNSTREAM_REJECTED",
            Self::Busy(_) => "DOWNSTREAM_BUSY",
            Self::Redirected(_) => "DOWNSTREAM_REDIRECTED",
            Self::ServerError(_) => "DOWNSTREAM_ERROR",
            Self::TimedOut => "DOWNSTREAM_TIMEOUT",
            Self::Unreachable => "DOWNSTREAM_UNREACHABLE",
            Self::Unreadable => "DOWNSTREAM_UNREADABLE",
            Self::TooLarge => "DOWNSTREAM_RESULT_TOO_LARGE",
            Self::CallbackMissing => "CALLBACK_MISSING",
            Self::WorkerLost => "WORKER_LOST",
        }
    }
}

/// The `failureMessage` of a request that failed for this reason.
impl fmt::Display for FailureCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rejected(status)
            | Self::Busy(status)
            | Self::Redirected(status)
            | Self::ServerError(status) => write!(f, "the downstream answered {status}"),
            Self::TimedOut => f.write_str("the downstream did not answer in time"),
            Self::Unreachable => f.write_str("the downstream could not be reached"),
            Self::Unreadable => f.write_str("the downstream's answer could not be read"),
            Self::TooLarge => f.write_str("the downstream's result is too large to keep"),
            Self::CallbackMissing => f.write_str("the downstream accepted the request and never called back"),
            Self::WorkerLost => f.write_str("the worker was lost during the last attempt"),
        }
    }
}

#[must_use]
pub const fn classify(outcome: CallOutcome) -> RetryDecision {
    match outcome {
        CallOutcome::Answered { status, retry_after } => classify_status(status, retry_after),
        CallOutcome::TimedOut => retry(FailureCause::TimedOut, None),
        CallOutcome::Unreachable => retry(FailureCause::Unreachable, None),
        CallOutcome::Unreadable => retry(FailureCause::Unreadable, None),
        CallOutcome::TooLarge => RetryDecision::Fail(FailureCause::TooLarge),
    }
}

const fn classify_status(status: u16, retry_after: Option<Duration>) -> RetryDecision {
    match status {
        202 => RetryDecision::AwaitCallback,
        200..=299 => RetryDecision::Complete,
        300..=399 => RetryDecision::Fail(FailureCause::Redirected(status)),
        408 | 425 | 429 => retry(FailureCause::Busy(status), retry_after),
        400..=499 => RetryDecision::Fail(FailureCause::Rejected(status)),
        _ => retry(FailureCause::ServerError(status), retry_after),
    }
}

const fn retry(cause: FailureCause, retry_after: Option<Duration>) -> RetryDecision {
    RetryDecision::Retry { cause, retry_after }
}

impl RetryDecision {
    /// Returns what the call reveals about the downstream: one that responds and rejects, or asks for time, is up; one
    /// that fails is down.
    #[must_use]
    pub const fn health(self) -> DownstreamHealth {
        match self {
            Self::Complete
            | Self::AwaitCallback
            | Self::Fail(_)
            | Self::Retry { cause: FailureCause::Busy(_), .. } => DownstreamHealth::Up,
            Self::Retry { .. } => DownstreamHealth::Down,
        }
    }

    #[must_use]
    pub const fn cause(self) -> Option<FailureCause> {
        match self {
            Self::Complete | Self::AwaitCallback => None,
            Self::Retry { cause, .. } | Self::Fail(cause) => Some(cause),
        }
    }
}

/// How often and when a request is retried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    /// The number of calls before the request becomes a dead letter.
    pub max_attempts: NonZeroU32,
    pub backoff: RetryBackoff,
    /// How long a worker's lease lasts: longer than any call takes. When a worker crashes, another one continues after
    /// this time.
    pub lease: Duration,
    /// How long to wait for the callback after a 202 before calling the downstream again.
    pub callback_within: Duration,
}

impl Default for RetryPolicy {
    /// 5 attempts, waits from 200 ms to 30 s, leases of 30 s, one day for the callback.
    fn default() -> Self {
        Self {
            max_attempts: const { NonZeroU32::new(5).expect("5 is not 0") },
            backoff: RetryBackoff::DEFAULT,
            lease: Duration::from_secs(30),
            callback_within: Duration::from_secs(86_400),
        }
    }
}

/// The wait between two attempts: a random time between `first` and a ceiling that doubles with each attempt, up to `cap`, so
/// that requests that failed together are not retried together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryBackoff {
    first: Duration,
    cap: Duration,
}

/// The first wait is zero or longer than the longest wait, or the longest wait is more than a day.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be greater than zero and at most the longest wait, which is at most one day")]
pub struct RetryBackoffError;

impl RetryBackoff {
    pub const DEFAULT: Self = Self { first: Duration::from_millis(200), cap: Duration::from_secs(30) };
    pub const MAX: Duration = Duration::from_secs(86_400);

    pub fn new(first: Duration, cap: Duration) -> Result<Self, RetryBackoffError> {
        let is_range = !first.is_zero() && first <= cap && cap <= Self::MAX;
        if is_range { Ok(Self { first, cap }) } else { Err(RetryBackoffError) }
    }

    /// Returns the longest wait after this many attempts: twice the first wait after one attempt, doubled for each
    /// further one, and never more than the cap.
    #[must_use]
    pub fn ceiling(&self, attempts: u32) -> Duration {
        let factor = 1_u32.checked_shl(attempts).unwrap_or(u32::MAX);
        self.first.saturating_mul(factor).min(self.cap)
    }

    /// Returns a random wait between the first wait and the ceiling. It is at least as long as the downstream asks
    /// for, but never longer than the cap.
    #[must_use]
    pub fn wait(&self, attempts: u32, retry_after: Option<Duration>, random: u64) -> Duration {
        let span = self.ceiling(attempts).saturating_sub(self.first);
        let wait = self.first.saturating_add(scale(span, random));
        wait.max(retry_after.unwrap_or_default().min(self.cap))
    }
}

/// Scales `span` by `random`: 0 yields zero, the largest number the whole span.
fn scale(span: Duration, random: u64) -> Duration {
    let nanos = span.as_nanos().saturating_add(1).saturating_mul(u128::from(random)) >> u64::BITS;
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}
