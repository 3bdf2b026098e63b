//! Kafka's part of the seam, against the mock brokers that come with librdkafka.
#![expect(clippy::unwrap_used, reason = "a test that finds nothing where something must be fails")]

mod cluster;
mod publisher;
mod rate;
mod source;
