//! Slot: payments per time window. Routes, the service behind them, the dispatcher of due slots, and settings.

pub(crate) mod dispatcher;
pub(crate) mod metrics;
pub(crate) mod routes;
pub(crate) mod service;
pub(crate) mod settings;
