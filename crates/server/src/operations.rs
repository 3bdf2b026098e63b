//! Operations: health, readiness, metrics, audit, dead letters, queues and clocks, for operators and their tools.

pub(crate) mod audit;
pub(crate) mod backlog;
pub(crate) mod clocks;
mod events;
pub(crate) mod health;
pub(crate) mod metrics;
pub(crate) mod readiness;
pub(crate) mod recount;
pub(crate) mod routes;
