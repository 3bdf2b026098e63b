//! What becomes of a request whose downstream calls back.

use weir_core::request::state::TransitionError;

use super::{AttemptOutcome, CallbackOutcome, CallbackReport, JobChange, RequestRow};

/// Takes a callback, given the row of the request it is about: its outcome, and what is to be saved.
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
