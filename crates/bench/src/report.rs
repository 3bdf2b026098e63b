//! The results of a measurement, for people and programs.
//!
//! Nothing here measures. The progress line goes to a terminal on stderr, results to stdout, through one function.

mod progress;
mod table;

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::num::NonZeroU32;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use crate::expect::Expect;

pub(crate) use progress::Progress;

/// One target under one load.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    pub name: String,
    pub address: SocketAddr,
    pub connections: usize,
    pub threads: usize,
    pub keys: u64,
    /// The expected status.
    pub expect: Expect,
    /// The requested rate (open loop), or none (closed loop).
    pub rate_per_s: Option<NonZeroU32>,
    pub warmup_s: f64,
    pub duration_s: f64,
    /// Requests with a response, whatever the status.
    pub requests: u64,
    pub requests_per_s: f64,
    /// In an open loop, measured from when the request was due, including the wait for a free connection.
    pub latency_ms: LatencyMs,
    pub statuses: BTreeMap<u16, u64>,
    pub errors: ErrorCounts,
    /// Open loop: requests that were due and for which no connection became free.
    pub unsent: u64,
    /// Processor cores used by the generator. If close to its number of threads, the generator was the bottleneck.
    pub generator_cores: f64,
}

impl Report {
    /// Responses with the expected status.
    #[must_use]
    pub fn expected(&self) -> u64 {
        let met = self.statuses.iter().filter(|(status, _)| self.expect.is_met_by(**status));
        met.map(|(_, count)| count).sum()
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct LatencyMs {
    pub p50: f64,
    pub p90: f64,
    pub p95: f64,
    pub p99: f64,
    #[serde(rename = "p99.9")]
    pub p999: f64,
    pub max: f64,
}

/// Requests without a response, by cause.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorCounts {
    pub connect: u64,
    pub reset: u64,
    pub timeout: u64,
    pub protocol: u64,
}

impl ErrorCounts {
    #[must_use]
    pub fn total(&self) -> u64 {
        self.connect + self.reset + self.timeout + self.protocol
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.connect += other.connect;
        self.reset += other.reset;
        self.timeout += other.timeout;
        self.protocol += other.protocol;
    }
}

/// A measurement next to its baseline, taken in the same run with the same requests.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Comparison {
    pub result: Report,
    pub baseline: Option<Report>,
    /// Rate of the result as a share of the baseline's; none in an open loop, where both rates are given.
    pub ratio: Option<f64>,
    /// Caveats about the numbers.
    pub notes: Vec<String>,
}

impl Comparison {
    #[must_use]
    pub fn new(result: Report, baseline: Option<Report>, mut notes: Vec<String>) -> Self {
        let ratio =
            baseline.as_ref().filter(|_| result.rate_per_s.is_none()).and_then(|base| ratio(&result, base));
        for report in std::iter::once(&result).chain(&baseline) {
            notes.extend(cautions(report));
        }
        Self { result, baseline, ratio, notes }
    }

    /// Prints as a table, or as one JSON object.
    pub fn print(&self, json: bool) -> Result<()> {
        if json {
            return print_line(&serde_json::to_string_pretty(self).context("write the report as JSON")?);
        }
        print_line(&table::render(self))
    }
}

/// The rate of `result` as a share of `baseline`'s; none if the baseline answered nothing.
#[must_use]
pub fn ratio(result: &Report, baseline: &Report) -> Option<f64> {
    (baseline.requests_per_s > 0.0).then(|| result.requests_per_s / baseline.requests_per_s)
}

/// Returns caveats about the numbers of a report.
fn cautions(report: &Report) -> Vec<String> {
    let name = &report.name;
    let mut notes = Vec::new();
    let others = report.requests.saturating_sub(report.expected());
    if others > 0 {
        notes.push(format!("{name}: {others} of {} answers were not {}", report.requests, report.expect));
    }
    if report.unsent > 0 {
        notes.push(format!(
            "{name}: {} requests were due and never sent, all connections being busy: it does not hold this rate, \
             and the latencies are too good",
            report.unsent
        ));
    }
    if report.generator_cores > 0.95 * report.threads as f64 {
        notes.push(format!(
            "{name}: the generator used all it may; raise --threads if there are cores to spare"
        ));
    }
    notes
}

/// The one place that writes to stdout.
pub(crate) fn print_line(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{text}").and_then(|()| stdout.flush()).context("write to stdout")
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn sample(name: &str, requests: u64) -> Report {
        Report {
            name: name.to_owned(),
            address: "127.0.0.1:8080".parse().unwrap(),
            connections: 128,
            threads: 1,
            keys: 1,
            expect: Expect::Success,
            rate_per_s: None,
            warmup_s: 2.0,
            duration_s: 10.0,
            requests,
            requests_per_s: requests as f64 / 10.0,
            latency_ms: LatencyMs { p50: 1.2, p90: 1.9, p95: 2.2, p99: 2.75, p999: 4.0, max: 12.345 },
            statuses: BTreeMap::from([(200, requests)]),
            errors: ErrorCounts::default(),
            unsent: 0,
            generator_cores: 0.5,
        }
    }

    #[test]
    fn the_ratio_is_the_share_of_the_baseline() {
        assert_eq!(ratio(&sample("a", 800_000), &sample("b", 1_000_000)), Some(0.8));
        assert_eq!(ratio(&sample("a", 800_000), &sample("b", 0)), None);
    }

    #[test]
    fn an_open_loop_has_no_ratio() {
        let open = Report { rate_per_s: NonZeroU32::new(1000), ..sample("a", 10_000) };
        assert_eq!(Comparison::new(open.clone(), Some(open), Vec::new()).ratio, None);
        let closed = sample("a", 10_000);
        assert_eq!(Comparison::new(closed.clone(), Some(closed), Vec::new()).ratio, Some(1.0));
    }

    #[test]
    fn json_reads_back_as_the_same_comparison() {
        let comparison = Comparison::new(sample("a", 8), Some(sample("b", 10)), vec!["n".to_owned()]);
        let json = serde_json::to_string(&comparison).unwrap();
        assert!(json.contains(r#""requestsPerS":0.8"#) && json.contains(r#""p99.9":4.0"#), "{json}");
        assert_eq!(serde_json::from_str::<Comparison>(&json).unwrap(), comparison);
    }

    #[test]
    fn whatever_weakens_the_numbers_is_noted() {
        let mut report = sample("a", 100);
        assert!(cautions(&report).is_empty());
        report.statuses = BTreeMap::from([(200, 93), (429, 7)]);
        report.unsent = 5;
        report.generator_cores = 0.99;
        let notes = cautions(&report).join("\n");
        assert!(
            notes.contains("7 of 100") && notes.contains("5 requests") && notes.contains("--threads"),
            "{notes}"
        );
    }

    #[test]
    fn refusals_are_the_result_of_a_load_that_expects_them() {
        let statuses = BTreeMap::from([(200, 1), (429, 99)]);
        let report = Report { expect: Expect::Status(429), statuses, ..sample("a", 100) };
        assert_eq!(report.expected(), 99);
        assert_eq!(cautions(&report), ["a: 1 of 100 answers were not 429"]);
    }
}
