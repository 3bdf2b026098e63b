//! The Kafka publisher and source, tested with librdkafka's mock brokers.
#![expect(clippy::unwrap_used, reason = "a test fails if a value it needs is missing")]

mod cluster;
mod publisher;
mod rate;
mod source;
