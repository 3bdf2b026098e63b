//! The conformance suites on SQLite, and what a crash leaves.

mod conformance;
mod crash;
mod fixtures;
