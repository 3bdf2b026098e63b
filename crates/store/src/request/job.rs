//! A request that is in flight: the row the plans decide on, and what they make of it.

use weir_core::request::retry::FailureCause;
use weir_core::request::state::{RequestLease, RequestProgress, RequestStatus};
use weir_core::{RequestId, Timestamp};

use super::{Failure, Sealed};

/// A request that is to be done, as its job tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobRow {
    /// The request.
    pub id: RequestId,
    /// Which downstream does it.
    pub downstream: String,
    /// Whether somebody is told when it is final.
    pub has_callback: bool,
    /// How far it has come.
    pub progress: RequestProgress,
}

/// A request that somebody names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestRow {
    /// It is to be done.
    Job(JobRow),
    /// It has come to its end, and has no job.
    Final(RequestStatus),
}

/// What came of an attempt, for callers to read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttemptOutcome {
    /// What the downstream answered.
    pub result: Option<Sealed>,
    /// What went wrong.
    pub failure: Option<Failure>,
}

impl AttemptOutcome {
    /// Of an attempt without a result: what went wrong, if anything did, in more words than the cause has if there are.
    #[must_use]
    pub fn failed(cause: Option<FailureCause>, detail: Option<String>) -> Self {
        let failure = cause.map(|cause| Failure {
            code: cause.code().to_owned(),
            message: detail.unwrap_or_else(|| cause.to_string()),
        });
        Self { result: None, failure }
    }
}

/// A row that a plan has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobChange {
    /// The row as it is to be saved. Once its request is final there is no job.
    pub row: JobRow,
    /// Replaces what the record says of the last attempt; without one, that stays.
    pub outcome: Option<AttemptOutcome>,
}

impl JobChange {
    /// Where the request stands.
    #[must_use]
    pub fn status(&self) -> RequestStatus {
        self.row.progress.status
    }

    /// When the job may be claimed next; `None` when there is no job any more.
    #[must_use]
    pub fn claimable_at(&self) -> Option<Timestamp> {
        let RequestProgress { status, lease, due, .. } = self.row.progress;
        (!status.is_final()).then(|| lease.map_or(due, |lease| lease.until))
    }

    /// Whether a worker has the job.
    #[must_use]
    pub fn is_leased(&self) -> bool {
        self.row.progress.lease.is_some()
    }

    /// Whether the request is a dead letter now.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.status() == RequestStatus::FailedRetryExhausted
    }

    /// Whether a webhook is to be sent: the message belongs into the same commit.
    #[must_use]
    pub fn needs_webhook(&self) -> bool {
        self.row.has_callback && self.status().is_final()
    }
}

/// The progress of a job as its columns tell it. One time says when it may be claimed, whether it is leased or not.
#[must_use]
pub fn stored_progress(
    status: RequestStatus,
    attempts: u32,
    claimable_at: Timestamp,
    is_leased: bool,
    last_token: u64,
) -> RequestProgress {
    let lease = is_leased.then_some(RequestLease { token: last_token, until: claimable_at });
    RequestProgress { status, attempts, due: claimable_at, lease, last_token }
}

/// What becomes of a dead letter that an operator replays, given the last token of its request.
#[must_use]
pub fn plan_replay(last_token: u64, now: Timestamp) -> RequestProgress {
    let mut progress = stored_progress(RequestStatus::FailedRetryExhausted, 0, now, false, last_token);
    progress.replay(now).expect("a dead letter can be replayed");
    progress
}
