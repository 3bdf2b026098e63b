//! One job: open what is asked for, ask the breaker, call the downstream, and make a report of it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use weir_core::request::breaker::{CallAdmission, CallPermit, DownstreamHealth};
use weir_core::request::retry::{CallOutcome, FailureCause, RetryDecision, classify};
use weir_core::request::state::WorkerReport;
use weir_core::{Clock, RequestId, TenantId};
use weir_store::request::{Job, JobReport, Sealed};

use super::downstream::{Called, Downstream};
use crate::request::encryption::{Keyring, SealedField};
use crate::telemetry::log_throttle::LogThrottle;

/// How long a request is left alone whose payload does not open: an operator has to bring its key back.
const PARKED_UNOPENED: Duration = Duration::from_secs(60);

static UNOPENED: LogThrottle = LogThrottle::new();

/// What every call of a worker shares.
pub(super) struct Caller {
    pub(super) keyring: Arc<Keyring>,
    pub(super) clock: Arc<dyn Clock>,
    /// Set when the server begins to stop: nothing is called from then on.
    pub(super) closing: CancellationToken,
    /// Set when it has waited long enough for calls that are under way.
    pub(super) cut: CancellationToken,
}

/// A report, and what the log says about it.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) report: JobReport,
    pub(super) tenant: TenantId,
    pub(super) attempt: u32,
    pub(super) claimed: Instant,
    /// More than callers are told.
    pub(super) problem: Option<String>,
}

impl Caller {
    /// Whether a job may be done now. Asked when it is claimed, so that the next claim knows what room is left.
    pub(super) fn admit(&self, downstream: &Downstream) -> CallAdmission {
        if self.closing.is_cancelled() {
            return CallAdmission::Denied { until: self.clock.now() };
        }
        downstream.breaker.admit()
    }

    /// Does a job as far as it can be done now.
    pub(super) async fn attempt(
        &self,
        job: Job,
        downstream: &Downstream,
        admission: CallAdmission,
        claimed: Instant,
    ) -> Done {
        let permit = match admission {
            CallAdmission::Allowed(permit) => permit,
            CallAdmission::Denied { until } => {
                return done(&job, claimed, Made::not_called(until.since(self.clock.now())));
            }
        };
        let payload = match self.keyring.open(job.id, SealedField::Payload, &job.payload) {
            Ok(payload) => payload,
            Err(error) => {
                downstream.breaker.report(permit, DownstreamHealth::Unknown);
                tell_unopened(job.id, &error);
                return done(&job, claimed, Made::not_called(PARKED_UNOPENED).because(error.to_string()));
            }
        };
        let made = tokio::select! {
            biased;
            called = downstream.call(&job, payload) => self.judged(job.id, called, downstream, permit),
            () = self.cut.cancelled() => {
                downstream.breaker.report(permit, DownstreamHealth::Unknown);
                Made::not_called(Duration::ZERO).because("the server stopped during the call".to_owned())
            }
        };
        done(&job, claimed, made)
    }

    fn judged(&self, id: RequestId, called: Called, downstream: &Downstream, permit: CallPermit) -> Made {
        let Called { outcome, result, problem } = called;
        let judgement = classify(outcome);
        downstream.breaker.report(permit, judgement.health());
        let problem = problem.map(|problem| problem.to_string());
        let result = result.filter(|_| judgement == RetryDecision::Complete);
        match result.map(|result| self.keyring.seal(id, SealedField::Result, &result)).transpose() {
            Ok(result) => Made { report: WorkerReport::Called(judgement), result, problem },
            // A result that cannot be kept is as good as none: the downstream is asked for it again.
            Err(error) => Made {
                report: WorkerReport::Called(classify(CallOutcome::Unreadable)),
                result: None,
                problem: Some(error.to_string()),
            },
        }
    }
}

/// What was made of a job.
struct Made {
    report: WorkerReport,
    result: Option<Sealed>,
    problem: Option<String>,
}

impl Made {
    const fn not_called(after: Duration) -> Self {
        Self { report: WorkerReport::NotCalled { after }, result: None, problem: None }
    }

    fn because(self, problem: String) -> Self {
        Self { problem: Some(problem), ..self }
    }
}

fn done(job: &Job, claimed: Instant, made: Made) -> Done {
    let Made { report, result, problem } = made;
    let report =
        JobReport { id: job.id, token: job.token, report, result, detail: None, random: fastrand::u64(..) };
    Done { report, tenant: job.tenant.clone(), attempt: job.attempt, claimed, problem }
}

impl Done {
    /// Why the call did not do the work, if it was made and did not.
    pub(super) const fn cause(&self) -> Option<FailureCause> {
        match self.report.report {
            WorkerReport::Called(judgement) => judgement.cause(),
            WorkerReport::NotCalled { .. } => None,
        }
    }

    /// How much of a batch it takes up.
    pub(super) fn bytes(&self) -> usize {
        self.report.result.as_ref().map_or(0, |sealed| sealed.bytes.len())
    }
}

fn tell_unopened(id: RequestId, error: &crate::request::encryption::OpenError) {
    if let Some(others) = UNOPENED.permit() {
        tracing::error!(
            target: "weir::request",
            requestId = %id, %error, others, "a payload does not open; its request waits until it does"
        );
    }
}
