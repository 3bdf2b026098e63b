//! The published results: `bench/results/<part>.json` contains the latest run of each part, and the table in
//! docs/performance.md is generated from all of them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::results::{Bound, Results, Row, Target};
use crate::table::{self, grouped};
use crate::{P99_TARGET_MS, Part};

const BEGIN: &str = "<!-- results -->\n";
const END: &str = "<!-- /results -->";
const HEADER: &str = "| measurement | requests/s | p50 ms | p99 ms | measured | target | |\n\
                      | --- | ---: | ---: | ---: | ---: | ---: | --- |\n";

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Recording {
    part: String,
    date: String,
    results: Results,
}

/// Saves the results of a part in place of its previous run.
pub(crate) fn save(part: Part, results: &Results) -> Result<()> {
    let recording = Recording {
        part: format!("{part:?}").to_lowercase(),
        date: jiff::Timestamp::now().strftime("%F").to_string(),
        results: results.clone(),
    };
    let json = serde_json::to_string_pretty(&recording).context("write the results as JSON")?;
    let path = path_of(part);
    fs::create_dir_all(root().join("bench/results"))?;
    fs::write(&path, json + "\n").with_context(|| format!("write {}", path.display()))
}

/// Generates the table in docs/performance.md from the recordings of all parts.
pub(crate) fn publish() -> Result<()> {
    let page = root().join("docs/performance.md");
    let text = fs::read_to_string(&page).with_context(|| format!("read {}", page.display()))?;
    let (before, rest) = text.split_once(BEGIN).context("docs/performance.md has no `<!-- results -->`")?;
    let (_, after) = rest.split_once(END).context("docs/performance.md has no `<!-- /results -->`")?;
    let text = format!("{before}{BEGIN}{}{END}{after}", render(&read_all()?));
    fs::write(&page, text).with_context(|| format!("write {}", page.display()))
}

fn read_all() -> Result<Vec<Recording>> {
    let mut recordings = Vec::new();
    for &part in Part::value_variants() {
        let path = path_of(part);
        if path.exists() {
            let read = || -> Result<_> { Ok(serde_json::from_str(&fs::read_to_string(&path)?)?) };
            recordings.push(read().with_context(|| format!("read {}", path.display()))?);
        }
    }
    Ok(recordings)
}

fn render(recordings: &[Recording]) -> String {
    let mut text = String::from(HEADER);
    for Recording { results, .. } in recordings {
        for row in results.rows.iter().filter(|row| row.name.starts_with("weir ")) {
            let targets: Vec<_> = targets_of(results, row).collect();
            if targets.is_empty() {
                text += &line(&row.name, Some(row), None, p99_target(results, row));
            }
            for target in targets {
                text += &line(&target.name, Some(row), Some(target), p99_target(results, row));
            }
        }
        let has_row = |target: &&Target| results.rows.iter().any(|row| is_about(target, row));
        for target in results.targets.iter().filter(|target| !has_row(target)) {
            text += &line(&target.name, None, Some(target), None);
        }
    }
    text += "\nMeasured on:\n\n";
    for (machine, parts) in &group_by_run(recordings) {
        text += &format!("- {machine}:\n  {}\n", parts.join(", "));
    }
    text
}

/// The parts that were measured on the same day in the same way, in the order of the table.
fn group_by_run(recordings: &[Recording]) -> Vec<(String, Vec<String>)> {
    let mut runs: Vec<(String, Vec<String>)> = Vec::new();
    for Recording { part, date, results } in recordings {
        let run = format!("{date}, {}, {} s each", results.machine, results.measured_s);
        let failed = if results.failures.is_empty() { "" } else { " (**checks failed**)" };
        let part = format!("{part}{failed}");
        match runs.iter_mut().find(|(of, _)| *of == run) {
            Some((_, parts)) => parts.push(part),
            None => runs.push((run, vec![part])),
        }
    }
    runs
}

/// The targets of a row, apart from that of its p99.
fn targets_of<'a>(results: &'a Results, row: &'a Row) -> impl Iterator<Item = &'a Target> {
    let is_p99 = |target: &&Target| p99_target(results, row).is_some_and(|p99| p99.name == target.name);
    results.targets.iter().filter(move |target| is_about(target, row) && !is_p99(target))
}

fn p99_target<'a>(results: &'a Results, row: &Row) -> Option<&'a Target> {
    let name = format!("{}, p99", row.name);
    results.targets.iter().find(|target| target.name == name && target.bound == Bound::Below(P99_TARGET_MS))
}

fn is_about(target: &Target, row: &Row) -> bool {
    let rest = target.name.strip_prefix(&row.name);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(" / ") || [", p50", ", p99"].contains(&rest))
}

fn line(name: &str, row: Option<&Row>, target: Option<&Target>, p99: Option<&Target>) -> String {
    let decimals = |value: Option<f64>| value.map(|value| format!("{value:.2}")).unwrap_or_default();
    let rate = row.map(|row| grouped(row.requests_per_s)).unwrap_or_default();
    let p99_missed = if p99.is_some_and(|target| !target.met) { " (missed)" } else { "" };
    let (measured, bound, verdict) = match target {
        Some(target) => {
            let [_, measured, bound, _] = table::verdict(target);
            (measured, bound, if target.met { "" } else { "missed" })
        }
        None => (
            row.and_then(|row| row.ratio).map(|ratio| format!("{ratio:.2} ×")).unwrap_or_default(),
            String::new(),
            "",
        ),
    };
    format!(
        "| {name} | {rate} | {} | {}{p99_missed} | {measured} | {bound} | {verdict} |\n",
        decimals(row.and_then(|row| row.p50_ms)),
        decimals(row.and_then(|row| row.p99_ms)),
    )
}

fn path_of(part: Part) -> PathBuf {
    root().join(format!("bench/results/{}.json", format!("{part:?}").to_lowercase()))
}

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}
