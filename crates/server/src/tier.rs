//! Tier: limits on AI calls by subscription plan, and on anything else by policy.

mod events;
pub(crate) mod metrics;
pub(crate) mod routes;
pub(crate) mod service;
pub(crate) mod settings;
