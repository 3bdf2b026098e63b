//! Logs and metrics of the process. Each capability describes its own in its `events` and `metrics`.

pub(crate) mod decisions;
pub(crate) mod labels;
#[cfg(test)]
pub(crate) mod log_capture;
pub(crate) mod log_throttle;
pub mod log_writer;
pub mod logs;
pub(crate) mod metrics;
pub(crate) mod near_limits;
pub(crate) mod request_context;
pub(crate) mod span_export;
