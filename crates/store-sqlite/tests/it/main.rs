//! The conformance suites on SQLite, and crashes.

mod conformance;
mod crash;
mod fixtures;
