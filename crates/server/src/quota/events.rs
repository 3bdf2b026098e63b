//! What happens to quotas and while messages are delivered: each event writes its log line and updates its metric.

use weir_core::UserId;
use weir_core::quota::QuotaLimits;
use weir_core::request::retry::FailureCause;
use weir_queue::Message;
use weir_store::quota::SendOutcome;
use weir_store::{Error, Result};

use super::metrics::QuotaMetrics;
use crate::telemetry::request_context::LogIds;

/// How many bytes of a malformed message its log line shows.
const PAYLOAD_SHOWN_BYTES: usize = 256;

/// A user's quota was created or changed.
pub(super) struct QuotaConfigured<'a> {
    pub(super) user: &'a UserId,
    pub(super) limits: QuotaLimits,
    /// The limits as they were read just before.
    pub(super) before: Option<QuotaLimits>,
}

impl QuotaConfigured<'_> {
    pub(super) fn emit(self) {
        let ids = LogIds::current();
        tracing::info!(
            httpRequestId = ids.http_request_id(),
            traceId = ids.trace_id(),
            callerScope = ids.caller_scope(),
            tenantId = ids.caller_tenant(),
            userId = %self.user,
            rateLimit = self.limits.rate_limit(),
            timeWindowMinutes = self.limits.time_window_minutes(),
            before = self.before.map(describe),
            "a quota was configured"
        );
    }
}

/// A user's quota was deleted.
pub(super) struct QuotaDeleted<'a> {
    pub(super) user: &'a UserId,
    pub(super) before: Option<QuotaLimits>,
}

impl QuotaDeleted<'_> {
    pub(super) fn emit(self) {
        let ids = LogIds::current();
        tracing::info!(
            httpRequestId = ids.http_request_id(),
            traceId = ids.trace_id(),
            callerScope = ids.caller_scope(),
            tenantId = ids.caller_tenant(),
            userId = %self.user,
            before = self.before.map(describe),
            "a quota was deleted"
        );
    }
}

fn describe(limits: QuotaLimits) -> String {
    format!("rateLimit={} timeWindowMinutes={}", limits.rate_limit(), limits.time_window_minutes())
}

/// A send was decided, or could not be. The caller learns why; no line is written for each.
pub(super) struct SendDecided<'a> {
    pub(super) outcome: &'a Result<SendOutcome>,
}

impl SendDecided<'_> {
    pub(super) fn emit(self, metrics: &QuotaMetrics) {
        metrics.record_send(self.outcome);
    }
}

/// A send was denied from memory.
pub(super) struct SendDeniedFromCache;

impl SendDeniedFromCache {
    pub(super) fn emit(self, metrics: &QuotaMetrics) {
        metrics.denied_from_cache.inc();
    }
}

/// Expired idempotency keys were deleted.
pub(super) struct KeysPurged {
    pub(super) count: usize,
}

impl KeysPurged {
    pub(super) fn emit(self, metrics: &QuotaMetrics) {
        let Self { count } = self;
        if count > 0 {
            metrics.keys_purged.inc_by(count as u64);
            tracing::debug!(purged = count, "deleted expired idempotency keys of sends");
        }
    }
}

/// Expired idempotency keys could not be deleted. Logged once per outage.
pub(super) struct KeysPurgeFailed<'a> {
    pub(super) error: &'a Error,
}

impl KeysPurgeFailed<'_> {
    pub(super) fn emit(self) {
        tracing::warn!(
            error = %self.error.with_causes(),
            "cannot delete expired idempotency keys of sends; retrying until it succeeds"
        );
    }
}

/// A batch could not be claimed, written or settled. Logged once per outage.
pub(super) struct DeliveryFailed<'a> {
    pub(super) error: &'a Error,
}

impl DeliveryFailed<'_> {
    pub(super) fn emit(self) {
        tracing::warn!(error = %self.error.with_causes(), "cannot deliver messages; retrying until it succeeds");
    }
}

/// Messages were delivered. Each has its line `SMS SENT` (`sms_log.rs`).
pub(super) struct MessagesDelivered {
    pub(super) count: usize,
}

impl MessagesDelivered {
    pub(super) fn emit(self, metrics: &QuotaMetrics) {
        metrics.delivered.inc_by(self.count as u64);
    }
}

/// Messages were delivered after their claim had expired, so another sender delivers them again.
pub(super) struct ClaimExpired {
    pub(super) messages: usize,
}

impl ClaimExpired {
    pub(super) fn emit(self) {
        tracing::warn!(
            messages = self.messages,
            "messages were delivered after their claim had expired (sender.visibility) and will be delivered again"
        );
    }
}

/// The provider did not accept a message, which is tried again.
pub(super) struct SmsRetried<'a> {
    pub(super) user: &'a str,
    pub(super) message_id: uuid::Uuid,
    /// The attempts so far.
    pub(super) attempts: u32,
    pub(super) cause: FailureCause,
}

impl SmsRetried<'_> {
    pub(super) fn emit(self, metrics: &QuotaMetrics) {
        let Self { user, message_id, attempts, cause } = self;
        tracing::debug!(target: "weir::sender", userId = user, messageId = %message_id, attempts, error = %cause, "a message is tried again");
        metrics.retried.inc();
    }
}

/// The provider refused a message, or did not accept it in as many attempts as there are.
pub(super) struct SmsGivenUp<'a> {
    pub(super) user: &'a str,
    pub(super) message_id: uuid::Uuid,
    pub(super) attempts: u32,
    pub(super) cause: FailureCause,
}

impl SmsGivenUp<'_> {
    pub(super) fn emit(self, metrics: &QuotaMetrics) {
        let Self { user, message_id, attempts, cause } = self;
        tracing::error!(
            target: "weir::sender", userId = user, messageId = %message_id, attempts, error = %cause,
            "message given up and saved as a dead letter: see /admin/dlq, with Kafka the topic sms-outbound.dlq"
        );
        metrics.given_up.inc();
    }
}

/// A message on the topic is not an event of quota and becomes a dead letter.
pub(super) struct MessageMalformed<'a> {
    pub(super) message: &'a Message,
    pub(super) error: &'a dyn std::error::Error,
}

impl MessageMalformed<'_> {
    pub(super) fn emit(self, metrics: &QuotaMetrics) {
        let Message { position, key, payload, .. } = self.message;
        let shown = String::from_utf8_lossy(&payload[..payload.len().min(PAYLOAD_SHOWN_BYTES)]);
        tracing::error!(
            target: "weir::sender",
            userId = key, payload = ?shown, error = %self.error, shard = position.shard, id = position.id,
            "malformed event saved as a dead letter: see /admin/dlq, with Kafka the topic sms-outbound.dlq"
        );
        metrics.malformed.inc();
    }
}

#[cfg(test)]
mod tests {
    use weir_queue::Position;
    use weir_store::quota::CacheMetrics;

    use super::*;
    use crate::telemetry::log_capture::capture;

    #[test]
    fn a_malformed_message_is_counted_and_logged_without_most_of_its_payload() {
        let metrics = QuotaMetrics::new(CacheMetrics::default());
        let message = Message {
            position: Position { shard: 3, id: 7 },
            key: "alice".into(),
            payload: "x".repeat(1_000).into_bytes(),
            attempts: 0,
            trace: None,
        };
        let error = std::io::Error::other("expected value");
        let line = capture(|| MessageMalformed { message: &message, error: &error }.emit(&metrics));
        assert_eq!(metrics.malformed.get(), 1);
        assert!(line.contains("ERROR") && line.contains("malformed event"), "{line}");
        assert!(line.contains(&"x".repeat(256)) && !line.contains(&"x".repeat(257)), "{line}");
    }

    #[test]
    fn a_message_that_is_given_up_or_tried_again_is_counted_and_logged() {
        let metrics = QuotaMetrics::new(CacheMetrics::default());
        let (user, message_id, attempts) = ("alice", uuid::Uuid::nil(), 3);
        let cause = FailureCause::Rejected(410);
        let line = capture(|| SmsRetried { user, message_id, attempts, cause }.emit(&metrics));
        assert!(line.contains("userId=\"alice\"") && line.contains("tried again"), "{line}");
        assert_eq!((metrics.retried.get(), metrics.given_up.get()), (1, 0));
        let line = capture(|| SmsGivenUp { user, message_id, attempts, cause }.emit(&metrics));
        assert!(line.contains("ERROR") && line.contains("attempts=3"), "{line}");
        assert_eq!((metrics.retried.get(), metrics.given_up.get()), (1, 1));
    }

    #[test]
    fn deleted_keys_are_counted_and_logged() {
        let metrics = QuotaMetrics::new(CacheMetrics::default());
        assert_eq!(capture(|| KeysPurged { count: 0 }.emit(&metrics)), "");
        let line = capture(|| KeysPurged { count: 12 }.emit(&metrics));
        assert!(line.contains("purged=12"), "{line}");
        assert_eq!(metrics.keys_purged.get(), 12);
    }
}
