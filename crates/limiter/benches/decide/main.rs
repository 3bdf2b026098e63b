//! Measures the cost of a decision in process, compared with `governor` on `DashMap`, and the memory of ten million
//! keys. This file defines the runs and the targets; docs/performance.md explains them.

#![expect(clippy::print_stdout, reason = "prints its tables")]

mod contestants;
mod measure;

use std::time::Instant;

use governor::clock::{DefaultClock, FakeRelativeClock, MonotonicClock};

use crate::contestants::{Bucket, Contestant, Keyed, Tier};
use crate::measure::{Draw, compare, fill, one_read, resident};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// A capacity that denies nothing, refilled so slowly (one token per day) that no key becomes idle.
const AMPLE_CAPACITY: u32 = 100_000;

const GOVERNOR_TARGET: f64 = 1.0;
const MANY_KEYS_TARGET: f64 = 1.5;
const MANY_KEYS_TARGET_MIB: f64 = 2_048.0;

/// A measured value and the most it may be.
struct Target {
    name: String,
    measured: f64,
    most: f64,
    unit: &'static str,
}

fn against_governor(keys: usize, targets: &mut Vec<Target>) {
    let started = Instant::now();
    let with_clock = Keyed::new("governor, its own clock", AMPLE_CAPACITY, DefaultClock::default());
    let with_std_clock = Keyed::new("governor, the standard library's", AMPLE_CAPACITY, MonotonicClock);
    let tier = Tier::new("weir, two buckets, the standard library's", Some(started), AMPLE_CAPACITY);
    let fixed_clock = Keyed::new("governor", AMPLE_CAPACITY, FakeRelativeClock::default());
    let fixed_tier = Tier::new("weir, two buckets", None, AMPLE_CAPACITY);
    let fixed_bucket = Bucket::new(AMPLE_CAPACITY);
    let denying = Keyed::new("governor", 1, FakeRelativeClock::default());
    let denying_tier = Tier::new("weir, two buckets", None, 1);
    let groups: [(&str, Vec<&dyn Contestant>); 3] = [
        ("clock read", vec![&with_clock, &with_std_clock, &tier]),
        ("clock not read", vec![&fixed_clock, &fixed_tier, &fixed_bucket]),
        ("all denied, clock not read", vec![&denying, &denying_tier]),
    ];
    for contestant in groups.iter().flat_map(|(_, group)| group) {
        fill(*contestant, keys);
    }
    for threads in [1, 2] {
        for (mode, group) in &groups {
            let contestants: Vec<_> = group.iter().map(|each| (*each, Draw::evenly(keys))).collect();
            let results = compare(&format!("{keys} keys, {mode}"), threads, &contestants);
            for (contestant, result) in group.iter().zip(results) {
                if contestant.name().starts_with("weir") {
                    let name = format!("{keys} keys, {mode}, {threads} thread(s): {}", contestant.name());
                    let name = format!("{name} / governor");
                    targets.push(Target { name, measured: result.ratio, most: GOVERNOR_TARGET, unit: "×" });
                }
            }
        }
    }
    let hot = Draw::evenly(1);
    compare("1 key, all denied, clock not read", 2, &[(&denying, hot), (&denying_tier, hot)]);
}

/// Fills a contestant and returns the memory it needs, in MiB.
fn fill_measured(contestant: &dyn Contestant, keys: usize) -> f64 {
    let before = resident();
    fill(contestant, keys);
    let [bytes, huge] = [0, 1].map(|at| resident()[at].saturating_sub(before[at]));
    let (each, mib, huge) = (bytes / keys as u64, bytes >> 20, huge >> 20);
    println!(
        "{}: {keys} keys of 16 bytes: {mib} MiB resident ({huge} in huge pages), {each} bytes a key",
        contestant.name()
    );
    bytes as f64 / f64::from(1 << 20)
}

fn many_keys(few: usize, many: usize, targets: &mut Vec<Target>) {
    let started = Instant::now();
    let small = Tier::new("weir, few keys", Some(started), AMPLE_CAPACITY);
    fill(&small, few);
    let large = Tier::new("weir, many keys", Some(started), AMPLE_CAPACITY);
    let mib = fill_measured(&large, many);
    let governor = Keyed::new("governor, many keys", AMPLE_CAPACITY, DefaultClock::default());
    fill_measured(&governor, many);
    targets.push(Target {
        name: format!("{many} keys"),
        measured: mib,
        most: MANY_KEYS_TARGET_MIB,
        unit: "MiB",
    });
    let reads = [few, many].map(|keys| one_read(keys * 88));
    println!("one read of as much memory as {few} and {many} keys take: {reads:.0?} ns");
    for threads in [1, 2] {
        for (how, unevenly) in [("evenly", false), ("unevenly", true)] {
            let [few, many] = [few, many].map(|keys| Draw { keys, unevenly });
            let title = format!("{} and {} keys drawn {how}, clock read", few.keys, many.keys);
            let results = compare(&title, threads, &[(&small, few), (&large, many), (&governor, many)]);
            let more = (results[1].cpu - results[0].cpu) / (reads[1] - reads[0]);
            println!("\nMany keys cost {more:.2} reads of main memory more than few do.");
            let name = format!("{title}, {threads} thread(s): many / few");
            targets.push(Target { name, measured: results[1].ratio, most: MANY_KEYS_TARGET, unit: "×" });
        }
    }
}

fn main() {
    let mut targets = Vec::new();
    many_keys(10_000, 10_000_000, &mut targets);
    against_governor(100_000, &mut targets);
    println!("\n| target (of processor time) | measured | bound | result |\n| --- | ---: | ---: | --- |");
    for Target { name, measured, most, unit } in targets {
        let result = if measured <= most { "pass" } else { "MISS" };
        println!("| {name} | {measured:.2} {unit} | ≤ {most} {unit} | {result} |");
    }
}
