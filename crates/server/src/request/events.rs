//! What happens to requests, their jobs and their webhooks: each event writes its log line and moves its metrics. Requests that the
//! reconciler publishes again (`PENDING_ENQUEUE->ACCEPTED`) are one line with their number, in `engines/broker_jobs.rs`.

use std::time::Duration;

use tokio::task::JoinError;
use tracing::field::{DisplayValue, display};
use weir_core::request::retry::{FailureCause, RetryDecision};
use weir_core::request::state::{RequestStatus, TransitionError, WorkerReport};
use weir_core::{IdempotencyKey, RequestId, TenantId, TraceId};
use weir_store::Error;
use weir_store::request::{Job, Request, Rollout, SubmitOutcome, SubmitReceipt};

use super::encryption::{OpenError, SealedField};
use super::metrics::{AcceptMetrics, FinishedMetrics, WorkMetrics};
use super::service::SubmitError;
use super::service::tenants::EffectiveLimit;
use super::trace::trace_id;
use super::work::call::FinishedJob;
use crate::telemetry::log_throttle::LogThrottle;
use crate::telemetry::request_context::LogIds;

/// A submission was decided, or could not be. A new request has the line by which it is found in the logs, without its payload; a key
/// that was used again for something else has one, too. The others show in the metrics alone.
pub(super) struct SubmissionDecided<'a> {
    pub(super) tenant: &'a TenantId,
    pub(super) key: &'a IdempotencyKey,
    pub(super) outcome: &'a Result<SubmitOutcome, SubmitError>,
    /// How long it took.
    pub(super) latency: Duration,
}

impl SubmissionDecided<'_> {
    pub(super) fn emit(self, metrics: &AcceptMetrics) {
        let label = match self.outcome {
            Ok(SubmitOutcome::Accepted(receipt)) => {
                self.log_accepted(receipt);
                "accepted"
            }
            Ok(SubmitOutcome::Replayed(_)) => "replayed",
            Ok(SubmitOutcome::Conflict) => {
                self.log_conflict();
                "conflict"
            }
            Ok(SubmitOutcome::Limited { .. }) => "limited",
            Err(SubmitError::Disabled | SubmitError::NotAccepting | SubmitError::NotInRollout) => {
                "switched_off"
            }
            Err(SubmitError::Store(_)) => "failed",
        };
        metrics.record(label, self.latency);
    }

    fn log_accepted(&self, receipt: &SubmitReceipt) {
        let (ids, SubmitReceipt { id, status, .. }) = (LogIds::current(), receipt);
        tracing::info!(
            target: "weir::request",
            httpRequestId = ids.http_request_id(),
            traceId = ids.trace_id(),
            requestId = %id,
            idempotencyKey = self.key.as_str(),
            tenantId = self.tenant.as_str(),
            statusTransition = %format_args!("NEW->{}", status.as_str()),
            "request accepted"
        );
    }

    fn log_conflict(&self) {
        let ids = LogIds::current();
        tracing::info!(
            target: "weir::request",
            httpRequestId = ids.http_request_id(),
            traceId = ids.trace_id(),
            idempotencyKey = self.key.as_str(),
            tenantId = self.tenant.as_str(),
            "request refused: its idempotency key was used for another one"
        );
    }
}

/// A tenant has read the present status of a request.
pub(super) struct StatusRead {
    pub(super) latency: Duration,
}

impl StatusRead {
    pub(super) fn emit(self, metrics: &AcceptMetrics) {
        metrics.record_read(self.latency);
    }
}

/// A downstream has called back and ended a request.
pub(super) struct RequestCalledBack<'a> {
    pub(super) id: RequestId,
    pub(super) status: RequestStatus,
    /// Its record, if it could be read.
    pub(super) request: Option<&'a Request>,
}

impl RequestCalledBack<'_> {
    pub(super) fn emit(self, finished: &FinishedMetrics) {
        finished.record(self.status);
        let ids = LogIds::current();
        tracing::info!(
            target: "weir::request",
            httpRequestId = ids.http_request_id(),
            traceId = self.request.map(trace_of),
            tenantId = self.request.map(|request| request.tenant.as_str()),
            requestId = %self.id,
            statusTransition = %transition(RequestStatus::InProgress, self.status),
            "request called back"
        );
    }
}

/// A tenant has cancelled a request.
pub(super) struct RequestCancelled<'a> {
    pub(super) request: &'a Request,
}

impl RequestCancelled<'_> {
    pub(super) fn emit(self, finished: &FinishedMetrics) {
        finished.record(RequestStatus::Cancelled);
        let ids = LogIds::current();
        tracing::info!(
            target: "weir::request",
            httpRequestId = ids.http_request_id(),
            traceId = trace_of(self.request),
            tenantId = self.request.tenant.as_str(),
            requestId = %self.request.id,
            // As it was read just before.
            statusTransition = %transition(self.request.status, RequestStatus::Cancelled),
            "request cancelled"
        );
    }
}

/// An operator has restarted a dead request.
pub(super) struct RequestReplayed<'a> {
    pub(super) id: RequestId,
    /// Its record, if it could be read.
    pub(super) request: Option<&'a Request>,
}

impl RequestReplayed<'_> {
    pub(super) fn emit(self) {
        let ids = LogIds::current();
        tracing::info!(
            target: "weir::request",
            httpRequestId = ids.http_request_id(),
            traceId = self.request.map(trace_of),
            tenantId = self.request.map(|request| request.tenant.as_str()),
            requestId = %self.id,
            statusTransition = %transition(RequestStatus::FailedRetryExhausted, RequestStatus::Accepted),
            "request replayed"
        );
    }
}

/// An operator has changed the rollout.
pub(super) struct RolloutChanged {
    pub(super) rollout: Rollout,
    /// The rollout as it was read just before.
    pub(super) before: Rollout,
}

impl RolloutChanged {
    pub(super) fn emit(self) {
        let Rollout { processing_enabled, accepting_enabled, reconciler_enabled, canary } = self.rollout;
        let (ids, canary_percent) = (LogIds::current(), canary.get());
        tracing::info!(
            httpRequestId = ids.http_request_id(),
            traceId = ids.trace_id(),
            callerScope = ids.caller_scope(),
            tenantId = ids.caller_tenant(),
            processing_enabled,
            accepting_enabled,
            reconciler_enabled,
            canary_percent,
            before = ?self.before,
            "the rollout of request was changed"
        );
    }
}

/// An operator has set or removed a tenant's limit.
pub(super) struct TenantLimitChanged<'a> {
    pub(super) tenant: &'a TenantId,
    /// The limit as it is now, and as it was read just before.
    pub(super) limit: EffectiveLimit,
    pub(super) before: EffectiveLimit,
}

impl TenantLimitChanged<'_> {
    pub(super) fn emit(self) {
        let ids = LogIds::current();
        tracing::info!(
            httpRequestId = ids.http_request_id(),
            traceId = ids.trace_id(),
            callerScope = ids.caller_scope(),
            tenantId = %self.tenant,
            requestsPerMinute = self.limit.limits.map(|limits| limits.rate_limit()),
            isOwn = self.limit.is_own,
            before = ?self.before,
            "a tenant's limit was changed"
        );
    }
}

/// An operator erases all data of a tenant.
pub(super) struct ErasureBegun<'a> {
    pub(super) tenant: &'a TenantId,
    pub(super) count: u64,
}

impl ErasureBegun<'_> {
    pub(super) fn emit(self) {
        let ids = LogIds::current();
        tracing::warn!(
            httpRequestId = ids.http_request_id(),
            traceId = ids.trace_id(),
            callerScope = ids.caller_scope(),
            tenantId = %self.tenant,
            erasing = self.count,
            "the data of a tenant is being erased"
        );
    }
}

/// All data of a tenant is erased.
pub(super) struct TenantErased<'a> {
    pub(super) tenant: &'a TenantId,
    pub(super) count: u64,
}

impl TenantErased<'_> {
    pub(super) fn emit(self) {
        tracing::info!(tenantId = %self.tenant, erased = self.count, "the data of a tenant is erased");
    }
}

/// Data of tenants cannot be erased for now. Written at the first failure of several.
pub(super) struct ErasureFailed<'a> {
    pub(super) error: &'a Error,
}

impl ErasureFailed<'_> {
    pub(super) fn emit(self) {
        tracing::warn!(error = %self.error.with_causes(), "cannot erase a tenant's data; trying again");
    }
}

/// A worker cannot decrypt a payload, so the request waits. Written at most once a second.
pub(super) struct PayloadUnreadable<'a> {
    pub(super) job: &'a Job,
    pub(super) error: &'a OpenError,
}

impl PayloadUnreadable<'_> {
    pub(super) fn emit(self) {
        static THROTTLE: LogThrottle = LogThrottle::new();
        if let Some(suppressed) = THROTTLE.permit() {
            tracing::error!(
                target: "weir::request",
                traceId = %trace_id(self.job.id, self.job.trace.as_ref()),
                requestId = %self.job.id,
                tenantId = self.job.tenant.as_str(),
                error = %self.error,
                suppressed,
                "cannot decrypt the payload of a request; it waits until WEIR_REQUEST_KEYS has its key"
            );
        }
    }
}

/// The payload of a dead request cannot be shown to the operator.
pub(super) struct DeadPayloadUnreadable<'a> {
    pub(super) id: RequestId,
    pub(super) error: &'a OpenError,
}

impl DeadPayloadUnreadable<'_> {
    pub(super) fn emit(self) {
        tracing::warn!(
            target: "weir::request",
            requestId = %self.id,
            error = %self.error,
            "cannot decrypt the payload of a dead request; check WEIR_REQUEST_KEYS"
        );
    }
}

/// A result cannot be shown to its tenant.
pub(super) struct ResultUnreadable<'a> {
    pub(super) id: RequestId,
    pub(super) error: &'a OpenError,
}

impl ResultUnreadable<'_> {
    pub(super) fn emit(self) {
        tracing::warn!(
            target: "weir::request",
            requestId = %self.id,
            error = %self.error,
            "cannot decrypt the result of a request; check WEIR_REQUEST_KEYS"
        );
    }
}

/// A failure message or a callback URL cannot be shown.
pub(super) struct TextUnreadable<'a> {
    pub(super) id: RequestId,
    pub(super) field: SealedField,
    pub(super) error: &'a OpenError,
}

impl TextUnreadable<'_> {
    pub(super) fn emit(self) {
        tracing::warn!(
            target: "weir::request",
            requestId = %self.id,
            field = ?self.field,
            error = %self.error,
            "cannot decrypt a field of a request; check WEIR_REQUEST_KEYS"
        );
    }
}

/// The store could not begin to take hashed idempotency keys yet. Written at most once a second.
pub(super) struct HashingDelayed<'a> {
    pub(super) error: &'a Error,
}

impl HashingDelayed<'_> {
    pub(super) fn emit(self) {
        static THROTTLE: LogThrottle = LogThrottle::new();
        if let Some(suppressed) = THROTTLE.permit() {
            tracing::warn!(
                target: "weir::request",
                error = %self.error.with_causes(),
                suppressed,
                "idempotency keys cannot be stored as keyed hashes yet: a transaction that has been open for long may hold the \
                 table idempotency_record; trying again in 5 s"
            );
        }
    }
}

/// A result cannot be written as a JSON string.
pub(super) struct ResultEncodingFailed<'a> {
    pub(super) error: &'a serde_json::Error,
}

impl ResultEncodingFailed<'_> {
    pub(super) fn emit(self) {
        tracing::error!(error = %self.error, "cannot write the result of a request as JSON");
    }
}

/// The store did not hand out jobs.
pub(super) struct ClaimFailed<'a> {
    pub(super) error: &'a Error,
}

impl ClaimFailed<'_> {
    pub(super) fn emit(self) {
        tracing::warn!(error = %self.error.with_causes(), "cannot claim requests; trying again");
    }
}

/// A worker has claimed jobs of workers that have not reported. Their downstreams may have been called before.
pub(super) struct JobsTakenOver {
    pub(super) count: usize,
}

impl JobsTakenOver {
    pub(super) fn emit(self, metrics: &WorkMetrics) {
        let Self { count } = self;
        if count > 0 {
            metrics.duplicate_calls.inc_by(count as u64);
            tracing::debug!(target: "weir::request", count, "requests were taken over from workers that have not reported");
        }
    }
}

/// A worker has claimed a job. Only its first attempt is logged.
pub(super) struct JobClaimed<'a> {
    pub(super) job: &'a Job,
}

impl JobClaimed<'_> {
    pub(super) fn emit(self) {
        let Job { id, tenant, attempt, trace, .. } = self.job;
        if *attempt == 1 {
            tracing::info!(
                target: "weir::request",
                traceId = %trace_id(*id, trace.as_ref()),
                requestId = %id,
                tenantId = tenant.as_str(),
                statusTransition = %transition(RequestStatus::Accepted, RequestStatus::InProgress),
                attempt,
                "request"
            );
        }
    }
}

/// The lease of a request's last attempt has ended without a report.
pub(super) struct AttemptsExhausted<'a> {
    pub(super) id: RequestId,
    /// Its record, if it could be read.
    pub(super) request: Option<&'a Request>,
}

impl AttemptsExhausted<'_> {
    pub(super) fn emit(self, finished: &FinishedMetrics) {
        finished.record(RequestStatus::FailedRetryExhausted);
        tracing::info!(
            target: "weir::request",
            traceId = self.request.map(trace_of),
            tenantId = self.request.map(|request| request.tenant.as_str()),
            requestId = %self.id,
            statusTransition = %transition(RequestStatus::InProgress, RequestStatus::FailedRetryExhausted),
            "request"
        );
    }
}

/// A task that worked on a request panicked. The request is claimed again when its lease ends.
pub(super) struct JobPanicked<'a> {
    pub(super) error: &'a JoinError,
}

impl JobPanicked<'_> {
    pub(super) fn emit(self) {
        tracing::error!(target: "weir::request", error = %self.error, "a call to a downstream panicked");
    }
}

/// The report of a job is in the store.
pub(super) struct JobReported<'a> {
    pub(super) job: &'a FinishedJob,
    pub(super) status: RequestStatus,
}

impl JobReported<'_> {
    pub(super) fn emit(self, metrics: &WorkMetrics) {
        let Self { job, status } = self;
        let (id, tenant, report) = (job.report.id, job.tenant.as_str(), job.report.report);
        metrics.processing_latency_seconds.observe(job.claimed_at.elapsed().as_secs_f64());
        metrics.finished.record(status);
        if status == RequestStatus::InProgress
            && matches!(report, WorkerReport::Called(RetryDecision::Retry { .. }))
        {
            metrics.retries.inc();
        }
        let problem = job.problem.as_deref();
        if matches!(report, WorkerReport::NotCalled { .. }) {
            tracing::debug!(
                target: "weir::request",
                traceId = %job.trace_id,
                requestId = %id,
                tenantId = tenant,
                problem,
                "a request was put back without a call"
            );
            return;
        }
        tracing::info!(
            target: "weir::request",
            traceId = %job.trace_id,
            requestId = %id,
            tenantId = tenant,
            statusTransition = %transition(RequestStatus::InProgress, status),
            attempt = job.attempt,
            failureCode = job.cause().map(FailureCause::code),
            problem,
            "request"
        );
    }
}

/// The report of a job came after its lease, or again, and changed nothing.
pub(super) struct ReportRefused<'a> {
    pub(super) job: &'a FinishedJob,
    pub(super) reason: TransitionError,
}

impl ReportRefused<'_> {
    pub(super) fn emit(self, metrics: &WorkMetrics) {
        let Self { job, reason } = self;
        metrics.processing_latency_seconds.observe(job.claimed_at.elapsed().as_secs_f64());
        tracing::warn!(
            target: "weir::request",
            traceId = %job.trace_id,
            requestId = %job.report.id,
            tenantId = job.tenant.as_str(),
            %reason,
            "a late report of a request changed nothing"
        );
    }
}

/// The store did not take reports; they are kept and tried again.
pub(super) struct ReportsDelayed<'a> {
    pub(super) count: usize,
    pub(super) error: &'a Error,
}

impl ReportsDelayed<'_> {
    pub(super) fn emit(self) {
        let (count, error) = (self.count, self.error.with_causes());
        tracing::warn!(count, %error, "cannot store reports of requests; trying again");
    }
}

/// A report was dropped, because the store did not take it within two leases.
pub(super) struct ReportDropped<'a> {
    pub(super) job: &'a FinishedJob,
}

impl ReportDropped<'_> {
    pub(super) fn emit(self) {
        tracing::error!(
            target: "weir::request",
            traceId = %self.job.trace_id,
            requestId = %self.job.report.id,
            tenantId = self.job.tenant.as_str(),
            "the report of a request could not be stored in time; its downstream will be called again"
        );
    }
}

/// Old requests and keys were deleted.
pub(super) struct RequestsPurged {
    pub(super) count: u64,
}

impl RequestsPurged {
    pub(super) fn emit(self) {
        tracing::debug!(purged = self.count, "deleted old requests and keys");
    }
}

/// The store did not delete old requests.
pub(super) struct PurgeFailed<'a> {
    pub(super) error: &'a Error,
}

impl PurgeFailed<'_> {
    pub(super) fn emit(self) {
        tracing::warn!(error = %self.error.with_causes(), "cannot delete old requests; trying again");
    }
}

/// The store or the broker failed while stranded requests were published again.
pub(super) struct ReconcileFailed<'a> {
    pub(super) error: &'a Error,
}

impl ReconcileFailed<'_> {
    pub(super) fn emit(self) {
        tracing::warn!(error = %self.error.with_causes(), "cannot reconcile stranded requests; trying again");
    }
}

/// Which request a webhook is about; absent if its record is gone.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct WebhookOrigin<'a> {
    pub(super) tenant: Option<&'a TenantId>,
    pub(super) trace_id: Option<TraceId>,
}

/// A receiver has accepted a webhook, or there is nothing to send.
pub(super) struct WebhookSent;

impl WebhookSent {
    pub(super) fn emit(self, metrics: &WorkMetrics) {
        metrics.count_webhook("sent");
    }
}

/// A webhook was deferred without costing an attempt.
pub(super) struct WebhookDeferred;

impl WebhookDeferred {
    pub(super) fn emit(self, metrics: &WorkMetrics) {
        metrics.count_webhook("put_off");
    }
}

/// An attempt to send a webhook failed, and another one follows.
pub(super) struct WebhookRetried<'a> {
    pub(super) request_id: &'a str,
    pub(super) origin: WebhookOrigin<'a>,
    pub(super) reason: &'a str,
}

impl WebhookRetried<'_> {
    pub(super) fn emit(self, metrics: &WorkMetrics) {
        let Self { request_id, origin, reason } = self;
        metrics.count_webhook("retried");
        tracing::info!(
            target: "weir::request",
            traceId = origin.trace_id.map(display),
            requestId = request_id,
            tenantId = origin.tenant.map(TenantId::as_str),
            reason,
            "a webhook will be sent again"
        );
    }
}

/// A webhook was refused for good or has no attempts left.
pub(super) struct WebhookDied<'a> {
    pub(super) request_id: &'a str,
    pub(super) origin: WebhookOrigin<'a>,
    pub(super) reason: &'a str,
}

impl WebhookDied<'_> {
    pub(super) fn emit(self, metrics: &WorkMetrics) {
        let Self { request_id, origin, reason } = self;
        metrics.count_webhook("dead");
        tracing::warn!(
            target: "weir::request",
            traceId = origin.trace_id.map(display),
            requestId = request_id,
            tenantId = origin.tenant.map(TenantId::as_str),
            reason,
            "a webhook became a dead letter"
        );
    }
}

/// A claim of webhooks expired before it was settled.
pub(super) struct WebhookClaimExpired;

impl WebhookClaimExpired {
    pub(super) fn emit(self) {
        tracing::warn!("a claim of webhooks expired before it was settled; they are claimed again");
    }
}

/// The store did not hand out or settle webhooks.
pub(super) struct WebhookStoreFailed<'a> {
    pub(super) error: &'a Error,
}

impl WebhookStoreFailed<'_> {
    pub(super) fn emit(self) {
        tracing::warn!(
            error = %self.error.with_causes(),
            "cannot claim or settle webhooks in the store; trying again"
        );
    }
}

fn trace_of(request: &Request) -> DisplayValue<TraceId> {
    display(trace_id(request.id, request.trace.as_ref()))
}

fn transition(from: RequestStatus, to: RequestStatus) -> String {
    format!("{}->{}", from.as_str(), to.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::log_capture::capture;

    #[test]
    fn a_dead_webhook_is_counted_and_logged() {
        let metrics = WorkMetrics::default();
        let event = WebhookDied {
            request_id: "id-1",
            origin: WebhookOrigin::default(),
            reason: "the receiver answered 410",
        };
        let lines = capture(|| event.emit(&metrics));
        assert!(lines.contains("requestId=\"id-1\"") && lines.contains("answered 410"), "{lines}");
        assert_eq!(metrics.webhooks("dead"), 1);
    }

    fn decide(outcome: &Result<SubmitOutcome, SubmitError>, metrics: &AcceptMetrics) -> String {
        let (tenant, key) = (TenantId::parse("acme").unwrap(), IdempotencyKey::parse("order-1").unwrap());
        let latency = Duration::from_millis(3);
        capture(|| SubmissionDecided { tenant: &tenant, key: &key, outcome, latency }.emit(metrics))
    }

    #[test]
    fn a_conflict_is_counted_and_logged() {
        let metrics = AcceptMetrics::default();
        let line = decide(&Ok(SubmitOutcome::Conflict), &metrics);
        assert!(line.contains("idempotencyKey=\"order-1\"") && line.contains("request refused"), "{line}");
        assert_eq!((metrics.submissions("conflict"), metrics.submissions("accepted")), (1, 0));
    }

    #[test]
    fn an_accepted_request_is_counted_and_logged_and_its_replay_only_counted() {
        let metrics = AcceptMetrics::default();
        let receipt = SubmitReceipt {
            id: RequestId::from_uuid(uuid::Uuid::nil()),
            status: RequestStatus::Accepted,
            accepted_at: weir_core::Timestamp::EPOCH,
            window: None,
        };
        let line = decide(&Ok(SubmitOutcome::Accepted(receipt)), &metrics);
        assert!(line.contains("NEW->ACCEPTED") && line.contains("request accepted"), "{line}");
        assert_eq!(decide(&Ok(SubmitOutcome::Replayed(receipt)), &metrics), "");
        assert_eq!(decide(&Err(SubmitError::Disabled), &metrics), "");
        assert_eq!(
            ["accepted", "replayed", "switched_off"].map(|outcome| metrics.submissions(outcome)),
            [1; 3]
        );
    }

    #[test]
    fn jobs_that_were_taken_over_are_counted_and_logged() {
        let metrics = WorkMetrics::default();
        assert_eq!(capture(|| JobsTakenOver { count: 0 }.emit(&metrics)), "");
        let line = capture(|| JobsTakenOver { count: 3 }.emit(&metrics));
        assert!(line.contains("count=3") && line.contains("taken over"), "{line}");
        assert_eq!(metrics.duplicate_calls.get(), 3);
    }

    #[test]
    fn a_request_without_attempts_left_is_counted_and_logged() {
        let metrics = FinishedMetrics::default();
        let event = AttemptsExhausted { id: RequestId::from_uuid(uuid::Uuid::nil()), request: None };
        let line = capture(|| event.emit(&metrics));
        assert!(line.contains("IN_PROGRESS->FAILED_RETRY_EXHAUSTED"), "{line}");
        assert_eq!(metrics.count(RequestStatus::FailedRetryExhausted), 1);
    }

    #[test]
    fn a_transition_is_written_without_spaces() {
        let event = RequestReplayed { id: RequestId::from_uuid(uuid::Uuid::nil()), request: None };
        let lines = capture(|| event.emit());
        assert!(lines.contains("FAILED_RETRY_EXHAUSTED->ACCEPTED"), "{lines}");
    }
}
