//! The conformance suites on Postgres.

mod conformance;
mod pack;
mod put_off;
mod request;
mod round_trips;
mod sale;
mod slot;
mod tier;
