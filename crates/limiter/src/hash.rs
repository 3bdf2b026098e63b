//! Hashes of keys, seeded anew in every process so that nobody outside can choose keys that collide.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

use foldhash::SharedSeed;
use foldhash::quality::FoldHasher;

/// Where a key belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hash {
    /// Which shard it is in.
    pub(crate) shard: usize,
    /// Whereabouts in the shard: a share of the row, in parts of 2³².
    pub(crate) place: u32,
}

/// The secret of one memory.
pub(crate) struct Seeds {
    own: u64,
    shared: SharedSeed,
}

impl Seeds {
    /// Seeds from the operating system's randomness, which the standard library's hasher draws on.
    pub(crate) fn random() -> Self {
        let draw = || RandomState::new().build_hasher().finish();
        Self { own: draw(), shared: SharedSeed::from_u64(draw()) }
    }

    /// The hash of a key, for so many shards: a power of two.
    pub(crate) fn hash(&self, scope: u32, id: &str, shards: usize) -> Hash {
        let mut hasher = FoldHasher::with_seed(self.own, &self.shared);
        hasher.write_u32(scope);
        hasher.write(id.as_bytes());
        let bits = hasher.finish();
        Hash { shard: (bits & 0xffff) as usize & (shards - 1), place: (bits >> 32) as u32 }
    }
}
