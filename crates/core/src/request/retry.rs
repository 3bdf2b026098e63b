//! What the outcome of a call to the downstream means: done, wait for its callback, call again, or give up; and how long
//! to wait before calling again.
//!
//! What the downstream has understood and refused is not asked again. What it may never have seen, or could not do just
//! now, is: the call carries the request's id as its idempotency key, so a repeated one does nothing twice.

use std::fmt;
use std::num::NonZeroU32;
use std::time::Duration;

use super::breaker::DownstreamHealth;

/// What came of one call, as the HTTP client saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallOutcome {
    /// A whole answer. Its status alone decides: the body of a 2xx is the result, whether it is JSON or not.
    Answered {
        /// The HTTP status.
        status: u16,
        /// How long the downstream asks to be left alone (`Retry-After`).
        retry_after: Option<Duration>,
    },
    /// No connection, or no answer, in time.
    TimedOut,
    /// No connection: refused, no route, no such host, no TLS.
    Unreachable,
    /// An answer that is not HTTP, or that broke off.
    Unreadable,
    /// A 2xx with a longer body than a result may have.
    TooLarge,
}

/// What to do about the outcome of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryDecision {
    /// The work is done.
    Complete,
    /// The downstream has taken the work over and will call back.
    AwaitCallback,
    /// Call again, if an attempt is left.
    Retry {
        /// What went wrong.
        cause: FailureCause,
        /// How long the downstream asks to be left alone.
        retry_after: Option<Duration>,
    },
    /// Calling again would not help.
    Fail(FailureCause),
}

/// Why a call or a whole request has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureCause {
    /// The downstream refused the request (4xx).
    Rejected(u16),
    /// It pointed elsewhere (3xx). Redirects are not followed: they could lead anywhere.
    Redirected(u16),
    /// It failed (5xx, or a status that does not exist).
    ServerError(u16),
    /// No answer in time.
    TimedOut,
    /// No connection.
    Unreachable,
    /// An answer that is not HTTP, or that broke off.
    Unreadable,
    /// A longer result than may be kept.
    TooLarge,
    /// It answered 202 and never called back.
    CallbackMissing,
    /// The worker of the last attempt vanished.
    WorkerLost,
}

impl FailureCause {
    /// The `failureCode` of a request that failed for this reason.
    #[must_use]
    pub const fn code(self) -> &'static str {
        match self {
            Self::Rejected(_) => "DOWNSTREAM_REJECTED",
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
            Self::Rejected(status) | Self::Redirected(status) | Self::ServerError(status) => {
                write!(f, "the downstream answered {status}")
            }
            Self::TimedOut => f.write_str("the downstream did not answer in time"),
            Self::Unreachable => f.write_str("the downstream could not be reached"),
            Self::Unreadable => f.write_str("the downstream's answer could not be read"),
            Self::TooLarge => f.write_str("the downstream's result is too large to keep"),
            Self::CallbackMissing => f.write_str("the downstream accepted the request and never called back"),
            Self::WorkerLost => f.write_str("the worker was lost during the last attempt"),
        }
    }
}

/// Decides what an outcome means.
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
        400..=499 => RetryDecision::Fail(FailureCause::Rejected(status)),
        _ => retry(FailureCause::ServerError(status), retry_after),
    }
}

const fn retry(cause: FailureCause, retry_after: Option<Duration>) -> RetryDecision {
    RetryDecision::Retry { cause, retry_after }
}

impl RetryDecision {
    /// What the call says about the downstream: one that answers and refuses is up, one that has to be called again is
    /// not.
    #[must_use]
    pub const fn health(self) -> DownstreamHealth {
        match self {
            Self::Complete | Self::AwaitCallback | Self::Fail(_) => DownstreamHealth::Up,
            Self::Retry { .. } => DownstreamHealth::Down,
        }
    }

    /// What went wrong, if anything did.
    #[must_use]
    pub const fn cause(self) -> Option<FailureCause> {
        match self {
            Self::Complete | Self::AwaitCallback => None,
            Self::Retry { cause, .. } | Self::Fail(cause) => Some(cause),
        }
    }
}

/// How often and when a request is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Calls before the request becomes a dead letter.
    pub max_attempts: NonZeroU32,
    /// The wait between them.
    pub backoff: RetryBackoff,
    /// How long a worker has a request to itself: longer than any call takes. When a worker crashes, its work goes on
    /// after this time.
    pub lease: Duration,
    /// How long to wait for the callback after a 202 before the downstream is called again.
    pub callback_within: Duration,
}

impl Default for RetryPolicy {
    /// 5 attempts, waits from 200 ms to 30 s, leases of 30 s, a day for the callback.
    fn default() -> Self {
        Self {
            max_attempts: const { NonZeroU32::new(5).expect("5 is not 0") },
            backoff: RetryBackoff::DEFAULT,
            lease: Duration::from_secs(30),
            callback_within: Duration::from_secs(86_400),
        }
    }
}

/// The wait between two attempts: it doubles from `first` to `cap` and is spread by chance, so that requests which failed
/// together do not come back together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryBackoff {
    first: Duration,
    cap: Duration,
}

/// The first wait is zero, longer than the longest, or the longest is more than a day.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be more than nothing, at most the longest wait, and that at most a day")]
pub struct RetryBackoffError;

impl RetryBackoff {
    /// From 200 ms to 30 s.
    pub const DEFAULT: Self = Self { first: Duration::from_millis(200), cap: Duration::from_secs(30) };
    /// The longest wait that may be configured.
    pub const MAX: Duration = Duration::from_secs(86_400);

    /// Checks and joins the shortest and the longest wait.
    /// Fails when they do not make a range within a day.
    pub fn new(first: Duration, cap: Duration) -> Result<Self, RetryBackoffError> {
        let is_range = !first.is_zero() && first <= cap && cap <= Self::MAX;
        if is_range { Ok(Self { first, cap }) } else { Err(RetryBackoffError) }
    }

    /// The longest wait after so many attempts: twice the first wait after one attempt, twice as long after each other
    /// one, and never more than the cap.
    #[must_use]
    pub fn ceiling(&self, attempts: u32) -> Duration {
        let factor = 1_u32.checked_shl(attempts).unwrap_or(u32::MAX);
        self.first.saturating_mul(factor).min(self.cap)
    }

    /// How long to wait after so many attempts: anything from the first wait to the ceiling, as `chance` decides, and at
    /// least as long as the downstream asks for, up to the cap.
    #[must_use]
    pub fn wait(&self, attempts: u32, retry_after: Option<Duration>, random: u64) -> Duration {
        let span = self.ceiling(attempts).saturating_sub(self.first);
        let wait = self.first.saturating_add(share(span, random));
        wait.max(retry_after.unwrap_or_default().min(self.cap))
    }
}

/// The part of `span` that `chance` stands for: none of it at 0, all of it at the largest number.
fn share(span: Duration, random: u64) -> Duration {
    let nanos = span.as_nanos().saturating_add(1).saturating_mul(u128::from(random)) >> u64::BITS;
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}
