//! The interface between Weir's rules and the engines that store state.
//!
//! Each capability is a module: its commands, its outcomes and the trait that engines implement. Frequent operations take
//! a batch, and [`Lanes`] turn concurrent single calls into batches. Engines load, lock and save rows; `weir-core`
//! decides what happens to them.

pub mod book;
pub mod bounded_cache;
pub mod clock;
pub mod denial_cache;
pub mod engine_calls;
pub mod error;
pub mod health;
pub mod lane;
pub mod limit_changes;
pub mod quota;
pub mod request;
pub mod sale;
pub mod shard;
pub mod slot;
pub mod spans;
pub mod throttle;
pub mod tier;
pub mod writer_metrics;

pub use bounded_cache::BoundedCache;
pub use clock::{SteadyClock, StoreClock, SystemClock};
pub use error::Error;
pub use health::StoreHealth;
pub use lane::{Batch, LaneMetrics, LaneSettings, Lanes};

/// The result of a store operation. `Err` means that something broke; a refusal is an outcome, not an error.
pub type Result<T, E = Error> = std::result::Result<T, E>;
