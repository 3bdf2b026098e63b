//! What the process tells about itself: logs and metrics.

pub(crate) mod labels;
pub(crate) mod log_throttle;
pub mod log_writer;
pub mod logs;
pub(crate) mod metrics;
