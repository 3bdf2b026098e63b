//! The life of one request: which states follow which, who may work on it, and whose report counts.
//!
//! A worker claims a request and gets a lease with a token. When it vanishes, the lease runs out and another worker may
//! claim; from then on the first one's token is an old one, and whatever it reports changes nothing. Attempts are counted
//! when they begin, so that a request which kills its workers comes to an end too.

use std::time::Duration;

use crate::Timestamp;

use super::retry::{FailureCause, RetryDecision, RetryPolicy};

/// Where a request stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RequestStatus {
    /// It is on disk and its job is queued.
    Accepted,
    /// It is on disk; the broker does not have its job yet.
    PendingEnqueue,
    /// A worker has begun: it is called, waits for its next attempt, or waits for the downstream's callback.
    InProgress,
    /// It is done.
    Completed,
    /// The downstream does not want it.
    FailedPermanent,
    /// All attempts were in vain: a dead letter.
    FailedRetryExhausted,
}

/// What can happen to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestEvent {
    /// The broker does not have the job: it was not asked yet, or could not be reached.
    EnqueuePending,
    /// The broker has the job after all.
    Enqueued,
    /// A worker takes it up.
    Claimed,
    /// It goes on later: another attempt, a callback, or a call that was not made.
    Deferred,
    /// The downstream has done it.
    Completed,
    /// The downstream does not want it.
    Rejected,
    /// The last attempt has failed.
    Exhausted,
    /// An operator lets a dead letter start again.
    Replayed,
}

impl RequestStatus {
    /// Every state.
    pub const ALL: [Self; 6] = [
        Self::Accepted,
        Self::PendingEnqueue,
        Self::InProgress,
        Self::Completed,
        Self::FailedPermanent,
        Self::FailedRetryExhausted,
    ];

    /// The state's name on the wire and in tables.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Accepted => "ACCEPTED",
            Self::PendingEnqueue => "PENDING_ENQUEUE",
            Self::InProgress => "IN_PROGRESS",
            Self::Completed => "COMPLETED",
            Self::FailedPermanent => "FAILED_PERMANENT",
            Self::FailedRetryExhausted => "FAILED_RETRY_EXHAUSTED",
        }
    }

    /// Reads a state's name. None for any other text.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.as_str() == name)
    }

    /// Whether nothing but an operator's replay of a dead letter changes the request any more.
    #[must_use]
    pub const fn is_final(self) -> bool {
        matches!(self, Self::Completed | Self::FailedPermanent | Self::FailedRetryExhausted)
    }

    /// The state that follows an event. None when the event cannot happen in this state: these are all the transitions
    /// there are.
    #[must_use]
    pub const fn after(self, event: RequestEvent) -> Option<Self> {
        match (self, event) {
            (Self::Accepted, RequestEvent::EnqueuePending) => Some(Self::PendingEnqueue),
            (Self::PendingEnqueue, RequestEvent::Enqueued)
            | (Self::FailedRetryExhausted, RequestEvent::Replayed) => Some(Self::Accepted),
            // A broker that did not confirm a job may have it all the same, so a pending one may be claimed.
            (Self::Accepted | Self::PendingEnqueue | Self::InProgress, RequestEvent::Claimed)
            | (Self::InProgress, RequestEvent::Deferred) => Some(Self::InProgress),
            (Self::InProgress, RequestEvent::Completed) => Some(Self::Completed),
            (Self::InProgress, RequestEvent::Rejected) => Some(Self::FailedPermanent),
            (Self::InProgress, RequestEvent::Exhausted) => Some(Self::FailedRetryExhausted),
            _ => None,
        }
    }
}

/// A worker's right to work on a request alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestLease {
    /// Tells its holder from all earlier ones: tokens of a request only grow.
    pub token: u64,
    /// From when on others may claim the request. Until somebody does, the holder's report still counts.
    pub until: Timestamp,
}

/// What changes about a request while it is worked on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestProgress {
    /// Where it stands.
    pub status: RequestStatus,
    /// Calls begun, without those that were put back before they were made.
    pub attempts: u32,
    /// When it may be claimed, unless it is leased: at once, for its next attempt, or because its callback is overdue.
    pub due: Timestamp,
    /// Who works on it.
    pub lease: Option<RequestLease>,
    /// The last token given out. It outlives leases and replays.
    pub last_token: u64,
}

/// What a claim comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimOutcome {
    /// The worker may call the downstream and report with the lease's token.
    Granted(RequestLease),
    /// There is no attempt left: the request is now a dead letter, for this reason.
    Exhausted(FailureCause),
}

/// What a worker has to say about a request that it claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerReport {
    /// The downstream was called, and this is what came of it.
    Called(RetryDecision),
    /// The call was not made, because the breaker is open or the server stops: no attempt is lost.
    NotCalled {
        /// How long to wait before the next attempt. Not a time of day: the worker's clock is not the store's.
        after: Duration,
    },
}

/// What a downstream that answered 202 says in its callback.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Callback {
    /// It has done the work.
    Completed,
    /// It will not do it.
    Failed,
}

/// Why something does not happen to a request. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TransitionError {
    /// It has come to its end.
    #[error("the request is {} already", .0.as_str())]
    Final(RequestStatus),
    /// Its state has no such transition.
    #[error("this cannot happen to a request that is {}", .0.as_str())]
    Impossible(RequestStatus),
    /// Another worker has it.
    #[error("another worker has the request")]
    Leased {
        /// Until then, if it does not report.
        until: Timestamp,
    },
    /// Its time has not come.
    #[error("the request is not due yet")]
    NotDue {
        /// When it comes.
        due: Timestamp,
    },
    /// The token is not the present one: the lease ran out and the request went on without this worker.
    #[error("the lease was lost")]
    LeaseLost,
}

impl RequestProgress {
    /// A request that has just been accepted. Where a broker has to take its job, [`RequestProgress::enqueue_pending`] belongs
    /// into the same commit, so that a crash before the publish strands nothing.
    #[must_use]
    pub const fn accepted(now: Timestamp) -> Self {
        Self { status: RequestStatus::Accepted, attempts: 0, due: now, lease: None, last_token: 0 }
    }

    /// The broker does not have the job: the reconciler will see to it.
    /// Fails when the request is not `ACCEPTED`; a worker may have it already.
    pub fn enqueue_pending(&mut self) -> Result<(), TransitionError> {
        self.apply(RequestEvent::EnqueuePending)
    }

    /// The broker has the job.
    /// Fails when the request is not `PENDING_ENQUEUE`; a worker may have it already.
    pub fn enqueued(&mut self) -> Result<(), TransitionError> {
        self.apply(RequestEvent::Enqueued)
    }

    /// Gives the request to a worker, if it is due and nobody has it. One that has no attempt left, because its worker
    /// vanished or its callback never came, is given up.
    /// Fails when the request is final, not due, or leased.
    pub fn claim(&mut self, policy: &RetryPolicy, now: Timestamp) -> Result<ClaimOutcome, TransitionError> {
        self.check_claimable(now)?;
        if self.attempts >= policy.max_attempts.get() {
            // A retry in vain would have ended it at once, so it can only have waited for one of these.
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

    /// Takes a worker's report and says where the request stands after it. It counts as long as nobody else has claimed
    /// the request, also when the lease has run out meanwhile: the call was made, and to make it again would be worse.
    /// Fails when the request is final, or the token is not that of the present lease.
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

    /// Takes the downstream's callback and says where the request stands after it. It may come before the worker's own
    /// report of the 202, or between attempts when that answer was lost; whoever holds a lease has lost it then.
    /// Fails when the request is final (a repeated callback is), or nobody has begun to call.
    pub fn call_back(&mut self, callback: Callback) -> Result<RequestStatus, TransitionError> {
        self.apply(match callback {
            Callback::Completed => RequestEvent::Completed,
            Callback::Failed => RequestEvent::Rejected,
        })?;
        Ok(self.status)
    }

    /// Lets a dead letter start again, with all its attempts.
    /// Fails when the request is no dead letter.
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

    /// The one place where the state changes. Every event ends the lease there was; a claim then gives a new one.
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
