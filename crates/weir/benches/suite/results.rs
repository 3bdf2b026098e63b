//! The results of the suite: a row per measurement, a verdict per target, and failed checks.

use std::fs;

use serde::{Deserialize, Serialize};
use weir_bench::Report;

use crate::postgres::is_in_memory;
use crate::{Bench, P99_TARGET_MS};

/// A load average above which the machine is not idle.
const BUSY: f64 = 0.5;

/// One measurement.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Row {
    pub(crate) name: String,
    /// The rate of expected responses only, 2xx or denials: others are fast and do no work.
    pub(crate) requests_per_s: f64,
    /// `None` if responses are streamed and have no individual latency.
    pub(crate) p50_ms: Option<f64>,
    pub(crate) p99_ms: Option<f64>,
    /// Unexpected responses, and requests without a response.
    pub(crate) failed: u64,
    /// Processor cores used by the load generator, which has one thread.
    pub(crate) generator_cores: Option<f64>,
    pub(crate) sender: Option<Sender>,
    /// The ratio of the rate to the mean rate of the baseline before and after.
    pub(crate) ratio: Option<f64>,
}

/// The sender's backlog when the load ended.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Sender {
    pub(crate) backlog: u64,
    /// The time until all were delivered, or until the suite stopped waiting.
    pub(crate) lag_s: f64,
    pub(crate) caught_up: bool,
}

/// A measurement of Weir and its failed checks.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) row: Row,
    pub(crate) failures: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Bound {
    AtLeast(f64),
    Below(f64),
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Target {
    pub(crate) name: String,
    pub(crate) measured: f64,
    pub(crate) bound: Bound,
    pub(crate) unit: String,
    pub(crate) met: bool,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Results {
    pub(crate) machine: String,
    pub(crate) measured_s: u64,
    /// In the order of measurement.
    pub(crate) rows: Vec<Row>,
    pub(crate) targets: Vec<Target>,
    /// Conditions that limit the meaning of the numbers.
    pub(crate) notes: Vec<String>,
    /// Failed checks: with any of these the numbers are invalid.
    pub(crate) failures: Vec<String>,
}

impl Row {
    pub(crate) fn new(name: String, requests_per_s: f64, p50_ms: f64, p99_ms: f64, failed: u64) -> Self {
        let row = Self::without_latency(name, requests_per_s, failed);
        Self { p50_ms: Some(p50_ms), p99_ms: Some(p99_ms), ..row }
    }

    pub(crate) fn without_latency(name: String, requests_per_s: f64, failed: u64) -> Self {
        Self {
            name,
            requests_per_s,
            p50_ms: None,
            p99_ms: None,
            failed,
            generator_cores: None,
            sender: None,
            ratio: None,
        }
    }

    pub(crate) fn from_report(report: &Report) -> Self {
        let expected = report.expected();
        let failed = report.requests - expected + report.errors.total();
        if failed > 0 {
            eprintln!("{}: answers {:?}, without one {:?}", report.name, report.statuses, report.errors);
        }
        let rate = expected as f64 / report.duration_s;
        let row = Self::new(report.name.clone(), rate, report.latency_ms.p50, report.latency_ms.p99, failed);
        Self { generator_cores: Some(report.generator_cores), ..row }
    }
}

impl Results {
    pub(crate) fn new(bench: &Bench) -> Self {
        let mut notes = Vec::new();
        if is_in_memory(bench.path()) {
            notes.push("target/ is in memory (tmpfs), where an fsync is free".to_owned());
        }
        let load = load_average();
        if load > BUSY {
            notes.push(format!(
                "the machine was not idle before the run (load average {load}): take it again"
            ));
        }
        Self {
            machine: machine(),
            measured_s: bench.duration.as_secs(),
            rows: Vec::new(),
            targets: Vec::new(),
            notes,
            failures: Vec::new(),
        }
    }

    /// Adds a run of Weir and its target relative to the baseline before and after.
    pub(crate) fn compare(&mut self, run: Run, around: [&Row; 2], at_least: f64) {
        let name = format!("{} / {}", run.row.name, around[0].name);
        let ratio = self.record(run, around);
        self.target(&name, ratio, Bound::AtLeast(at_least), "×");
    }

    /// Adds a run of Weir and its p99 target, and returns its ratio to the baseline.
    pub(crate) fn record(&mut self, run: Run, around: [&Row; 2]) -> f64 {
        if let Some(p99_ms) = run.row.p99_ms {
            self.target(&format!("{}, p99", run.row.name), p99_ms, Bound::Below(P99_TARGET_MS), "ms");
        }
        self.relate(run, around)
    }

    /// Adds a run of Weir and returns its ratio to the baseline.
    pub(crate) fn relate(&mut self, mut run: Run, around: [&Row; 2]) -> f64 {
        let [before, after] = around.map(|baseline| baseline.requests_per_s);
        let ratio = run.row.requests_per_s / f64::midpoint(before, after);
        run.row.ratio = Some(ratio);
        if (before - after).abs() > 0.2 * before.max(after) {
            let against = format!("{} / {}", run.row.name, around[0].name);
            self.notes.push(format!("{against}: the baseline moved by more than a fifth around the run"));
        }
        self.add(run);
        ratio
    }

    /// Adds a run of Weir without a baseline.
    pub(crate) fn add(&mut self, run: Run) {
        let Run { row, failures } = run;
        if let Some(sender) = row.sender.filter(|sender| !sender.caught_up) {
            self.notes.push(format!("{}: the sender was still behind after {:.0} s", row.name, sender.lag_s));
        }
        if row.failed > 0 {
            self.notes.push(format!(
                "{}: {} requests failed or were not answered as expected",
                row.name, row.failed
            ));
        }
        self.rows.push(row);
        self.failures.extend(failures);
    }

    /// Adds a target for the rate of a row.
    pub(crate) fn rate_target(&mut self, row: &Row, at_least: f64) {
        self.target(&row.name, row.requests_per_s, Bound::AtLeast(at_least), "/s");
    }

    /// Adds notes that are not there yet.
    pub(crate) fn note(&mut self, notes: impl IntoIterator<Item = String>) {
        for note in notes {
            if !self.notes.contains(&note) {
                self.notes.push(note);
            }
        }
    }

    pub(crate) fn target(&mut self, name: &str, measured: f64, bound: Bound, unit: &'static str) {
        let (unit, met) = (
            unit.to_owned(),
            match bound {
                Bound::AtLeast(least) => measured >= least,
                Bound::Below(limit) => measured < limit,
            },
        );
        self.targets.push(Target { name: name.to_owned(), measured, bound, unit, met });
    }

    /// Appends the results of a part. `part` started with the notes and failures of these results.
    pub(crate) fn append(&mut self, mut part: Self) {
        self.rows.append(&mut part.rows);
        self.targets.append(&mut part.targets);
        self.notes = part.notes;
        self.failures = part.failures;
    }

    pub(crate) fn meets_targets(&self) -> bool {
        self.targets.iter().all(|target| target.met)
    }
}

/// Computes percentiles. There must be at least one latency.
pub(crate) fn percentiles_ms<const N: usize>(mut latencies_us: Vec<u64>, percents: [usize; N]) -> [f64; N] {
    latencies_us.sort_unstable();
    percents.map(|percent| latencies_us[latencies_us.len() * percent / 100] as f64 / 1000.0)
}

/// Returns the load average of the last minute, or 0 if it is unknown.
fn load_average() -> f64 {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    load.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(0.0)
}

fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let model = fs::read_to_string("/proc/cpuinfo").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("model name"))?;
        Some(line.trim_start_matches([' ', '\t', ':']).to_owned())
    });
    let model = model.unwrap_or_else(|| "an unnamed processor".to_owned());
    format!("{cores} cores of {model}, load generator included")
}
