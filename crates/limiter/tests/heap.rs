//! Measures the memory per user by counting heap allocations.
#![expect(clippy::unwrap_used, reason = "a test may panic; it then fails")]

use std::alloc::System;
use std::sync::Arc;

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use weir_core::Timestamp;
use weir_core::tier::{Plan, ScopedRule};
use weir_limiter::{Memory, MemoryOptions};

#[global_allocator]
static HEAP: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const NOW: Timestamp = Timestamp::from_seconds(1_700_000_000);
/// The most bytes a user may need beyond its id, with both buckets of its tier.
const BYTES_MAX: f64 = 96.0;

fn allocated() -> isize {
    let stats = HEAP.stats();
    stats.bytes_allocated.cast_signed() - stats.bytes_deallocated.cast_signed()
}

/// Adds users, then removes most of them, and returns the highest number of bytes per user beyond its id.
fn most_bytes_beyond_id(tracks_changes: bool, id: impl Fn(usize) -> String) -> f64 {
    let policy = Arc::new(ScopedRule { scope: 0, rule: Plan::Free.tier().defaults().rule() });
    let before = allocated();
    let memory = Memory::new(MemoryOptions { shards: 64, tracks_changes, ..MemoryOptions::default() });
    let mut most = 0.0_f64;
    let mut measure = |users: usize, length: usize| {
        if users >= 20_000 && users.is_multiple_of(200) {
            most = most.max((allocated() - before) as f64 / users as f64 - length as f64);
        }
    };
    for number in 0..120_000 {
        let length = {
            let id = id(number);
            memory.take(&policy, &id, 1, NOW).unwrap();
            id.len()
        };
        measure(number + 1, length);
    }
    for number in 0..if tracks_changes { 0 } else { 100_000 } {
        let length = {
            let id = id(number);
            assert!(memory.forget(&policy, &id));
            id.len()
        };
        measure(120_000 - number - 1, length);
    }
    most
}

// One test, because all tests share the heap that is counted.
#[test]
fn a_user_costs_at_most_96_bytes_beyond_its_id_at_any_number_of_users() {
    let uuid = |number| format!("0190c3a0-7b1e-7000-8000-{number:012x}");
    let all = [
        most_bytes_beyond_id(false, |number| format!("user{number:06}@a.bc")),
        most_bytes_beyond_id(false, uuid),
        most_bytes_beyond_id(false, |number| format!("{number:0255}")),
        most_bytes_beyond_id(true, uuid),
    ];
    assert!(all.iter().all(|most| *most <= BYTES_MAX), "{all:.1?} bytes a user");
    assert!(all.iter().all(|most| *most > 40.0), "{all:.1?} bytes a user: something was not counted");
    eprintln!("bytes a user beyond its id, at most: {all:.1?}");
}
