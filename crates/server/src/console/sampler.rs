//! Takes a sample of this process's counters each second, and checks its engines, for the console.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use weir_core::request::state::RequestStatus;
use weir_queue::rfc3339;

use super::live::{EngineState, LiveSample, PER_CAPABILITY, named};
use crate::app::App;
use crate::operations::metrics::{BacklogCounts, shown_name};
use crate::operations::readiness::Deployment;
use crate::telemetry::decisions::{CAPABILITIES, DecisionTotals, LatencyCounts, quantile_us};
use crate::telemetry::labels::DownstreamLabels;
use crate::telemetry::near_limits::NearLimit;

const STEP: Duration = Duration::from_secs(1);
/// How often engines are checked while nobody watches: since when one is down is known to this long.
const UNWATCHED_STEP: Duration = Duration::from_secs(5);
/// Keys near a limit in a snapshot.
const NEAR_LIMITS_SHOWN: usize = 12;
/// How requests end, in the order of the last counts of a sample.
const ENDINGS: [RequestStatus; 4] = [
    RequestStatus::Completed,
    RequestStatus::FailedPermanent,
    RequestStatus::FailedRetryExhausted,
    RequestStatus::Cancelled,
];

/// One second, as the console shows it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Snapshot {
    at: jiff::Timestamp,
    /// Seconds since the start of the process: the step of the history.
    second: u64,
    /// The numbers of this second by name.
    series: BTreeMap<&'static str, u32>,
    engines: Vec<EngineBody>,
    capabilities: Vec<CapabilityBody>,
    /// `None` while the store does not answer.
    backlog: Option<BacklogBody>,
    near_limits: Vec<NearLimitBody>,
    connections: i64,
    streams: usize,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct EngineBody {
    name: &'static str,
    up: bool,
    latency_ms: f64,
    reason: Option<&'static str>,
    since: jiff::Timestamp,
}

#[derive(Serialize)]
struct CapabilityBody {
    name: &'static str,
    ready: bool,
    reason: Option<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct BacklogBody {
    downstreams: Vec<DownstreamBody>,
    oldest_pending_seconds: u64,
    dead_requests: u64,
    dead_letters: BTreeMap<&'static str, u64>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct DownstreamBody {
    /// As the store has it: empty for the default downstream.
    name: String,
    waiting: u64,
    running: u64,
    parked: u64,
    oldest_waiting_seconds: Option<u64>,
    /// Of this process; `None` if it calls no downstreams.
    breaker: Option<&'static str>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct NearLimitBody {
    capability: &'static str,
    limit_name: Box<str>,
    key: Box<str>,
    limit: u32,
    remaining: u32,
    denials: u64,
    until: Option<jiff::Timestamp>,
}

impl From<NearLimit> for NearLimitBody {
    fn from(near: NearLimit) -> Self {
        let NearLimit { capability, limit_name, key, limit, remaining, denials, until, .. } = near;
        Self { capability, limit_name, key, limit, remaining, denials, until: until.map(rfc3339) }
    }
}

/// The totals at the last sample.
struct Totals {
    decisions: [DecisionTotals; CAPABILITIES.len()],
    latency: [LatencyCounts; CAPABILITIES.len()],
    endings: [u64; ENDINGS.len()],
}

impl Totals {
    fn read(app: &App) -> Self {
        let finished = &app.metrics.request.accept.finished;
        Self {
            decisions: app.metrics.decisions(),
            latency: app.metrics.latency.counts(),
            endings: ENDINGS.map(|status| finished.count(status)),
        }
    }

    /// What was added since `before`.
    fn since(&self, before: &Self) -> LiveSample {
        let mut sample = LiveSample::default();
        let added = |now: u64, before: u64| u32::try_from(now.saturating_sub(before)).unwrap_or(u32::MAX);
        for at in 0..CAPABILITIES.len() {
            let (now, earlier) = (self.decisions[at], before.decisions[at]);
            let counts = &mut sample.counts[at * PER_CAPABILITY..][..PER_CAPABILITY];
            counts.copy_from_slice(&[
                added(now.allowed, earlier.allowed),
                added(now.denied, earlier.denied),
                added(now.failed, earlier.failed),
            ]);
            let mut latency = self.latency[at];
            for (count, earlier) in latency.iter_mut().zip(before.latency[at]) {
                *count = count.saturating_sub(earlier);
            }
            let quantile = |share| u32::try_from(quantile_us(&latency, share)).unwrap_or(u32::MAX);
            let levels = &mut sample.levels[at * PER_CAPABILITY..][..2];
            levels.copy_from_slice(&[quantile(50), quantile(99)]);
        }
        let endings = &mut sample.counts[CAPABILITIES.len() * PER_CAPABILITY..];
        for (count, (now, earlier)) in endings.iter_mut().zip(self.endings.iter().zip(before.endings)) {
            *count = added(*now, earlier);
        }
        sample
    }
}

/// Samples each second until the app closes. A second that the machine was too busy for is missing, and counts in the next.
pub(crate) async fn run(app: Arc<App>, closing: CancellationToken) {
    let mut ticks = interval(STEP);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut before = Totals::read(&app);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = closing.cancelled() => return,
        }
        let totals = Totals::read(&app);
        let mut sample = totals.since(&before);
        before = totals;
        let backlog = app.backlog.latest();
        add_levels(&app, backlog.as_deref(), &mut sample);
        let second = app.started.elapsed().as_secs();
        app.live.add(second, &sample);
        if app.live.is_watched() {
            app.live.publish(&snapshot(&app, second, &sample, backlog.as_deref()));
        }
    }
}

fn add_levels(app: &App, backlog: Option<&BacklogCounts>, sample: &mut LiveSample) {
    for (at, waiting) in app.metrics.waiting().into_iter().enumerate() {
        sample.levels[at * PER_CAPABILITY + 2] = u32::try_from(waiting).unwrap_or(u32::MAX);
    }
    let due: u64 = backlog.map_or(0, |backlog| backlog.jobs.iter().map(|jobs| jobs.waiting).sum());
    let streams = app.metrics.sale.streams.get();
    let others = &mut sample.levels[CAPABILITIES.len() * PER_CAPABILITY..];
    others.copy_from_slice(&[u32::try_from(due).unwrap_or(u32::MAX), u32::try_from(streams).unwrap_or(0)]);
}

fn snapshot(app: &App, second: u64, sample: &LiveSample, backlog: Option<&BacklogCounts>) -> Snapshot {
    let engines = app.live.engines();
    let checks: Vec<_> = engines.iter().map(|state| state.check).collect();
    let deployment = Deployment::new(&app.settings, &app.engines);
    let capabilities = deployment.assess(&checks, app.shutdown.closing().is_cancelled());
    let describe = |state: &EngineState| EngineBody {
        name: state.check.engine,
        up: state.check.up,
        latency_ms: state.check.latency.as_secs_f64() * 1_000.0,
        reason: state.check.reason,
        since: state.since,
    };
    let now = app.engines.store.wall_clock.now();
    let near = app.metrics.near_limits.list(now, NEAR_LIMITS_SHOWN, |_| true);
    Snapshot {
        at: jiff::Timestamp::now(),
        second,
        series: named(sample),
        engines: engines.iter().map(describe).collect(),
        capabilities: capabilities
            .into_iter()
            .map(|(capability, unready)| CapabilityBody {
                name: capability.name(),
                ready: unready.is_none(),
                reason: unready.map(|unready| unready.to_string()),
            })
            .collect(),
        backlog: backlog.map(|counts| describe_backlog(app, counts)),
        near_limits: near.into_iter().map(NearLimitBody::from).collect(),
        connections: app.metrics.connections.get(),
        streams: app.address_limits.long_lived_count(),
    }
}

fn describe_backlog(app: &App, counts: &BacklogCounts) -> BacklogBody {
    let downstreams = counts.jobs.iter().map(|jobs| DownstreamBody {
        name: jobs.downstream.clone(),
        waiting: jobs.waiting,
        running: jobs.running,
        parked: jobs.parked,
        oldest_waiting_seconds: jobs.oldest_waiting.map(|age| age.as_secs()),
        breaker: breaker(app, &jobs.downstream),
    });
    BacklogBody {
        downstreams: downstreams.collect(),
        oldest_pending_seconds: counts.oldest_pending.as_secs(),
        dead_requests: counts.dead_requests,
        dead_letters: counts.dead_letters.into_iter().collect(),
    }
}

/// The state of a downstream's circuit breaker in this process.
fn breaker(app: &App, downstream: &str) -> Option<&'static str> {
    let states = &app.metrics.request.work.breaker_state;
    let of = |downstream: String| states.get(&DownstreamLabels { downstream }).map(|gauge| gauge.get());
    Some(match of(downstream.to_owned()).or_else(|| of(shown_name(downstream)))? {
        0 => "closed",
        1 => "halfOpen",
        _ => "open",
    })
}

/// Checks the engines and counts the backlog until the app closes: each second while somebody watches.
pub(crate) async fn watch_engines(app: Arc<App>, closing: CancellationToken) {
    let mut checked: Option<Instant> = None;
    let mut ticks = interval(STEP);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = closing.cancelled() => return,
        }
        let is_watched = app.live.is_watched();
        if !is_watched && checked.is_some_and(|at| at.elapsed() < UNWATCHED_STEP) {
            continue;
        }
        checked = Some(Instant::now());
        let check = async {
            let checks = app.health.check().await;
            app.live.set_engines(&checks, jiff::Timestamp::now());
            if is_watched {
                app.backlog.update().await;
            }
        };
        tokio::select! {
            () = check => {}
            () = closing.cancelled() => return,
        }
    }
}
