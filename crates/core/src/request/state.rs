//! The life cycle of a request: its states, who may work on it, and whose report counts.
//!
//! A worker claims a request and gets a lease with a fencing token. If the worker vanishes, the lease expires and
//! another worker may claim; reports with the old token are then rejected. Attempts are counted when they start, so
//! that a request which crashes its workers also ends.

use std::time::Duration;

use crate::Timestamp;

use super::retry::{FailureCause, RetryDecision, RetryPolicy};

/// The state of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RequestStatus {
    /// Stored, and its job is queued.
    Accepted,
    /// Stored; the broker does not have its job yet.
    PendingEnqueue,
    /// A worker has started: the request is being called, waits for its next attempt, or waits for the downstream's
    /// callback.
    InProgress,
    Completed,
    /// The downstream rejected it.
    FailedPermanent,
    /// All attempts failed: a dead letter.
    FailedRetryExhausted,
    /// Its tenant does not want it any more.
    Cancelled,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestEvent {
    /// The broker does not have the job: it was not published yet, or the broker was unreachable.
    EnqueuePending,
    /// The broker has confirmed the job.
    Enqueued,
    Claimed,
    /// The request continues later: another attempt, a callback, or a call that was not made.
    Deferred,
    Completed,
    /// The downstream rejected it.
    Rejected,
    Exhausted,
    /// Its tenant cancels it.
    Cancelled,
    /// An operator restarts a dead letter.
    Replayed,
}

impl RequestStatus {
    pub const ALL: [Self; 7] = [
        Self::Accepted,
        Self::PendingEnqueue,
        Self::InProgress,
        Self::Completed,
        Self::FailedPermanent,
        Self::FailedRetryExhausted,
        Self::Cancelled,
    ];

    /// Returns the name on the wire and in tables.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Accepted => "ACCEPTED",
            Self::PendingEnqueue => "PENDING_ENQUEUE",
            Self::InProgress => "IN_PROGRESS",
            Self::Completed => "COMPLETED",
            Self::FailedPermanent => "FAILED_PERMANENT",
            Self::FailedRetryExhausted => "FAILED_RETRY_EXHAUSTED",
            Self::Cancelled => "CANCELLED",
        }
    }

    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.as_str() == name)
    }

    /// Whether the request has ended. Only the replay of a dead letter changes it then.
    #[must_use]
    pub const fn is_final(self) -> bool {
        matches!(self, Self::Completed | Self::FailedPermanent | Self::FailedRetryExhausted | Self::Cancelled)
    }

    /// Whether the request has ended with an outcome of its own, of which its tenant is told. One that the tenant has
    /// cancelled has none.
    #[must_use]
    pub const fn has_outcome(self) -> bool {
        self.is_final() && !matches!(self, Self::Cancelled)
    }

    /// Returns the next state, or `None` if the event cannot happen in this state. These are all transitions.
    #[must_use]
    pub const fn after(self, event: RequestEvent) -> Option<Self> {
        match (self, event) {
            (Self::Accepted, RequestEvent::EnqueuePending) => Some(Self::PendingEnqueue),
            (Self::PendingEnqueue, RequestEvent::Enqueued)
            | (Self::FailedRetryExhausted, RequestEvent::Replayed) => Some(Self::Accepted),
            // A broker that did not confirm a job may still have it, so a pending request can be claimed.
            (Self::Accepted | Self::PendingEnqueue | Self::InProgress, RequestEvent::Claimed)
            | (Self::InProgress, RequestEvent::Deferred) => Some(Self::InProgress),
            (Self::InProgress, RequestEvent::Completed) => Some(Self::Completed),
            (Self::InProgress, RequestEvent::Rejected) => Some(Self::FailedPermanent),
            (Self::InProgress, RequestEvent::Exhausted) => Some(Self::FailedRetryExhausted),
            (Self::Accepted | Self::PendingEnqueue | Self::InProgress, RequestEvent::Cancelled) => {
                Some(Self::Cancelled)
            }
            _ => None,
        }
    }
}

/// A worker's exclusive right to work on a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestLease {
    /// The fencing token, which identifies the holder. The tokens of a request only grow.
    pub token: u64,
    /// When others may claim the request. Until one does, the holder's report still counts.
    pub until: Timestamp,
}

/// The part of a request that changes while it is worked on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestProgress {
    pub status: RequestStatus,
    /// Calls started, without those that were given back before they were made.
    pub attempts: u32,
    /// When the request may be claimed unless it is leased: at once, for its next attempt, or because its callback is
    /// overdue.
    pub due: Timestamp,
    pub lease: Option<RequestLease>,
    /// The last token issued. It survives leases and replays.
    pub last_token: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimOutcome {
    /// The worker may call the downstream and report with the lease's token.
    Granted(RequestLease),
    /// No attempt is left: the request is now a dead letter, for this reason.
    Exhausted(FailureCause),
}

/// A worker's report about a request that it claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerReport {
    /// The downstream was called, with this result.
    Called(RetryDecision),
    /// The call was not made because the breaker is open or the server stops. No attempt is lost.
    NotCalled {
        /// How long to wait before the next attempt. Not a timestamp: the clocks of worker and store differ.
        after: Duration,
    },
}

/// The callback of a downstream that responded 202.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Callback {
    Completed,
    Failed,
}

/// Why a transition was refused. The request is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TransitionError {
    /// The request has ended.
    #[error("the request is {} already", .0.as_str())]
    Final(RequestStatus),
    /// The state has no such transition.
    #[error("the request is {}, which does not allow this", .0.as_str())]
    Impossible(RequestStatus),
    #[error("another worker has the request")]
    Leased {
        /// When the lease expires.
        until: Timestamp,
    },
    #[error("the request is not due yet")]
    NotDue { due: Timestamp },
    /// The token is not the current one: the lease expired and the request continued without this worker.
    #[error("the lease was lost")]
    LeaseLost,
}

impl RequestProgress {
    /// Creates an accepted request. If a broker takes the jobs, call [`RequestProgress::enqueue_pending`] in the same
    /// commit, so that a crash before the publish loses no job.
    #[must_use]
    pub const fn accepted(now: Timestamp) -> Self {
        Self { status: RequestStatus::Accepted, attempts: 0, due: now, lease: None, last_token: 0 }
    }

    /// Records that the broker does not have the job; the reconciler publishes it later. Fails unless the request is
    /// `ACCEPTED`: a worker may have claimed it already.
    pub fn enqueue_pending(&mut self) -> Result<(), TransitionError> {
        self.apply(RequestEvent::EnqueuePending)
    }

    /// Records that the broker has the job. Fails unless the request is `PENDING_ENQUEUE`: a worker may have claimed
    /// it already.
    pub fn enqueued(&mut self) -> Result<(), TransitionError> {
        self.apply(RequestEvent::Enqueued)
    }

    /// Leases the request to a worker if it is due and not leased. If no attempt is left because the worker vanished
    /// or the callback never came, the request becomes a dead letter.
    pub fn claim(&mut self, policy: &RetryPolicy, now: Timestamp) -> Result<ClaimOutcome, TransitionError> {
        self.check_claimable(now)?;
        if self.attempts >= policy.max_attempts.get() {
            // A request whose last attempt failed has ended already, so here the worker was lost or the callback never came.
            let cause =
                if self.lease.is_some() { FailureCause::WorkerLost } else { FailureCause::CallbackMissing };
            self.apply(RequestEvent::Exhausted)?;
            return Ok(ClaimOutcome::Exhausted(cause));
        }
        self.apply(RequestEvent::Claimed)?;
        self.attempts = self.attempts.saturating_add(1);
        self.last_token = self.last_token.saturating_add(1);
        let lease = RequestLease { token: self.last_token, until: now.plus(policy.lease) };
        self.lease = Some(lease);
        Ok(ClaimOutcome::Granted(lease))
    }

    /// Applies a worker's report and returns the new state. The report counts as long as nobody else has claimed the
    /// request, even after the lease has expired: the call was made, and repeating it would be worse. Fails if the
    /// request has ended or the token is not that of the current lease.
    pub fn report(
        &mut self,
        token: u64,
        report: WorkerReport,
        policy: &RetryPolicy,
        now: Timestamp,
        random: u64,
    ) -> Result<RequestStatus, TransitionError> {
        self.check_token(token)?;
        match report {
            WorkerReport::Called(RetryDecision::Complete) => self.apply(RequestEvent::Completed)?,
            WorkerReport::Called(RetryDecision::Fail(_)) => self.apply(RequestEvent::Rejected)?,
            WorkerReport::Called(RetryDecision::AwaitCallback) => {
                self.defer(now.plus(policy.callback_within))?
            }
            WorkerReport::Called(RetryDecision::Retry { .. })
                if self.attempts >= policy.max_attempts.get() =>
            {
                self.apply(RequestEvent::Exhausted)?;
            }
            WorkerReport::Called(RetryDecision::Retry { retry_after, .. }) => {
                let wait = policy.backoff.wait(self.attempts, retry_after, random);
                self.defer(now.plus(wait))?;
            }
            WorkerReport::NotCalled { after } => {
                self.attempts = self.attempts.saturating_sub(1);
                self.defer(now.plus(after))?;
            }
        }
        Ok(self.status)
    }

    /// Applies the downstream's callback and returns the new state. It may arrive before the worker reports the 202,
    /// or between attempts if that response was lost. It ends any lease. Fails if the request has ended (so a repeated
    /// callback fails) or was never called.
    pub fn call_back(&mut self, callback: Callback) -> Result<RequestStatus, TransitionError> {
        self.apply(match callback {
            Callback::Completed => RequestEvent::Completed,
            Callback::Failed => RequestEvent::Rejected,
        })?;
        Ok(self.status)
    }

    /// Cancels the request for its tenant. A worker that is calling the downstream loses its lease, so what comes of the
    /// call changes nothing. Fails if the request has ended.
    pub fn cancel(&mut self) -> Result<(), TransitionError> {
        self.apply(RequestEvent::Cancelled)
    }

    /// Restarts a dead letter with all its attempts. Fails for any other request.
    pub fn replay(&mut self, now: Timestamp) -> Result<(), TransitionError> {
        self.apply(RequestEvent::Replayed)?;
        self.attempts = 0;
        self.due = now;
        Ok(())
    }

    fn check_claimable(&self, now: Timestamp) -> Result<(), TransitionError> {
        match self.lease {
            _ if self.status.is_final() => Err(TransitionError::Final(self.status)),
            Some(lease) if now < lease.until => Err(TransitionError::Leased { until: lease.until }),
            None if now < self.due => Err(TransitionError::NotDue { due: self.due }),
            _ => Ok(()),
        }
    }

    fn check_token(&self, token: u64) -> Result<(), TransitionError> {
        match self.lease {
            _ if self.status.is_final() => Err(TransitionError::Final(self.status)),
            Some(lease) if lease.token == token => Ok(()),
            _ => Err(TransitionError::LeaseLost),
        }
    }

    fn defer(&mut self, due: Timestamp) -> Result<(), TransitionError> {
        self.apply(RequestEvent::Deferred)?;
        self.due = due;
        Ok(())
    }

    /// The only place where the state changes. Every event ends the current lease; a claim then issues a new one.
    fn apply(&mut self, event: RequestEvent) -> Result<(), TransitionError> {
        let Some(status) = self.status.after(event) else {
            return Err(if self.status.is_final() {
                TransitionError::Final(self.status)
            } else {
                TransitionError::Impossible(self.status)
            });
        };
        self.status = status;
        self.lease = None;
        Ok(())
    }
}
