//! The conformance suites with Redis, and tests of what only Redis does.

mod attempts;
mod conformance;
mod fixtures;
mod quota;
mod quota_together;
mod request;
mod sale;
mod sale_cluster;
mod tier;
