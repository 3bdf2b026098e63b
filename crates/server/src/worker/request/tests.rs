//! Workers on the embedded engine, against downstreams that do what downstreams do.

mod breaker;
mod brokered;
mod given;
mod lost;
mod outcomes;
mod store_outage;
mod webhooks;
