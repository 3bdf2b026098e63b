//! The conformance suites on Postgres.

mod conformance;
mod request;
mod sale;
mod slot;
mod tier;
