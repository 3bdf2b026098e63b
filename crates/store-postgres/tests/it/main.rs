//! The conformance suites on Postgres.

mod conformance;
mod pack;
mod request;
mod sale;
mod slot;
mod tier;
