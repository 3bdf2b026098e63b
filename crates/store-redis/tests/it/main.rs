//! The conformance suites with Redis, and what only Redis can do.

mod conformance;
mod fixtures;
mod request;
mod sale;
mod sale_cluster;
mod tier;
