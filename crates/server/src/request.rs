//! Request: downstream calls, once per key. Routes, the service behind them, the work on requests, and settings.

pub(crate) mod encryption;
pub(crate) mod metrics;
pub(crate) mod routes;
pub(crate) mod service;
pub(crate) mod settings;
pub(crate) mod work;
