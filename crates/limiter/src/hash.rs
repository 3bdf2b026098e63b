//! Hashes of keys, seeded randomly in every process so that no caller can choose keys that collide.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

use foldhash::SharedSeed;
use foldhash::quality::FoldHasher;

/// The shard and position of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hash {
    pub(crate) shard: usize,
    /// The position within the shard, as a fraction of the row in units of 2⁻³².
    pub(crate) position: u32,
}

/// The secret seeds of one memory.
pub(crate) struct Seeds {
    own: u64,
    shared: SharedSeed,
}

impl Seeds {
    /// Draws seeds from the operating system, through the standard library's hasher.
    pub(crate) fn random() -> Self {
        let draw = || RandomState::new().build_hasher().finish();
        Self { own: draw(), shared: SharedSeed::from_u64(draw()) }
    }

    /// Hashes a key. `shards` must be a power of two.
    pub(crate) fn hash(&self, scope: u32, id: &str, shards: usize) -> Hash {
        let mut hasher = FoldHasher::with_seed(self.own, &self.shared);
        hasher.write_u32(scope);
        hasher.write(id.as_bytes());
        let bits = hasher.finish();
        Hash { shard: (bits & 0xffff) as usize & (shards - 1), position: (bits >> 32) as u32 }
    }
}
