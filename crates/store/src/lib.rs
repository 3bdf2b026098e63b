//! The seam between Weir's rules and the engines that hold state.
//!
//! A capability is a module here: its commands, its outcomes and the trait an engine implements. Hot operations take
//! a batch, and [`Lanes`] turn concurrent single calls into batches. How rows are loaded, locked and saved is left to
//! the engines; what is decided about them is left to `weir-core`.

pub mod bounded_cache;
pub mod clock;
pub mod denial_cache;
pub mod error;
pub mod health;
pub mod lane;
pub mod limit_changes;
pub mod quota;
pub mod request;
pub mod sale;
pub mod shard;
pub mod slot;
pub mod throttle;
pub mod tier;
pub mod writer_metrics;

pub use bounded_cache::BoundedCache;
pub use clock::{SteadyClock, StoreClock, SystemClock};
pub use error::Error;
pub use health::StoreHealth;
pub use lane::{Batch, LaneMetrics, LaneSettings, Lanes};

/// What every store operation returns: `Err` means that something broke, never that something was refused.
pub type Result<T, E = Error> = std::result::Result<T, E>;
