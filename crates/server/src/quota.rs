//! Quota: messages per user and window. Routes, the service behind them, the sender that delivers, and settings.

pub(crate) mod metrics;
pub(crate) mod routes;
pub(crate) mod sender;
pub(crate) mod service;
pub(crate) mod settings;
pub(crate) mod sms_log;
