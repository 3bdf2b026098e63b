//! What one decision costs in process, next to `governor` on `DashMap`, and what ten million keys cost.
//!
//! Contestants take turns in short rounds, so that whatever else the machine does hits all of them; the table shows the
//! median round. Keys are drawn beforehand, evenly, and lie in memory in the order they are used in.

#![expect(clippy::print_stdout, reason = "prints its table")]

use std::hint::black_box;
use std::mem;
use std::num::NonZeroU32;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use governor::clock::{Clock, DefaultClock, FakeRelativeClock, MonotonicClock};
use governor::state::keyed::DashMapStateStore;
use governor::{Quota, RateLimiter};
use weir_core::Timestamp;
use weir_core::tier::{TierRule, TokenBucket};
use weir_store_memory::{Memory, Options, Policy};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const ROUNDS: usize = 11;
const DECISIONS: usize = 1_000_000;
const START: Timestamp = Timestamp::from_seconds(1_700_000_000);
/// So much that nothing is denied, and refilled so slowly that no key becomes idle: one a day.
const PLENTY: u32 = 100_000;
const DAY: Duration = Duration::from_secs(86_400);

type Governor<C> = RateLimiter<
    String,
    DashMapStateStore<String>,
    C,
    governor::middleware::NoOpMiddleware<<C as Clock>::Instant>,
>;

/// Decides for one key.
#[expect(clippy::ptr_arg, reason = "governor takes no less")]
trait Contestant: Send + Sync {
    fn name(&self) -> &'static str;
    fn decide(&self, id: &String) -> bool;
}

/// The two buckets of a tier, with the process's clock.
struct Tier {
    name: &'static str,
    memory: Memory<TierRule>,
    policy: Arc<Policy<TierRule>>,
    started: Option<Instant>,
}

/// One bucket.
struct Bucket {
    memory: Memory<TokenBucket>,
    policy: Arc<Policy<TokenBucket>>,
}

struct Keyed<C: Clock>(&'static str, Governor<C>);

impl Tier {
    fn new(name: &'static str, started: Option<Instant>, capacity: u32) -> Self {
        Self { name, memory: Memory::new(Options::default()), policy: policy([bucket(capacity); 2]), started }
    }
}

impl Contestant for Tier {
    fn name(&self) -> &'static str {
        self.name
    }

    fn decide(&self, id: &String) -> bool {
        let now = self.started.map_or(START, |started| START.plus(started.elapsed()));
        let taken = self.memory.take(&self.policy, id, 1, now);
        taken.is_ok_and(|taken| taken.decision.is_allowed())
    }
}

impl Contestant for Bucket {
    fn name(&self) -> &'static str {
        "weir, one bucket"
    }

    fn decide(&self, id: &String) -> bool {
        let taken = self.memory.take(&self.policy, id, 1, START);
        taken.is_ok_and(|taken| taken.decision.is_allowed())
    }
}

impl<C: Clock + Send + Sync> Contestant for Keyed<C>
where
    C::Instant: Send + Sync,
{
    fn name(&self) -> &'static str {
        self.0
    }

    fn decide(&self, id: &String) -> bool {
        self.1.check_key(id).is_ok()
    }
}

fn policy<R>(rule: R) -> Arc<Policy<R>> {
    Arc::new(Policy { scope: 0, rule })
}

fn bucket(capacity: u32) -> TokenBucket {
    TokenBucket::new(capacity, 1, DAY).expect("in range")
}

fn keyed<C: Clock>(name: &'static str, capacity: u32, clock: C) -> Keyed<C> {
    let quota = Quota::with_period(DAY).expect("not zero");
    let quota = quota.allow_burst(NonZeroU32::new(capacity).expect("not zero"));
    Keyed(name, RateLimiter::dashmap_with_clock(quota, clock))
}

fn id(number: usize) -> String {
    format!("user-{number:011}")
}

/// A sequence of keys for each thread, drawn evenly.
fn draw(keys: usize, threads: usize) -> Vec<Vec<String>> {
    draw_with(threads, |random| random.usize(..keys))
}

/// The same, where nine of ten decisions are for one key of a hundred.
fn draw_unevenly(keys: usize, threads: usize) -> Vec<Vec<String>> {
    draw_with(threads, |random| {
        let among = if random.u8(..10) < 9 { keys / 100 } else { keys };
        random.usize(..among)
    })
}

fn draw_with(threads: usize, pick: impl Fn(&mut fastrand::Rng) -> usize) -> Vec<Vec<String>> {
    let draw = |seed| {
        let mut random = fastrand::Rng::with_seed(seed);
        (0..DECISIONS).map(|_| id(pick(&mut random))).collect()
    };
    (0..threads as u64).map(draw).collect()
}

/// Nanoseconds a decision, as one thread sees it: by the wall, and of the processor.
#[derive(Clone, Copy)]
struct Cost {
    wall: f64,
    cpu: f64,
}

/// Time this thread has run. Unlike the wall's, it goes on only while nothing else runs in the thread's place.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

fn round(contestant: &dyn Contestant, draws: &[Vec<String>]) -> Cost {
    let barrier = Barrier::new(draws.len());
    let run = |draw: &Vec<String>| {
        barrier.wait();
        let (wall, cpu) = (Instant::now(), cpu_time());
        for id in draw {
            black_box(contestant.decide(id));
        }
        (wall.elapsed(), cpu_time() - cpu)
    };
    let times: Vec<(Duration, Duration)> = thread::scope(|scope| {
        let threads: Vec<_> = draws.iter().map(|draw| scope.spawn(|| run(draw))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
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

/// Runs all contestants in turns, each with its own keys, and prints a line for each that compares it to the first.
fn compare(title: &str, contestants: &[(&dyn Contestant, &[Vec<String>])]) {
    let mut rounds = vec![Vec::new(); contestants.len()];
    for _ in 0..ROUNDS {
        for ((contestant, draws), costs) in contestants.iter().zip(&mut rounds) {
            costs.push(round(*contestant, draws));
        }
    }
    println!("\n{title}\n");
    println!("| | ns (wall) | ns (cpu) | least cpu | ratio (wall) | ratio (cpu) |");
    println!("| --- | ---: | ---: | ---: | ---: | ---: |");
    for ((contestant, _), costs) in contestants.iter().zip(&rounds) {
        let of = |pick: fn(&Cost) -> f64| median(costs.iter().map(pick).collect());
        let ratio = |pick: fn(&Cost) -> f64| {
            median(costs.iter().zip(&rounds[0]).map(|(own, first)| pick(own) / pick(first)).collect())
        };
        let (wall, cpu) = (of(|cost| cost.wall), of(|cost| cost.cpu));
        let least = costs.iter().map(|cost| cost.cpu).fold(f64::INFINITY, f64::min);
        let (wall_ratio, cpu_ratio) = (ratio(|cost| cost.wall), ratio(|cost| cost.cpu));
        let name = contestant.name();
        println!("| {name} | {wall:.0} | {cpu:.0} | {least:.0} | {wall_ratio:.2} | {cpu_ratio:.2} |");
    }
}

fn fill(contestant: &dyn Contestant, keys: usize) {
    for number in 0..keys {
        contestant.decide(&id(number));
    }
}

/// Resident memory of this process in bytes, as Linux tells it.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) * 1_024
}

/// Nanoseconds for reading one cache line of so many bytes, where the next one is known only then: what a decision about
/// a key that is in no cache cannot cost less than.
fn one_read(bytes: usize) -> f64 {
    let count = bytes / 64;
    let mut lines = vec![[0_usize; 8]; count];
    // One circle through all lines (Sattolo's shuffle).
    (0..count).for_each(|at| lines[at][0] = at);
    for at in (1..count).rev() {
        let other = fastrand::usize(..at);
        let next = lines[at][0];
        lines[at][0] = mem::replace(&mut lines[other][0], next);
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

fn against_governor(keys: usize) {
    let started = Instant::now();
    let with_clock = keyed("governor, its own clock", PLENTY, DefaultClock::default());
    let with_std_clock = keyed("governor, the standard library's", PLENTY, MonotonicClock);
    let tier = Tier::new("weir, two buckets, the standard library's", Some(started), PLENTY);
    let fixed_clock = keyed("governor", PLENTY, FakeRelativeClock::default());
    let fixed_tier = Tier::new("weir, two buckets", None, PLENTY);
    let fixed_bucket = Bucket { memory: Memory::new(Options::default()), policy: policy(bucket(PLENTY)) };
    let denying = keyed("governor", 1, FakeRelativeClock::default());
    let denying_tier = Tier::new("weir, two buckets", None, 1);
    let all: [&dyn Contestant; 8] = [
        &with_clock,
        &with_std_clock,
        &tier,
        &fixed_clock,
        &fixed_tier,
        &fixed_bucket,
        &denying,
        &denying_tier,
    ];
    for contestant in all {
        fill(contestant, keys);
    }
    for threads in [1, 2] {
        let draws = &draw(keys, threads)[..];
        let on = format!("{keys} keys, {threads} thread(s)");
        compare(
            &format!("{on}, clock read"),
            &[(&with_clock, draws), (&with_std_clock, draws), (&tier, draws)],
        );
        compare(
            &format!("{on}, clock not read"),
            &[(&fixed_clock, draws), (&fixed_tier, draws), (&fixed_bucket, draws)],
        );
        compare(&format!("{on}, all denied, clock not read"), &[(&denying, draws), (&denying_tier, draws)]);
    }
    let hot = &draw(1, 2)[..];
    compare("1 key, 2 threads, all denied, clock not read", &[(&denying, hot), (&denying_tier, hot)]);
}

fn many_keys(few: usize, many: usize) {
    let started = Instant::now();
    let small = Tier::new("weir, few keys", Some(started), PLENTY);
    fill(&small, few);
    let before = resident();
    let large = Tier::new("weir, many keys", Some(started), PLENTY);
    fill(&large, many);
    let bytes = resident() - before;
    println!("\n{many} keys of 16 bytes: {} MiB resident, {} bytes a key", bytes >> 20, bytes / many as u64);
    let before = resident();
    let governor = keyed("governor, many keys", PLENTY, DefaultClock::default());
    fill(&governor, many);
    let bytes = resident() - before;
    println!("governor: {} MiB resident, {} bytes a key", bytes >> 20, bytes / many as u64);
    let reads = [few, many].map(|keys| one_read(keys * 88));
    println!("\none read of as much memory as {few} and {many} keys take: {reads:.0?} ns");
    for threads in [1, 2] {
        for (how, draw) in [("evenly", draw as fn(_, _) -> _), ("unevenly", draw_unevenly)] {
            let (few_draws, many_draws): (Vec<_>, Vec<_>) = (draw(few, threads), draw(many, threads));
            compare(
                &format!("{few} and {many} keys drawn {how}, {threads} thread(s), clock read"),
                &[(&small, &few_draws), (&large, &many_draws), (&governor, &many_draws)],
            );
        }
    }
}

fn main() {
    many_keys(10_000, 10_000_000);
    against_governor(100_000);
}
