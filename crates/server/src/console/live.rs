//! What the console shows live: a snapshot each second, sent to every open stream, and the history that a stream begins with.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::history::{History, Ring, Sample};
use crate::operations::health::EngineCheck;
use crate::telemetry::decisions::CAPABILITIES;

/// The most open streams of one process.
pub(crate) const STREAMS_MAX: usize = 64;

/// What is counted: three numbers for each capability, and how requests end.
pub(crate) const COUNT_NAMES: [&str; 19] = [
    "quota.allowed",
    "quota.denied",
    "quota.failed",
    "slot.allowed",
    "slot.denied",
    "slot.failed",
    "request.allowed",
    "request.denied",
    "request.failed",
    "tier.allowed",
    "tier.denied",
    "tier.failed",
    "sale.allowed",
    "sale.denied",
    "sale.failed",
    "request.completed",
    "request.rejected",
    "request.exhausted",
    "request.cancelled",
];
/// What has a height: latencies in microseconds and commands that wait, for each capability; jobs that are due; streams of sales.
pub(crate) const LEVEL_NAMES: [&str; 17] = [
    "quota.p50Us",
    "quota.p99Us",
    "quota.waiting",
    "slot.p50Us",
    "slot.p99Us",
    "slot.waiting",
    "request.p50Us",
    "request.p99Us",
    "request.waiting",
    "tier.p50Us",
    "tier.p99Us",
    "tier.waiting",
    "sale.p50Us",
    "sale.p99Us",
    "sale.waiting",
    "request.jobsDue",
    "sale.streams",
];
/// Numbers of each capability at the beginning of either list.
pub(crate) const PER_CAPABILITY: usize = 3;

pub(crate) type LiveSample = Sample<{ COUNT_NAMES.len() }, { LEVEL_NAMES.len() }>;
type LiveHistory = History<{ COUNT_NAMES.len() }, { LEVEL_NAMES.len() }>;
type LiveRing = Ring<{ COUNT_NAMES.len() }, { LEVEL_NAMES.len() }>;

const _: () = assert!(COUNT_NAMES.len() >= CAPABILITIES.len() * PER_CAPABILITY);

/// The state of an engine, and since when it is so.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EngineState {
    pub(crate) check: EngineCheck,
    /// When it was first seen in this state.
    pub(crate) since: jiff::Timestamp,
}

/// The last snapshot, the history, and the streams.
#[derive(Debug)]
pub(crate) struct Live {
    history: Mutex<LiveHistory>,
    snapshot: watch::Sender<Bytes>,
    engines: Mutex<Vec<EngineState>>,
    streams: Arc<Semaphore>,
}

impl Default for Live {
    fn default() -> Self {
        Self {
            history: Mutex::default(),
            snapshot: watch::Sender::new(Bytes::new()),
            engines: Mutex::default(),
            streams: Arc::new(Semaphore::new(STREAMS_MAX)),
        }
    }
}

/// An open stream: its first event, then each snapshot. A caller that reads slowly misses some.
pub(crate) struct LiveSubscription {
    first: Option<Bytes>,
    snapshots: watch::Receiver<Bytes>,
    _permit: OwnedSemaphorePermit,
}

impl LiveSubscription {
    /// The next event; `None` once there will be none.
    pub(crate) async fn next(&mut self) -> Option<Bytes> {
        if let Some(first) = self.first.take() {
            return Some(first);
        }
        self.snapshots.changed().await.ok()?;
        Some(self.snapshots.borrow_and_update().clone())
    }
}

impl Live {
    /// Opens a stream that begins with `hello` and the history. `None` if too many are open.
    pub(crate) fn subscribe(&self, hello: &impl Serialize) -> Option<LiveSubscription> {
        let permit = Arc::clone(&self.streams).try_acquire_owned().ok()?;
        // Before the history is read: a sample in between comes twice rather than never.
        let snapshots = self.snapshot.subscribe();
        let history = {
            let history = self.history.lock();
            LiveHistoryBody { seconds: series(&history.seconds), minutes: series(&history.minutes) }
        };
        let first = [event("hello", hello), event("history", &history)].concat();
        Some(LiveSubscription { first: Some(first.into()), snapshots, _permit: permit })
    }

    /// Whether anybody watches.
    pub(crate) fn is_watched(&self) -> bool {
        self.snapshot.receiver_count() > 0
    }

    /// Adds what a second brought to the history.
    pub(crate) fn add(&self, second: u64, sample: &LiveSample) {
        self.history.lock().add(second, sample);
    }

    /// Sends a snapshot to all streams.
    pub(crate) fn publish(&self, snapshot: &impl Serialize) {
        self.snapshot.send_replace(event("snapshot", snapshot).into());
    }

    /// Takes the results of a check, and when each engine's state began.
    pub(crate) fn set_engines(&self, checks: &[EngineCheck], now: jiff::Timestamp) {
        let mut engines = self.engines.lock();
        let since = |check: &EngineCheck| {
            let before = engines.iter().find(|state| state.check.engine == check.engine);
            before.filter(|state| state.check.up == check.up).map_or(now, |state| state.since)
        };
        *engines = checks.iter().map(|check| EngineState { check: *check, since: since(check) }).collect();
    }

    pub(crate) fn engines(&self) -> Vec<EngineState> {
        self.engines.lock().clone()
    }
}

#[derive(Serialize)]
struct LiveHistoryBody {
    seconds: RingBody,
    minutes: RingBody,
}

/// Columns: the steps, and a number for each step in every series.
#[derive(Serialize)]
struct RingBody {
    steps: Vec<u64>,
    series: BTreeMap<&'static str, Vec<u32>>,
}

fn series(ring: &LiveRing) -> RingBody {
    let steps = ring.samples().map(|(step, _)| *step).collect();
    let mut series = BTreeMap::new();
    for (at, name) in COUNT_NAMES.into_iter().enumerate() {
        series.insert(name, ring.samples().map(|(_, sample)| sample.counts[at]).collect());
    }
    for (at, name) in LEVEL_NAMES.into_iter().enumerate() {
        series.insert(name, ring.samples().map(|(_, sample)| sample.levels[at]).collect());
    }
    RingBody { steps, series }
}

/// The numbers of one sample by name.
pub(crate) fn named(sample: &LiveSample) -> BTreeMap<&'static str, u32> {
    let counts = COUNT_NAMES.into_iter().zip(sample.counts);
    counts.chain(LEVEL_NAMES.into_iter().zip(sample.levels)).collect()
}

fn event(name: &str, data: &impl Serialize) -> Vec<u8> {
    // Serializing strings and numbers to memory cannot fail.
    let data = serde_json::to_string(data).unwrap_or_default();
    format!("event: {name}\ndata: {data}\n\n").into_bytes()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn check(up: bool) -> EngineCheck {
        EngineCheck { engine: "sqlite", up, latency: Duration::ZERO, reason: None }
    }

    #[test]
    fn an_engine_is_down_since_the_check_that_first_found_it_so() {
        let live = Live::default();
        let at = |second| jiff::Timestamp::from_second(second).unwrap();
        let mut seen = Vec::new();
        for (second, up) in [(1, true), (2, true), (3, false), (4, false), (5, true)] {
            live.set_engines(&[check(up)], at(second));
            seen.push(live.engines()[0].since.as_second());
        }
        assert_eq!(seen, [1, 1, 3, 3, 5]);
    }

    #[tokio::test]
    async fn a_stream_begins_with_the_history_and_goes_on_with_snapshots() {
        let live = Live::default();
        let mut sample = LiveSample::default();
        sample.counts[0] = 7;
        live.add(1, &sample);
        let mut stream = live.subscribe(&"hello").unwrap();
        assert!(live.is_watched());
        let first = String::from_utf8(stream.next().await.unwrap().to_vec()).unwrap();
        assert!(first.starts_with("event: hello\ndata: \"hello\"\n\nevent: history\ndata: {"), "{first}");
        assert!(first.contains("\"quota.allowed\":[7]") && first.ends_with("}\n\n"), "{first}");
        live.publish(&1);
        live.publish(&2);
        assert_eq!(stream.next().await.unwrap(), "event: snapshot\ndata: 2\n\n", "the newest only");
        drop(stream);
        assert!(!live.is_watched());
    }

    #[test]
    fn there_are_no_more_streams_than_the_bound() {
        let live = Live::default();
        let open: Vec<_> = (0..STREAMS_MAX).map(|_| live.subscribe(&()).unwrap()).collect();
        assert!(live.subscribe(&()).is_none());
        drop(open);
        assert!(live.subscribe(&()).is_some());
    }

    #[test]
    fn the_names_of_a_capabilitys_numbers_stand_where_the_sampler_writes_them() {
        for (at, capability) in CAPABILITIES.into_iter().enumerate() {
            for (offset, name) in ["allowed", "denied", "failed"].into_iter().enumerate() {
                assert_eq!(COUNT_NAMES[at * PER_CAPABILITY + offset], format!("{capability}.{name}"));
            }
            for (offset, name) in ["p50Us", "p99Us", "waiting"].into_iter().enumerate() {
                assert_eq!(LEVEL_NAMES[at * PER_CAPABILITY + offset], format!("{capability}.{name}"));
            }
        }
    }
}
