//! The plan for a claim: which jobs it gets, and which become dead letters because no attempt is left.

use weir_core::request::retry::RetryPolicy;
use weir_core::request::state::ClaimOutcome;
use weir_core::{RequestType, TenantId, Timestamp, TraceContext};

use super::{AttemptOutcome, ClaimedJobs, Job, JobChange, JobRow, Sealed};

/// A job that may be claimable, with the data its worker needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimRow {
    pub job: JobRow,
    pub tenant: TenantId,
    pub request_type: RequestType,
    pub payload: Sealed,
    pub trace: Option<TraceContext>,
    pub accepted_at: Timestamp,
}

#[derive(Debug, Default)]
pub struct ClaimPlan {
    /// The claimed jobs, in the order of the rows.
    pub claimed: ClaimedJobs,
    /// The changes to save. Rows that are leased or not due are unchanged.
    pub changed: Vec<JobChange>,
}

#[must_use]
pub fn plan_claim(
    rows: impl IntoIterator<Item = ClaimRow>,
    policy: &RetryPolicy,
    now: Timestamp,
) -> ClaimPlan {
    let mut plan = ClaimPlan::default();
    for ClaimRow { mut job, tenant, request_type, payload, trace, accepted_at } in rows {
        let was_leased = job.progress.lease.is_some();
        let outcome = match job.progress.claim(policy, now) {
            Ok(ClaimOutcome::Granted(lease)) => {
                plan.claimed.taken_over += usize::from(was_leased);
                plan.claimed.jobs.push(Job {
                    id: job.id,
                    tenant,
                    request_type,
                    downstream: job.downstream.clone(),
                    payload,
                    token: lease.token,
                    attempt: job.progress.attempts,
                    trace,
                    accepted_at,
                });
                None
            }
            Ok(ClaimOutcome::Exhausted(cause)) => {
                plan.claimed.exhausted.push(job.id);
                Some(AttemptOutcome::failed(Some(cause), None))
            }
            // It is leased or not due.
            Err(_refused) => continue,
        };
        plan.changed.push(JobChange { row: job, outcome });
    }
    plan
}
