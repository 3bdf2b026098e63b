//! Redis in front of Postgres: scripts that decide, and the stores that call them.
//!
//! Redis is fast and may forget. What it hands out was taken in Postgres before, so nothing it loses, keeps too long
//! or brings back from an old snapshot lets anybody past a limit. While it does not answer, Postgres does.

mod client;
mod node;
mod pubsub;
mod quota;
mod request;
mod sale;
mod script;
mod target;
mod tier;

pub use client::Redis;
pub use quota::RedisQuota;
pub use request::RedisRequests;
pub use sale::RedisSales;
pub use target::{Target, TargetError};
pub use tier::RedisLimits;

/// The name in errors, health checks and metrics.
pub const ENGINE: &str = "redis";
