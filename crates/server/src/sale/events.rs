//! What can happen while units are sold: each event writes its log line and updates its metric.

use std::net::IpAddr;

use weir_core::UserId;
use weir_store::Error;

use super::metrics::SaleMetrics;

/// The verifier is not sure that a buyer is a person. The buyer may continue.
pub(super) struct BuyerFlagged<'a> {
    pub(super) buyer: &'a UserId,
    pub(super) address: IpAddr,
}

impl BuyerFlagged<'_> {
    pub(super) fn emit(self, metrics: &SaleMetrics) {
        tracing::info!(userId = %self.buyer, address = %self.address, "a buyer with a low challenge score was let through");
        metrics.record_challenge("flagged");
    }
}

/// Replayed purchases could not be saved. Logged once per outage.
pub(super) struct PurchaseReplayFailed<'a> {
    pub(super) error: &'a Error,
}

impl PurchaseReplayFailed<'_> {
    pub(super) fn emit(self) {
        tracing::warn!(
            error = %self.error.with_causes(),
            "cannot save replayed purchases; retrying until it succeeds"
        );
    }
}

/// The store could not be polled for event streams. It is polled again shortly.
pub(super) struct RefreshFailed<'a> {
    pub(super) error: &'a Error,
}

impl RefreshFailed<'_> {
    pub(super) fn emit(self) {
        tracing::debug!(error = %self.error.with_causes(), "cannot read sales from the store; retrying");
    }
}

/// A state that is due was published but not saved.
pub(super) struct StateSaveFailed<'a> {
    pub(super) error: &'a Error,
}

impl StateSaveFailed<'_> {
    pub(super) fn emit(self) {
        tracing::warn!(
            error = %self.error.with_causes(),
            "cannot save the new state of a sale; responses show the due state anyway"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::log_capture::capture;

    #[test]
    fn a_flagged_buyer_is_counted_and_logged() {
        let (metrics, buyer) = (SaleMetrics::default(), UserId::parse("alice").unwrap());
        let event = BuyerFlagged { buyer: &buyer, address: IpAddr::from([192, 0, 2, 1]) };
        let line = capture(|| event.emit(&metrics));
        assert_eq!(metrics.challenge_count("flagged"), 1);
        assert!(line.contains("userId=alice") && line.contains("192.0.2.1"), "{line}");
    }
}
