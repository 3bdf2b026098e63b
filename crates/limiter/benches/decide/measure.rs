//! Times decisions.
//!
//! Contestants alternate in short rounds, so that other load on the machine affects all of them. Keys are drawn a few
//! at a time into reused strings: drawing and formatting is not timed, and the strings are in the nearest cache
//! however many keys there are.

use std::fmt::Write as _;
use std::hint::black_box;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use crate::contestants::Contestant;

const ROUNDS: usize = 11;
const DECISIONS: usize = 400_000;
const BATCH: usize = 250;

#[derive(Clone, Copy)]
pub(crate) struct Draw {
    pub(crate) keys: usize,
    /// Whether nine of ten decisions are for one percent of the keys; otherwise all keys are equally likely.
    pub(crate) unevenly: bool,
}

impl Draw {
    pub(crate) const fn evenly(keys: usize) -> Self {
        Self { keys, unevenly: false }
    }

    fn next(self, random: &mut fastrand::Rng) -> usize {
        let is_common = self.unevenly && random.u8(..10) < 9;
        random.usize(..if is_common { (self.keys / 100).max(1) } else { self.keys })
    }
}

/// Nanoseconds per decision of one thread: wall-clock time and processor time.
#[derive(Clone, Copy)]
struct Cost {
    wall: f64,
    cpu: f64,
}

/// The median of one contestant, and its ratio to the first contestant.
pub(crate) struct Result {
    pub(crate) cpu: f64,
    pub(crate) ratio: f64,
}

/// Returns the processor time of this thread, which excludes the time of other threads.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

fn format_key(number: usize, text: &mut String) {
    text.clear();
    write!(text, "user-{number:011}").expect("a text takes everything");
}

/// Decides once for every key.
pub(crate) fn fill(contestant: &dyn Contestant, keys: usize) {
    let mut id = String::new();
    for number in 0..keys {
        format_key(number, &mut id);
        contestant.decide(&id);
    }
}

/// Runs one thread of a round.
fn run(contestant: &dyn Contestant, draw: Draw, seed: u64, barrier: &Barrier) -> (Duration, Duration) {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut ids = vec![String::new(); BATCH];
    let mut total = (Duration::ZERO, Duration::ZERO);
    barrier.wait();
    for _ in 0..DECISIONS / BATCH {
        ids.iter_mut().for_each(|id| format_key(draw.next(&mut random), id));
        let (wall, cpu) = (Instant::now(), cpu_time());
        for id in &ids {
            black_box(contestant.decide(id));
        }
        total = (total.0 + wall.elapsed(), total.1 + (cpu_time() - cpu));
    }
    total
}

fn round(contestant: &dyn Contestant, draw: Draw, threads: usize, seed: u64) -> Cost {
    let barrier = Barrier::new(threads);
    let times: Vec<(Duration, Duration)> = thread::scope(|scope| {
        let start = |thread| {
            let (barrier, seed) = (&barrier, seed * threads as u64 + thread);
            scope.spawn(move || run(contestant, draw, seed, barrier))
        };
        let running: Vec<_> = (0..threads as u64).map(start).collect();
        running.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    let decisions = (times.len() * DECISIONS) as f64;
    let each = |sum: Duration| sum.as_secs_f64() * 1e9 / decisions;
    Cost {
        wall: each(times.iter().map(|time| time.0).sum()),
        cpu: each(times.iter().map(|time| time.1).sum()),
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Runs all contestants alternately, each with its own keys, and prints a line per contestant that compares it with
/// the first.
pub(crate) fn compare(title: &str, threads: usize, contestants: &[(&dyn Contestant, Draw)]) -> Vec<Result> {
    let mut rounds = vec![Vec::new(); contestants.len()];
    for seed in 0..ROUNDS as u64 {
        for ((contestant, draw), costs) in contestants.iter().zip(&mut rounds) {
            costs.push(round(*contestant, *draw, threads, seed));
        }
    }
    println!("\n{title}, {threads} thread(s)\n");
    println!("| | ns (wall) | ns (cpu) | least cpu | ratio (wall) | ratio (cpu) |");
    println!("| --- | ---: | ---: | ---: | ---: | ---: |");
    let line = |((contestant, _), costs): (&(&dyn Contestant, Draw), &Vec<Cost>)| {
        let of = |pick: fn(&Cost) -> f64| median(costs.iter().map(pick).collect());
        let ratio = |pick: fn(&Cost) -> f64| {
            median(costs.iter().zip(&rounds[0]).map(|(own, first)| pick(own) / pick(first)).collect())
        };
        let (wall, cpu) = (of(|cost| cost.wall), of(|cost| cost.cpu));
        let least = costs.iter().map(|cost| cost.cpu).fold(f64::INFINITY, f64::min);
        let (wall_ratio, ratio) = (ratio(|cost| cost.wall), ratio(|cost| cost.cpu));
        let name = contestant.name();
        println!("| {name} | {wall:.0} | {cpu:.0} | {least:.0} | {wall_ratio:.2} | {ratio:.2} |");
        Result { cpu, ratio }
    };
    contestants.iter().zip(&rounds).map(line).collect()
}

/// Returns the nanoseconds of one dependent read of a random cache line: the minimum cost of a decision about a key
/// that is in no cache.
pub(crate) fn one_read(bytes: usize) -> f64 {
    let count = bytes / 64;
    let mut lines = vec![[0_usize; 8]; count];
    // One cycle through all lines (Sattolo's shuffle).
    (0..count).for_each(|at| lines[at][0] = at);
    for at in (1..count).rev() {
        let other = fastrand::usize(..at);
        let next = lines[at][0];
        lines[at][0] = std::mem::replace(&mut lines[other][0], next);
    }
    let mut at = 0;
    let times = (0..ROUNDS).map(|_| {
        let started = cpu_time();
        (0..DECISIONS).for_each(|_| at = lines[at][0]);
        (cpu_time() - started).as_secs_f64() * 1e9 / DECISIONS as f64
    });
    let median = median(times.collect());
    black_box(at);
    median
}

/// Returns the memory of this process in bytes as Linux reports it: resident, and in huge pages.
pub(crate) fn resident() -> [u64; 2] {
    let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    ["Rss:", "AnonHugePages:"].map(|name| {
        let line = rollup.lines().find_map(|line| line.strip_prefix(name));
        let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
        kib.unwrap_or(0) * 1_024
    })
}
