//! The conformance suites on Postgres, and tests of what only Postgres does.

mod conformance;
mod deferred;
mod erasure;
mod fixtures;
mod hashing;
mod locked_windows;
mod pack;
mod record_sent;
mod round_trips;
mod save_failures;
mod send_keys;
mod turns;
mod version_before;
