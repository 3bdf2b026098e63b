//! What capabilities have in common for the console: totals of their decisions, and the latency of their routes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The names of the capabilities, in the order of everything here.
pub(crate) const CAPABILITIES: [&str; 5] = ["quota", "slot", "request", "tier", "sale"];
/// How many buckets a latency is counted in.
pub(crate) const BUCKETS: usize = 20;
/// The upper edge of the first bucket, in microseconds. Each bucket is twice as wide as the one before; the last has no edge.
const FIRST_EDGE_US: u64 = 50;

/// Decisions since the start of the process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DecisionTotals {
    pub(crate) allowed: u64,
    /// Refused by a rule: over the limit, sold out, a conflict.
    pub(crate) denied: u64,
    /// Not decided, because something did not work.
    pub(crate) failed: u64,
}

/// Numbers of calls by their latency.
pub(crate) type LatencyCounts = [u64; BUCKETS];

/// The latency of the calls of each capability, counted in buckets.
#[derive(Debug, Default)]
pub(crate) struct CapabilityLatency {
    counts: [[AtomicU64; BUCKETS]; CAPABILITIES.len()],
}

impl CapabilityLatency {
    /// Counts a call, if its route decides something.
    pub(crate) fn record(&self, route: &str, took: Duration) {
        let Some(counts) = capability_of(route).and_then(|at| self.counts.get(at)) else { return };
        if let Some(count) = counts.get(bucket_of(took)) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn counts(&self) -> [LatencyCounts; CAPABILITIES.len()] {
        self.counts.each_ref().map(|counts| counts.each_ref().map(|count| count.load(Ordering::Relaxed)))
    }
}

/// The capability whose decisions a route asks for; `None` for operators' routes, pages, event streams and reads.
pub(crate) fn capability_of(route: &str) -> Option<usize> {
    Some(match route {
        "/api/send" => 0,
        "/api/v1/slots" => 1,
        "/v1/requests" => 2,
        "/v1/check" | "/v1/hold" | "/v1/settle" | "/v1/release" | "/v1/refund" => 3,
        "/api/v1/purchases" => 4,
        _ => return None,
    })
}

fn bucket_of(took: Duration) -> usize {
    let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
    let edges = micros.div_ceil(FIRST_EDGE_US).max(1);
    // The first bucket whose edge is not below: the logarithm of the number of first edges, rounded up.
    let bucket = edges.next_power_of_two().trailing_zeros();
    usize::try_from(bucket).unwrap_or(BUCKETS).min(BUCKETS - 1)
}

/// The latency in microseconds that a share of the calls did not exceed, at the upper edge of its bucket; 0 without calls.
pub(crate) fn quantile_us(counts: &LatencyCounts, share_percent: u64) -> u64 {
    let total: u64 = counts.iter().sum();
    if total == 0 {
        return 0;
    }
    let wanted = (total * share_percent).div_ceil(100).max(1);
    let mut passed = 0;
    let bucket = counts.iter().position(|count| {
        passed += count;
        passed >= wanted
    });
    FIRST_EDGE_US << bucket.unwrap_or(BUCKETS - 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_latency_is_in_the_first_bucket_whose_edge_is_not_below_it() {
        for (micros, bucket) in [(0, 0), (50, 0), (51, 1), (100, 1), (101, 2), (200, 2), (201, 3)] {
            assert_eq!(bucket_of(Duration::from_micros(micros)), bucket, "{micros} µs");
        }
        assert_eq!(bucket_of(Duration::MAX), BUCKETS - 1);
    }

    #[test]
    fn only_routes_that_decide_are_counted() {
        let latency = CapabilityLatency::default();
        for route in ["/api/send", "/v1/check", "/admin/live", "/api/v1/sales/events", "unmatched"] {
            latency.record(route, Duration::from_millis(1));
        }
        let totals = latency.counts().map(|counts| counts.iter().sum::<u64>());
        assert_eq!(totals, [1, 0, 0, 1, 0]);
    }

    proptest! {
        /// Against the sorted list of all latencies.
        #[test]
        fn a_quantile_is_the_edge_of_the_bucket_of_that_call(
            micros in proptest::collection::vec(0_u64..5_000_000, 1..200),
            share in 1_u64..=100,
        ) {
            let mut counts = LatencyCounts::default();
            for micros in &micros {
                counts[bucket_of(Duration::from_micros(*micros))] += 1;
            }
            let mut sorted = micros;
            sorted.sort_unstable();
            let rank = (sorted.len() as u64 * share).div_ceil(100).max(1);
            let exact = sorted[usize::try_from(rank - 1).unwrap()];
            let shown = quantile_us(&counts, share);
            prop_assert!(shown >= exact, "{shown} is below {exact}");
            prop_assert!(shown <= (exact * 2).max(FIRST_EDGE_US), "{shown} is far above {exact}");
        }
    }
}
