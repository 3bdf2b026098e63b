//! The plan for a batch of workers' reports.

use std::collections::HashMap;

use weir_core::request::retry::RetryPolicy;
use weir_core::request::state::{RequestStatus, TransitionError, WorkerReport};
use weir_core::{RequestId, Timestamp};

use super::{AttemptOutcome, JobChange, JobReport, RequestRow};

#[derive(Debug, Default)]
pub struct ReportPlan {
    /// In the order of the reports: the request's new status, or why the report changes nothing.
    pub outcomes: Vec<Result<RequestStatus, TransitionError>>,
    /// The changes to save, at most one per request: the first valid report ends the lease.
    pub changed: Vec<JobChange>,
}

/// Decides reports in order on the rows of their requests. A request without a row was purged or never accepted.
#[must_use]
pub fn plan_report(
    batch: Vec<JobReport>,
    rows: &mut HashMap<RequestId, RequestRow>,
    policy: &RetryPolicy,
    now: Timestamp,
) -> ReportPlan {
    let mut plan = ReportPlan::default();
    for JobReport { id, token, report, result, detail, random } in batch {
        let job = match rows.get_mut(&id) {
            Some(RequestRow::Job(job)) => job,
            Some(RequestRow::Final(status)) => {
                plan.outcomes.push(Err(TransitionError::Final(*status)));
                continue;
            }
            None => {
                plan.outcomes.push(Err(TransitionError::LeaseLost));
                continue;
            }
        };
        let reported = job.progress.report(token, report, policy, now, random);
        if reported.is_ok() {
            let outcome = match report {
                WorkerReport::Called(decision) => {
                    Some(AttemptOutcome { result, ..AttemptOutcome::failed(decision.cause(), detail) })
                }
                WorkerReport::NotCalled { .. } => None,
            };
            plan.changed.push(JobChange { row: job.clone(), outcome });
        }
        plan.outcomes.push(reported);
    }
    plan
}
