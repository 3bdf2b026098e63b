//! Tier: AI calls per plan, and limits for anyone under a policy. Routes, the service behind them, and settings.

pub(crate) mod metrics;
pub(crate) mod routes;
pub(crate) mod service;
pub(crate) mod settings;
