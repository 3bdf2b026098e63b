//! Quota: messages per user and window. HTTP routes, the service behind them, the sender that delivers messages, and
//! their settings, metrics and events.

mod events;
pub(crate) mod maintenance;
pub(crate) mod metrics;
pub(crate) mod provider;
pub(crate) mod routes;
pub(crate) mod send_keys;
pub(crate) mod sender;
pub(crate) mod service;
pub(crate) mod settings;
mod sms_log;
