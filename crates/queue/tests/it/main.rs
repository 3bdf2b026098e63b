//! The Kafka publisher and source, tested with librdkafka's mock brokers; groups of several sources with a real broker.
#![expect(clippy::unwrap_used, reason = "a test fails if a value it needs is missing")]

mod cluster;
mod group;
mod publisher;
mod rate;
mod source;
