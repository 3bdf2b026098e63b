//! Workers on the embedded engine, against downstreams that do what downstreams do.

mod away;
mod breaker;
mod brokered;
mod given;
mod lost;
mod outcomes;
mod told;
