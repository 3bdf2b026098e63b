//! Workers on the embedded engine, against downstreams that do what downstreams do.

mod breaker;
mod brokered;
mod fixtures;
mod limits;
mod lost_lease;
mod outcomes;
mod store_outage;
mod turns;
mod webhooks;
