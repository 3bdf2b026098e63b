//! Which of the jobs that were found a claim gets, and what becomes of those that have no attempt left.

use weir_core::request::retry::RetryPolicy;
use weir_core::request::state::ClaimOutcome;
use weir_core::{RequestType, TenantId, Timestamp};

use super::{AttemptOutcome, ClaimedJobs, Job, JobChange, JobRow, Sealed};

/// A job that may be claimable, with what its worker needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimRow {
    /// The job.
    pub job: JobRow,
    /// Whose it is.
    pub tenant: TenantId,
    /// What kind of work it is.
    pub request_type: RequestType,
    /// What it asks for.
    pub payload: Sealed,
    /// When it was accepted.
    pub accepted_at: Timestamp,
}

/// What a claim comes to.
#[derive(Debug, Default)]
pub struct ClaimPlan {
    /// What the worker gets, in the order of the rows.
    pub claimed: ClaimedJobs,
    /// What is to be saved. Rows that are leased or not due stay as they are.
    pub changed: Vec<JobChange>,
}

/// Claims these jobs, each row once.
#[must_use]
pub fn plan_claim(
    rows: impl IntoIterator<Item = ClaimRow>,
    policy: &RetryPolicy,
    now: Timestamp,
) -> ClaimPlan {
    let mut plan = ClaimPlan::default();
    for ClaimRow { mut job, tenant, request_type, payload, accepted_at } in rows {
        let outcome = match job.progress.claim(policy, now) {
            Ok(ClaimOutcome::Granted(lease)) => {
                plan.claimed.jobs.push(Job {
                    id: job.id,
                    tenant,
                    request_type,
                    downstream: job.downstream.clone(),
                    payload,
                    token: lease.token,
                    attempt: job.progress.attempts,
                    accepted_at,
                });
                None
            }
            Ok(ClaimOutcome::Exhausted(cause)) => {
                plan.claimed.exhausted.push(job.id);
                Some(AttemptOutcome::failed(Some(cause), None))
            }
            // Another claim has it, or it is not due.
            Err(_refused) => continue,
        };
        plan.changed.push(JobChange { row: job, outcome });
    }
    plan
}
