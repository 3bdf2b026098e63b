//! Sends librdkafka's log lines to `tracing` instead of standard error.

use rdkafka::config::RDKafkaLogLevel as Level;

/// Logs a line of librdkafka. Lines about connection attempts, of which there are many, get the level debug: publisher and
/// source log once when brokers become unreachable and when they return.
pub(super) fn line(level: Level, facility: &str, line: &str) {
    let attempt = matches!(facility, "FAIL" | "ERROR" | "REQTMOUT" | "MAXPOLL");
    match level {
        Level::Emerg | Level::Alert | Level::Critical => {
            tracing::error!(target: "weir::kafka", facility, "{line}");
        }
        Level::Error | Level::Warning if !attempt => {
            tracing::warn!(target: "weir::kafka", facility, "{line}")
        }
        Level::Debug => tracing::trace!(target: "weir::kafka", facility, "{line}"),
        _ => tracing::debug!(target: "weir::kafka", facility, "{line}"),
    }
}
