//! Limits in the memory of one process: one cache line per key, behind many small locks.
//!
//! [`Memory`] stores what each key has spent of a rule from `weir_core::tier`. A decision locks one shard, finds one
//! entry of 64 bytes, applies the rule and writes the entry back. A key that has spent nothing needs no entry, so
//! entries that have regained everything are dropped, a few at a time. Callers pass the time.
//!
//! [`Memory::changes`] returns what changed since the last call, and [`Memory::restore`] puts it back.
//! [`LocalLimiter`] uses both: it implements the store trait that services use, and saves changes to a store.

mod changes;
mod hash;
mod id;
mod journal;
mod key_throttle;
mod local_limiter;
mod memory;
mod multi_key;
mod shard;

pub use changes::{KeyChange, KeyChanges};
pub use id::Id;
pub use journal::FLUSH_EVERY;
pub use key_throttle::KeyThrottle;
pub use local_limiter::LocalLimiter;
pub use memory::{KeyOutcome, Memory, MemoryFull, MemoryOptions};
pub use multi_key::{KeyRequest, MultiKeyOutcome};
