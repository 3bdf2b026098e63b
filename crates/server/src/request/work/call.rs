//! Runs one job: decrypts the payload, asks the breaker, calls the downstream and creates the report.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use weir_core::request::breaker::{CallAdmission, CallPermit, DownstreamHealth};
use weir_core::request::retry::{CallOutcome, FailureCause, RetryDecision, classify};
use weir_core::request::state::WorkerReport;
use weir_core::{Clock, RequestId, TenantId, TraceId};
use weir_store::request::{Job, JobReport, Sealed};

use super::downstream::{Downstream, DownstreamResponse};
use crate::request::encryption::{Keyring, SealedField};
use crate::request::events::PayloadUnreadable;
use crate::request::stored_form::StoredForm;
use crate::request::trace::trace_id;

/// How long a request with an unreadable payload waits: an operator has to add its key again.
const UNREADABLE_PAYLOAD_DELAY: Duration = Duration::from_secs(60);

/// Runs jobs. Shared by all calls of a worker.
pub(super) struct JobRunner {
    pub(super) keyring: Arc<Keyring>,
    pub(super) form: Arc<StoredForm>,
    pub(super) clock: Arc<dyn Clock>,
    /// Cancelled when the server begins to stop: no new calls after that.
    pub(super) closing: CancellationToken,
    /// Cancelled when running calls have had enough time to finish.
    pub(super) abort: CancellationToken,
}

/// A job that was run, with its report and what the log line needs.
#[derive(Debug)]
pub(in crate::request) struct FinishedJob {
    pub(in crate::request) report: JobReport,
    pub(in crate::request) tenant: TenantId,
    pub(in crate::request) trace_id: TraceId,
    pub(in crate::request) attempt: u32,
    pub(in crate::request) claimed_at: Instant,
    /// The cause of a failure, for operators only.
    pub(in crate::request) problem: Option<String>,
}

impl JobRunner {
    /// Asks the downstream's limits and its breaker for a call, while `running` others are under way. Asked at the claim, so that
    /// the next claim knows how many calls are left.
    pub(super) fn admit(&self, downstream: &Downstream, running: usize) -> CallAdmission {
        if self.closing.is_cancelled() {
            return CallAdmission::Denied { until: self.clock.now() };
        }
        match downstream.limits.begin(running) {
            Ok(()) => downstream.breaker.admit(),
            Err(until) => CallAdmission::Denied { until },
        }
    }

    /// Runs a job, or reports that it has to wait.
    pub(super) async fn attempt(
        &self,
        job: Job,
        downstream: &Downstream,
        admission: CallAdmission,
        claimed_at: Instant,
    ) -> FinishedJob {
        let permit = match admission {
            CallAdmission::Allowed(permit) => permit,
            CallAdmission::Denied { until } => {
                return finished(&job, claimed_at, JobResult::not_called(until.since(self.clock.now())));
            }
        };
        let payload = match self.keyring.open(job.id, SealedField::Payload, &job.payload) {
            Ok(payload) => payload,
            Err(error) => {
                downstream.breaker.report(permit, DownstreamHealth::Unknown);
                PayloadUnreadable { job: &job, error: &error }.emit();
                return finished(
                    &job,
                    claimed_at,
                    JobResult::not_called(UNREADABLE_PAYLOAD_DELAY).because(error.to_string()),
                );
            }
        };
        let job_result = tokio::select! {
            biased;
            called = downstream.call(&job, payload) => self.finish_call(job.id, called, downstream, permit).await,
            () = self.abort.cancelled() => {
                downstream.breaker.report(permit, DownstreamHealth::Unknown);
                JobResult::not_called(Duration::ZERO).because("the server stopped during the call".to_owned())
            }
        };
        finished(&job, claimed_at, job_result)
    }

    async fn finish_call(
        &self,
        id: RequestId,
        called: DownstreamResponse,
        downstream: &Downstream,
        permit: CallPermit,
    ) -> JobResult {
        let DownstreamResponse { outcome, result, problem } = called;
        let decision = classify(outcome);
        downstream.breaker.report(permit, decision.health());
        let problem = problem.map(|problem| problem.to_string());
        let result = result.filter(|_| decision == RetryDecision::Complete);
        let message = match decision.cause() {
            // If it cannot be sealed now, the store writes the same sentence as it is: it is one of a few.
            Some(cause) => self.form.of_text(id, SealedField::FailureMessage, cause.to_string()).await.ok(),
            None => None,
        };
        match result.map(|result| self.keyring.seal(id, SealedField::Result, &result)).transpose() {
            Ok(result) => JobResult { report: WorkerReport::Called(decision), result, message, problem },
            // Without its result the call is worthless: the downstream is called again.
            Err(error) => JobResult {
                report: WorkerReport::Called(classify(CallOutcome::Unreadable)),
                result: None,
                message: None,
                problem: Some(error.to_string()),
            },
        }
    }
}

struct JobResult {
    report: WorkerReport,
    result: Option<Sealed>,
    /// The failure message as it is stored.
    message: Option<String>,
    problem: Option<String>,
}

impl JobResult {
    const fn not_called(after: Duration) -> Self {
        Self { report: WorkerReport::NotCalled { after }, result: None, message: None, problem: None }
    }

    fn because(self, problem: String) -> Self {
        Self { problem: Some(problem), ..self }
    }
}

fn finished(job: &Job, claimed_at: Instant, job_result: JobResult) -> FinishedJob {
    let JobResult { report, result, message, problem } = job_result;
    let random = fastrand::u64(..);
    let report = JobReport { id: job.id, token: job.token, report, result, detail: message, random };
    let trace_id = trace_id(job.id, job.trace.as_ref());
    FinishedJob { report, tenant: job.tenant.clone(), trace_id, attempt: job.attempt, claimed_at, problem }
}

impl FinishedJob {
    /// Why the call failed, if it was made and failed.
    pub(in crate::request) const fn cause(&self) -> Option<FailureCause> {
        match self.report.report {
            WorkerReport::Called(decision) => decision.cause(),
            WorkerReport::NotCalled { .. } => None,
        }
    }

    /// The size of the result.
    pub(super) fn bytes(&self) -> usize {
        self.report.result.as_ref().map_or(0, |sealed| sealed.bytes.len())
    }
}
