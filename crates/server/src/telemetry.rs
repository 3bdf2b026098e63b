//! What the process tells about itself: logs and metrics.

pub(crate) mod accept;
pub(crate) mod delivery;
pub(crate) mod gateway;
pub mod logs;
pub(crate) mod metrics;
pub(crate) mod quiet;
pub(crate) mod tier;
pub mod writer;
