//! Maps keys to shards. The shard is stored with queue rows and shared by servers of different builds, so the mapping
//! must never change: FNV-1a, written out here, since the standard library may change its hashers.

/// Returns the shard of `key` among `count` shards.
#[must_use]
pub fn of(key: &str, count: u16) -> u16 {
    let hash = key.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    // FNV's low bits mix best over short keys once the high ones are folded in.
    let folded = hash ^ (hash >> 32);
    u16::try_from(folded % u64::from(count.max(1))).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_fixed_for_ever() {
        // Changing these breaks the order of messages that are queued across an upgrade.
        assert_eq!([of("", 16), of("alice", 16), of("bob", 16), of("user-10000", 16)], [1, 12, 13, 10]);
    }

    #[test]
    fn keys_spread_evenly() {
        let mut counts = [0_u32; 16];
        for n in 0..16_000 {
            counts[usize::from(of(&format!("user-{n}"), 16))] += 1;
        }
        assert!(counts.iter().all(|&n| (850..1_150).contains(&n)), "{counts:?}");
    }
}
