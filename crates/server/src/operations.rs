//! What operators ask of a server: health, readiness, metrics, the audit, dead letters, queues, and its clocks.

pub(crate) mod audit;
pub(crate) mod clocks;
pub(crate) mod health;
pub(crate) mod readiness;
pub(crate) mod routes;
