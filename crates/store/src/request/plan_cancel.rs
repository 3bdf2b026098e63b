//! The plan for the cancellation of a request.

use weir_core::request::state::TransitionError;

use super::{AttemptOutcome, CancelOutcome, Failure, JobChange, RequestRow};

/// The `failureCode` of a cancelled request.
const CODE: &str = "CANCELLED";
const MESSAGE: &str = "the request was cancelled";

/// Decides a cancellation on the request's row: the outcome, and the change to save.
#[must_use]
pub fn plan_cancel(row: Option<RequestRow>) -> (CancelOutcome, Option<JobChange>) {
    let mut job = match row {
        Some(RequestRow::Job(job)) => job,
        Some(RequestRow::Final(status)) => return (CancelOutcome::AlreadyFinal(status), None),
        None => return (CancelOutcome::Unknown, None),
    };
    match job.progress.cancel() {
        Ok(()) => {
            let failure = Failure { code: CODE.to_owned(), message: MESSAGE.to_owned() };
            let outcome = AttemptOutcome { result: None, failure: Some(failure) };
            (CancelOutcome::Cancelled, Some(JobChange { row: job, outcome: Some(outcome) }))
        }
        Err(TransitionError::Final(status)) => (CancelOutcome::AlreadyFinal(status), None),
        Err(_) => unreachable!("a request that has not ended can be cancelled"),
    }
}
