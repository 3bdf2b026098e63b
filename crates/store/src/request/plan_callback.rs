//! The plan for a downstream's callback.

use weir_core::request::state::TransitionError;

use super::{AttemptOutcome, CallbackOutcome, CallbackReport, JobChange, RequestRow};

/// Decides a callback on the request's row: the outcome, and the change to save.
#[must_use]
pub fn plan_callback(
    report: CallbackReport,
    row: Option<RequestRow>,
) -> (CallbackOutcome, Option<JobChange>) {
    let mut job = match row {
        Some(RequestRow::Job(job)) => job,
        Some(RequestRow::Final(status)) => {
            return (CallbackOutcome::TransitionError(TransitionError::Final(status)), None);
        }
        None => return (CallbackOutcome::Unknown, None),
    };
    match job.progress.call_back(report.callback) {
        Ok(status) => {
            let outcome = AttemptOutcome { result: report.result, failure: report.failure };
            (CallbackOutcome::Applied(status), Some(JobChange { row: job, outcome: Some(outcome) }))
        }
        Err(refused) => (CallbackOutcome::TransitionError(refused), None),
    }
}
