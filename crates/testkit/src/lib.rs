//! Infrastructure of Weir's tests: a real PostgreSQL, Redis, Kafka and Envoy, a faulty TCP proxy, the `weir` binary as a child
//! process, a small HTTP client, one way to wait and one way to count responses.
//!
//! Failures panic with a message that says what to do, for the reader of a failed test. No process started here outlives the
//! test process, even if that is killed (see `watchdog`).

pub mod clock;
pub mod envoy;
pub mod http;
pub mod https;
pub mod kafka;
pub mod key_server;
pub mod otlp;
pub mod ports;
pub mod postgres;
pub mod process;
pub mod proxy;
pub mod raw_connection;
pub mod redis;
pub mod stack;
pub mod status_counts;
pub mod tls;
pub mod wait;

mod apt;
pub mod certificates;
mod daemon;
mod discover;
mod docker;
mod instance;
mod nginx;
mod promtool;
mod python;
mod signal;
mod watchdog;

pub use self::nginx::nginx;
pub use self::promtool::promtool;
pub use self::python::python_with_grpc;

/// Whether the comma-separated `WEIR_TEST_SKIP` names `suite`. A suite is never skipped for another reason: without its
/// engine its tests fail, so that "all green" means that all of them ran.
pub fn skip(suite: &str) -> bool {
    let skipped = names(&std::env::var("WEIR_TEST_SKIP").unwrap_or_default(), suite);
    if skipped {
        eprintln!("SKIPPED by WEIR_TEST_SKIP: {suite}");
    }
    skipped
}

fn names(list: &str, suite: &str) -> bool {
    list.split(',').any(|name| name.trim() == suite)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_named_suite_is_skipped() {
        assert!(names("redis, postgres", "postgres"));
        assert!(!names("postgres-tls", "postgres"));
        assert!(!names("", "postgres"));
    }
}
