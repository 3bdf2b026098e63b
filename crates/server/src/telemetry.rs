//! What the process tells about itself: logs and metrics.

pub(crate) mod gateway;
pub(crate) mod log_throttle;
pub mod log_writer;
pub mod logs;
pub(crate) mod metrics;
pub(crate) mod request_intake;
pub(crate) mod tier;
