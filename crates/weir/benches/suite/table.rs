//! Formats the results for people: measurements in order, targets and notes.

use crate::HOT;
use crate::results::{Bound, Results, Row, Sender, Target};

const MEASURED: [&str; 8] =
    ["", "requests/s", "p50 ms", "p99 ms", "failed", "generator cores", "sender behind", "ratio"];
const TARGET_HEADINGS: [&str; 4] = ["target", "measured", "bound", "result"];

pub(crate) fn render(results: &Results) -> String {
    let mut measured = vec![MEASURED.map(str::to_owned)];
    measured.extend(results.rows.iter().map(measurement));
    let mut rows = vec![TARGET_HEADINGS.map(str::to_owned)];
    rows.extend(results.targets.iter().map(verdict));
    let mut lines = vec![results.machine.clone(), format!("measured for {} s each", results.measured_s)];
    lines.push(String::new());
    if !results.rows.is_empty() {
        lines.extend(align(&measured));
        lines.push(String::new());
    }
    lines.extend(align(&rows));
    lines.push(String::new());
    lines.extend(results.notes.iter().map(|note| format!("note: {note}")));
    lines.extend(results.failures.iter().map(|failure| format!("CHECK FAILED: {failure}")));
    let held = results.failures.is_empty();
    let conclusion = if held { "every check held" } else { "checks failed: these numbers mean nothing" };
    format!("{}\n{conclusion}\n", lines.join("\n"))
}

fn measurement(row: &Row) -> [String; MEASURED.len()] {
    let decimals = |value: Option<f64>| value.map(|value| format!("{value:.2}")).unwrap_or_default();
    [
        row.name.clone(),
        grouped(row.requests_per_s),
        decimals(row.p50_ms),
        decimals(row.p99_ms),
        grouped(row.failed as f64),
        decimals(row.generator_cores),
        row.sender.map(lag).unwrap_or_default(),
        decimals(row.ratio),
    ]
}

fn lag(sender: Sender) -> String {
    let longer = if sender.caught_up { "" } else { "> " };
    format!("{} msgs, {longer}{:.1} s", grouped(sender.backlog as f64), sender.lag_s)
}

pub(crate) fn verdict(target: &Target) -> [String; TARGET_HEADINGS.len()] {
    let unit = &target.unit;
    let bound = match target.bound {
        Bound::AtLeast(least) => format!("≥ {least} {unit}"),
        Bound::Below(limit) => format!("< {limit} {unit}"),
    };
    let result = if target.met { "pass" } else { "MISS" };
    [target.name.clone(), format!("{:.2} {unit}", target.measured), bound, result.to_owned()]
}

/// Pads columns to equal width: the first aligned left, the others right.
fn align<const N: usize>(rows: &[[String; N]]) -> Vec<String> {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    let line = |row: &[String; N]| {
        let rest = row.iter().zip(widths).skip(1).map(|(cell, width)| format!("  {cell:>width$}"));
        format!("{:<width$}{}", row[0], rest.collect::<String>(), width = widths[0]).trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

/// Formats the number of keys or rows of a load.
pub(crate) fn spread(keys: u64, noun: &str) -> String {
    if keys == HOT { format!("one hot {noun}") } else { format!("{} {noun}s", grouped(keys as f64)) }
}

/// Formats a whole number with thousands separators.
pub(crate) fn grouped(value: f64) -> String {
    let digits = format!("{:.0}", value.max(0.0));
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
