//! What happens to forwarded AI calls: each event writes its log line and moves its metric.

use std::time::Duration;

use super::GatewayError;
use super::metrics::GatewayMetrics;
use crate::telemetry::log_throttle::LogThrottle;
use crate::telemetry::request_context::LogIds;

/// The upstream has begun its response to an AI call.
pub(super) struct AiCallAnswered {
    /// How long that took.
    pub(super) latency: Duration,
}

impl AiCallAnswered {
    pub(super) fn emit(self, metrics: &GatewayMetrics) {
        metrics.record_answered(self.latency);
    }
}

/// An AI call got no response from the upstream. During an outage every call fails alike, so the line is written at most
/// once a second.
pub(super) struct AiCallFailed<'a> {
    pub(super) error: &'a GatewayError,
}

impl AiCallFailed<'_> {
    pub(super) fn emit(self, metrics: &GatewayMetrics) {
        static OUTAGE: LogThrottle = LogThrottle::new();
        let Self { error } = self;
        metrics.record(error.as_str());
        let is_upstream_failure = matches!(
            error,
            GatewayError::Unreachable(_) | GatewayError::TimedOut | GatewayError::Unreadable(_)
        );
        if is_upstream_failure && let Some(suppressed) = OUTAGE.permit() {
            let ids = LogIds::current();
            tracing::warn!(
                httpRequestId = ids.http_request_id(),
                traceId = ids.trace_id(),
                %error,
                suppressed,
                "AI call failed"
            );
        }
    }
}

/// A connection to the upstream broke, during a call or while it was idle.
pub(super) struct UpstreamConnectionFailed<'a> {
    pub(super) error: &'a hyper::Error,
}

impl UpstreamConnectionFailed<'_> {
    pub(super) fn emit(self) {
        tracing::debug!(error = %self.error, "a connection to the AI upstream failed");
    }
}

/// A WebSocket tunnel ended with an I/O error.
pub(super) struct TunnelFailed<'a> {
    pub(super) error: &'a std::io::Error,
}

impl TunnelFailed<'_> {
    pub(super) fn emit(self) {
        tracing::debug!(error = %self.error, "a WebSocket tunnel failed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::log_capture::capture;

    #[test]
    fn a_failed_call_is_counted_and_logged() {
        let metrics = GatewayMetrics::default();
        let lines = capture(|| AiCallFailed { error: &GatewayError::TimedOut }.emit(&metrics));
        assert!(lines.contains("AI call failed") && lines.contains("did not answer in time"), "{lines}");
        assert_eq!(metrics.calls("timed_out"), 1);
    }
}
