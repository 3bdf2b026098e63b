//! Workers on the embedded engine, against downstreams that do what downstreams do.

mod breaker;
mod given;
mod lost;
mod outcomes;
mod told;
