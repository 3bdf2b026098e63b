//! Redis in front of Postgres: Lua scripts that decide, and the stores that call them.
//!
//! Redis is fast but may lose data. Quota that it hands out was reserved in Postgres before, so a key that it loses, keeps
//! too long or restores from an old snapshot lets nobody exceed a limit. While Redis is unavailable, Postgres decides.

mod client;
mod node;
mod pubsub;
mod quota;
mod request;
mod sale;
mod script;
mod target;
mod tier;

pub use client::{Redis, SLOW_SCRIPT, ScriptCounts};
pub use quota::{QuotaTimes, RedisQuota};
pub use request::RedisRequests;
pub use sale::{RedisAttempts, RedisSales};
pub use target::{RedisTarget, RedisTargetError};
pub use tier::RedisLimits;

/// The name of this engine in errors, health checks and metrics.
pub const ENGINE: &str = "redis";
