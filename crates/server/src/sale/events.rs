//! What operators change about sales, and what can happen while units are sold: each event writes its log line and updates
//! its metric.

use std::net::IpAddr;
use std::time::Duration;

use weir_core::UserId;
use weir_core::sale::anomaly::{Anomaly, Attempt};
use weir_core::sale::{Sku, Terms};
use weir_queue::rfc3339;
use weir_store::Error;
use weir_store::sale::Product;

use super::metrics::SaleMetrics;
use crate::telemetry::log_throttle::LogThrottle;
use crate::telemetry::request_context::LogIds;

/// An operator created a product.
pub(super) struct ProductCreated<'a> {
    pub(super) product: &'a Product,
}

impl ProductCreated<'_> {
    pub(super) fn emit(self) {
        let ids = LogIds::current();
        let Terms { product_name, initial_stock, start, end } = &self.product.sale.terms;
        tracing::info!(
            httpRequestId = ids.http_request_id(),
            traceId = ids.trace_id(),
            callerScope = ids.caller_scope(),
            tenantId = ids.caller_tenant(),
            sku = %self.product.sku,
            productName = &**product_name,
            initialStock = initial_stock.get(),
            startTime = %rfc3339(*start),
            endTime = %rfc3339(*end),
            "a product was created"
        );
    }
}

/// An operator changed a product.
pub(super) struct ProductChanged<'a> {
    pub(super) product: &'a Product,
    /// The product as it was read just before.
    pub(super) before: Option<&'a Product>,
}

impl ProductChanged<'_> {
    pub(super) fn emit(self) {
        let ids = LogIds::current();
        let Terms { product_name, initial_stock, start, end } = &self.product.sale.terms;
        tracing::info!(
            httpRequestId = ids.http_request_id(),
            traceId = ids.trace_id(),
            callerScope = ids.caller_scope(),
            tenantId = ids.caller_tenant(),
            sku = %self.product.sku,
            productName = &**product_name,
            initialStock = initial_stock.get(),
            startTime = %rfc3339(*start),
            endTime = %rfc3339(*end),
            before = self.before.map(describe),
            "a product was changed"
        );
    }
}

/// An operator ended a sale before its time.
pub(super) struct SaleEnded<'a> {
    pub(super) product: &'a Product,
}

impl SaleEnded<'_> {
    pub(super) fn emit(self) {
        let ids = LogIds::current();
        tracing::info!(
            httpRequestId = ids.http_request_id(),
            traceId = ids.trace_id(),
            callerScope = ids.caller_scope(),
            tenantId = ids.caller_tenant(),
            sku = %self.product.sku,
            sold = self.product.sale.sold,
            stock = self.product.sale.stock(),
            "an operator ended a sale"
        );
    }
}

/// An operator moved the end of a sale to a later time.
pub(super) struct SaleExtended<'a> {
    pub(super) product: &'a Product,
    /// The product as it was read just before.
    pub(super) before: Option<&'a Product>,
}

impl SaleExtended<'_> {
    pub(super) fn emit(self) {
        let ids = LogIds::current();
        tracing::info!(
            httpRequestId = ids.http_request_id(),
            traceId = ids.trace_id(),
            callerScope = ids.caller_scope(),
            tenantId = ids.caller_tenant(),
            sku = %self.product.sku,
            endTime = %rfc3339(self.product.sale.terms.end),
            before = self.before.map(describe),
            "an operator extended a sale"
        );
    }
}

/// An operator removed a product with its purchases.
pub(super) struct ProductDeleted<'a> {
    pub(super) sku: &'a Sku,
    pub(super) before: Option<&'a Product>,
}

impl ProductDeleted<'_> {
    pub(super) fn emit(self) {
        let ids = LogIds::current();
        tracing::info!(
            httpRequestId = ids.http_request_id(),
            traceId = ids.trace_id(),
            callerScope = ids.caller_scope(),
            tenantId = ids.caller_tenant(),
            sku = %self.sku,
            before = self.before.map(describe),
            "a product was deleted"
        );
    }
}

fn describe(product: &Product) -> String {
    let Terms { product_name, initial_stock, start, end } = &product.sale.terms;
    let (stock, start, end) = (initial_stock.get(), rfc3339(*start), rfc3339(*end));
    format!("productName={product_name:?} initialStock={stock} startTime={start} endTime={end}")
}

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

/// Attempts to buy show a pattern that people do not.
pub(super) struct AnomalyFound<'a> {
    pub(super) anomaly: &'a Anomaly,
}

impl AnomalyFound<'_> {
    pub(super) fn emit(self, metrics: &SaleMetrics) {
        static LINES: LogThrottle = LogThrottle::new();
        let Anomaly { pattern, key, sku, count, first_seen, .. } = self.anomaly;
        metrics.record_anomaly(*pattern);
        if let Some(suppressed) = LINES.permit() {
            tracing::warn!(
                pattern = pattern.as_str(),
                key = &**key,
                %sku,
                count,
                firstSeen = %rfc3339(*first_seen),
                suppressed,
                "attempts to buy do not look like people's; GET /admin/sale/anomalies lists what was found"
            );
        }
    }
}

/// Somebody tried to buy. Written if `sale.log_attempts` is on.
pub(crate) struct PurchaseAttempted<'a> {
    pub(crate) attempt: &'a Attempt<'a>,
    /// `BOUGHT`, or the code of the error.
    pub(crate) outcome: &'static str,
    pub(crate) took: Duration,
}

impl PurchaseAttempted<'_> {
    pub(crate) fn emit(self) {
        let ids = LogIds::current();
        let Attempt { sku, user, address, agent } = self.attempt;
        tracing::info!(
            httpRequestId = ids.http_request_id(),
            traceId = ids.trace_id(),
            %sku,
            userId = %user,
            %address,
            userAgent = agent,
            outcome = self.outcome,
            micros = u64::try_from(self.took.as_micros()).unwrap_or(u64::MAX),
            "an attempt to buy"
        );
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

/// Events could not be appended to the log that servers share. They are appended shortly after, when Redis answers.
pub(super) struct PublishFailed<'a> {
    pub(super) error: &'a Error,
}

impl PublishFailed<'_> {
    pub(super) fn emit(self) {
        tracing::debug!(error = %self.error.with_causes(), "cannot publish events of sales in Redis; retrying");
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
