//! What librdkafka has to say goes to `tracing`, not to standard error.

use rdkafka::config::RDKafkaLogLevel as Level;

/// Logs a line of librdkafka's. It tells of every attempt to connect; that brokers are gone, and back, is told once by
/// whoever uses the client, so those lines are for debugging.
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
