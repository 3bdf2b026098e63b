//! Jobs: the rows that plans decide on, and the changes that engines save.

use weir_core::request::retry::FailureCause;
use weir_core::request::state::{RequestLease, RequestProgress, RequestStatus};
use weir_core::{RequestId, Timestamp};

use super::{Failure, Sealed};

/// The job of an unfinished request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobRow {
    pub id: RequestId,
    pub downstream: String,
    pub has_callback: bool,
    pub progress: RequestProgress,
}

/// What is stored of a request that a report or callback names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestRow {
    Job(JobRow),
    /// The request is final and has no job.
    Final(RequestStatus),
}

/// The result of an attempt as callers see it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttemptOutcome {
    pub result: Option<Sealed>,
    pub failure: Option<Failure>,
}

impl AttemptOutcome {
    /// An attempt without a result. `detail` replaces the message of the cause.
    #[must_use]
    pub fn failed(cause: Option<FailureCause>, detail: Option<String>) -> Self {
        let failure = cause.map(|cause| Failure {
            code: cause.code().to_owned(),
            message: detail.unwrap_or_else(|| cause.to_string()),
        });
        Self { result: None, failure }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobChange {
    /// The row to save. If the request is final, its job is deleted.
    pub row: JobRow,
    /// Replaces the outcome of the last attempt in the record, if given.
    pub outcome: Option<AttemptOutcome>,
}

impl JobChange {
    #[must_use]
    pub fn status(&self) -> RequestStatus {
        self.row.progress.status
    }

    /// When the job may be claimed next; `None` if the request is final.
    #[must_use]
    pub fn claimable_at(&self) -> Option<Timestamp> {
        let RequestProgress { status, lease, due, .. } = self.row.progress;
        (!status.is_final()).then(|| lease.map_or(due, |lease| lease.until))
    }

    #[must_use]
    pub fn is_leased(&self) -> bool {
        self.row.progress.lease.is_some()
    }

    /// Whether the job waits for something else than a worker. A parked job has no place among its tenant's jobs until it is due.
    #[must_use]
    pub fn is_parked(&self) -> bool {
        !self.is_leased() && !self.status().is_final()
    }

    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.status() == RequestStatus::FailedRetryExhausted
    }

    /// Whether to enqueue a webhook in the same commit.
    #[must_use]
    pub fn needs_webhook(&self) -> bool {
        self.row.has_callback && self.status().has_outcome()
    }
}

/// Builds the progress of a job from its columns. `claimable_at` is the end of the lease if the job is leased, else its due time.
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

/// Returns the progress of a dead letter after a replay, given the last token of its request.
#[must_use]
pub fn plan_replay(last_token: u64, now: Timestamp) -> RequestProgress {
    let mut progress = stored_progress(RequestStatus::FailedRetryExhausted, 0, now, false, last_token);
    progress.replay(now).expect("a dead letter can be replayed");
    progress
}
