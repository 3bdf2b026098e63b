//! What the process tells about itself: logs and metrics.

pub mod accept;
pub mod delivery;
pub mod gateway;
pub mod logs;
pub mod metrics;
pub mod quiet;
pub mod tier;
pub mod writer;
