//! Slot: payments per time window. HTTP routes, the service behind them, the dispatcher of due slots, the deletion of
//! old ones, and their settings, metrics and events.

pub(crate) mod dispatcher;
mod events;
pub(crate) mod metrics;
pub(crate) mod retention;
pub(crate) mod routes;
pub(crate) mod service;
pub(crate) mod settings;
