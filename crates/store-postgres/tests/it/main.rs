//! The conformance suites on Postgres, and tests of what only Postgres does.

mod conformance;
mod deferred;
mod fixtures;
mod locked_windows;
mod pack;
mod round_trips;
mod save_failures;
mod version_before;
