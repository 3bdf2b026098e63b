//! Request: accepts work under idempotency keys and calls downstreams for it.

pub(crate) mod encryption;
mod events;
pub(crate) mod metrics;
pub(crate) mod routes;
pub(crate) mod service;
pub(crate) mod settings;
mod trace;
pub(crate) mod work;
