//! Sale: stock, one unit per buyer. Routes, the service behind them, the view of all sales, and settings.

pub(crate) mod challenge;
pub(crate) mod events_ring;
pub(crate) mod metrics;
pub(crate) mod purchase_worker;
pub(crate) mod routes;
pub(crate) mod service;
pub(crate) mod settings;
pub(crate) mod view;
