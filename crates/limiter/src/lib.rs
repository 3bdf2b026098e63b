//! Limits kept in the memory of one process: who has spent what, a cache line each, behind many small locks.
//!
//! [`Memory`] holds what each key has spent of a rule from `weir_core::tier`. A decision locks one shard, finds one entry
//! of 64 bytes, asks the rule, and writes the entry back. A key that has spent nothing needs no entry, so entries that
//! have become as good as new are dropped, a few at a time. Time comes from the caller.
//!
//! [`Memory::changes`] hands out what changed since it was last asked, and [`Memory::restore`] takes it back in. [`LocalLimiter`]
//! does both: it puts the memory behind the seam that services use, and has a store keep what changes.

mod changes;
mod hash;
mod id;
mod journal;
mod key_throttle;
mod local_limiter;
mod memory;
mod multi_key;
mod shard;

pub use changes::{Change, Changes};
pub use id::Id;
pub use journal::FLUSH_EVERY;
pub use key_throttle::KeyThrottle;
pub use local_limiter::LocalLimiter;
pub use memory::{Full, Memory, Options, Policy, Taken};
pub use multi_key::{TakenAll, Want};
