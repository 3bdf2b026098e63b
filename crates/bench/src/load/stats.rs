//! The counts of one connection, and how those of several are merged.

use std::time::Duration;

use hdrhistogram::Histogram;

use crate::report::{ErrorCounts, LatencyMs};

/// The histogram has latencies from one microsecond to this, to three digits; longer ones count as this.
const LATENCY_LIMIT_US: u64 = 120_000_000;

/// Why a request got no response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Failure {
    #[error("no connection could be made")]
    Connect,
    #[error("the connection ended before the answer did")]
    Reset,
    #[error("no complete answer came within the limit")]
    Timeout,
    #[error("what came back was not an HTTP/1.1 response")]
    Protocol,
}

#[derive(Debug)]
pub(super) struct Stats {
    latency_us: Histogram<u64>,
    /// Few statuses occur, mostly one: scanning beats a map.
    statuses: Vec<(u16, u64)>,
    errors: ErrorCounts,
}

impl Stats {
    pub(super) fn new() -> Self {
        let latency_us = Histogram::new_with_max(LATENCY_LIMIT_US, 3).expect("constant bounds are valid");
        Self { latency_us, statuses: Vec::new(), errors: ErrorCounts::default() }
    }

    pub(super) fn answered(&mut self, status: u16, latency: Duration) {
        let micros = u64::try_from(latency.as_micros()).unwrap_or(u64::MAX);
        self.latency_us.saturating_record(micros.max(1));
        self.count(status, 1);
    }

    pub(super) fn failed(&mut self, failure: Failure) {
        let count = match failure {
            Failure::Connect => &mut self.errors.connect,
            Failure::Reset => &mut self.errors.reset,
            Failure::Timeout => &mut self.errors.timeout,
            Failure::Protocol => &mut self.errors.protocol,
        };
        *count += 1;
    }

    pub(super) fn merge(&mut self, other: &Self) {
        // Equal bounds on both sides, so the addition cannot fail.
        let added = self.latency_us.add(&other.latency_us);
        debug_assert!(added.is_ok());
        for (status, count) in &other.statuses {
            self.count(*status, *count);
        }
        self.errors.add(&other.errors);
    }

    pub(super) fn requests(&self) -> u64 {
        self.latency_us.len()
    }

    pub(super) fn statuses(&self) -> &[(u16, u64)] {
        &self.statuses
    }

    pub(super) fn errors(&self) -> &ErrorCounts {
        &self.errors
    }

    pub(super) fn latency_ms(&self) -> LatencyMs {
        let at = |quantile| self.latency_us.value_at_quantile(quantile) as f64 / 1000.0;
        let max = self.latency_us.max() as f64 / 1000.0;
        // A percentile is the upper edge of its bucket, which may be above the largest value recorded.
        LatencyMs {
            p50: at(0.5).min(max),
            p90: at(0.9).min(max),
            p95: at(0.95).min(max),
            p99: at(0.99).min(max),
            p999: at(0.999).min(max),
            max,
        }
    }

    fn count(&mut self, status: u16, count: u64) {
        match self.statuses.iter_mut().find(|(known, _)| *known == status) {
            Some((_, total)) => *total += count,
            None => self.statuses.push((status, count)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merging_keeps_every_request_status_and_error() {
        let (mut low, mut high) = (Stats::new(), Stats::new());
        (1..=900).for_each(|ms| low.answered(200, Duration::from_millis(ms)));
        (901..=1000).for_each(|ms| high.answered(429, Duration::from_millis(ms)));
        high.answered(200, Duration::from_millis(1));
        low.failed(Failure::Reset);
        high.failed(Failure::Reset);
        high.failed(Failure::Timeout);
        low.merge(&high);
        assert_eq!(low.requests(), 1001);
        assert_eq!(low.statuses(), [(200, 901), (429, 100)]);
        assert_eq!(*low.errors(), ErrorCounts { reset: 2, timeout: 1, ..ErrorCounts::default() });
        let latency = low.latency_ms();
        for (value, expected) in [(latency.p50, 500.0), (latency.p90, 900.0), (latency.p99, 990.0)] {
            assert!((value - expected).abs() / expected < 0.003, "{value} for {expected}");
        }
        assert!(latency.p999 <= latency.max && (latency.max - 1000.0).abs() < 1.0);
    }

    #[test]
    fn latencies_outside_the_range_count_as_its_edges() {
        let mut stats = Stats::new();
        stats.answered(200, Duration::ZERO);
        stats.answered(200, Duration::from_secs(100_000));
        assert_eq!(stats.requests(), 2);
        assert!(stats.latency_ms().max >= 120_000.0);
    }

    #[test]
    fn percentiles_of_no_measurement_are_zero() {
        assert_eq!(Stats::new().requests(), 0);
        assert_eq!(Stats::new().latency_ms(), LatencyMs::default());
    }
}
