//! Request: accepts work under idempotency keys and calls downstreams for it.

pub(crate) mod encryption;
mod events;
mod key_command;
pub(crate) mod key_rotation;
pub(crate) mod metrics;
pub(crate) mod routes;
pub(crate) mod service;
pub(crate) mod settings;
mod stored_form;
mod trace;
pub(crate) mod work;
