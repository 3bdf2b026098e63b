//! The conformance suites on Postgres, and what only Postgres does.

mod conformance;
mod fixtures;
mod locked_windows;
mod pack;
mod put_off;
mod round_trips;
mod uncommitted;
