//! Metrics of an embedded engine's writer thread.

use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::histogram::Histogram;

/// A job that holds the writer for longer counts as a long turn.
pub const TURN_MAX: Duration = Duration::from_millis(50);

/// Bucket bounds in seconds. One of them is [`TURN_MAX`].
const BUCKETS: [f64; 15] =
    [0.000_1, 0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0];

/// Clones share the same metrics.
#[derive(Clone, Debug)]
pub struct WriterMetrics {
    /// How long each turn of a job held the writer, in seconds.
    pub turn_seconds: Histogram,
    /// Turns longer than [`TURN_MAX`].
    pub long_turns: Counter,
    /// How long each commit took, in seconds.
    pub commit_seconds: Histogram,
}

impl Default for WriterMetrics {
    fn default() -> Self {
        Self {
            turn_seconds: Histogram::new(BUCKETS),
            long_turns: Counter::default(),
            commit_seconds: Histogram::new(BUCKETS),
        }
    }
}

impl WriterMetrics {
    /// Records how long one turn of a job held the writer.
    pub fn record_turn(&self, held: Duration) {
        self.turn_seconds.observe(held.as_secs_f64());
        if held > TURN_MAX {
            self.long_turns.inc();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_above_the_maximum_are_counted() {
        let metrics = WriterMetrics::default();
        metrics.record_turn(TURN_MAX);
        assert_eq!(metrics.long_turns.get(), 0);
        metrics.record_turn(TURN_MAX + Duration::from_micros(1));
        assert_eq!(metrics.long_turns.get(), 1);
    }
}
