//! What becomes of requests that workers report on.

use std::collections::HashMap;

use weir_core::request::retry::RetryPolicy;
use weir_core::request::state::{RequestStatus, TransitionError, WorkerReport};
use weir_core::{RequestId, Timestamp};

use super::{AttemptOutcome, JobChange, JobReport, RequestRow};

/// What a batch of reports comes to.
#[derive(Debug, Default)]
pub struct ReportPlan {
    /// In the order of the reports: where the request stands now, or why the report changes nothing.
    pub outcomes: Vec<Result<RequestStatus, TransitionError>>,
    /// What is to be saved. A request is in it once: its first report that counts ends the lease.
    pub changed: Vec<JobChange>,
}

/// Takes reports in order, given the rows of the requests they are about. One that is not there was never accepted, or was
/// purged.
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
                WorkerReport::Called(judgement) => {
                    Some(AttemptOutcome { result, ..AttemptOutcome::failed(judgement.cause(), detail) })
                }
                WorkerReport::NotCalled { .. } => None,
            };
            plan.changed.push(JobChange { row: job.clone(), outcome });
        }
        plan.outcomes.push(reported);
    }
    plan
}
