//! Sale: stock, one unit per buyer. HTTP routes, the service behind them, the view of all sales, and their settings,
//! metrics and events.

mod anomalies;
pub(crate) mod challenge;
pub(crate) mod event_ring;
mod events;
pub(crate) mod metrics;
pub(crate) mod page;
pub(crate) mod replayed_purchases;
pub(crate) mod routes;
pub(crate) mod service;
pub(crate) mod settings;
pub(crate) mod view;
