//! A comparison as text: one aligned row per target, then errors and caveats.

use super::{Comparison, ErrorCounts, Report};

const HEADINGS: [&str; 9] =
    ["", "requests", "requests/s", "p50 ms", "p90 ms", "p99 ms", "p99.9 ms", "max ms", "errors"];

pub(super) fn render(comparison: &Comparison) -> String {
    let reports = || std::iter::once(&comparison.result).chain(&comparison.baseline);
    let mut rows = vec![HEADINGS.map(str::to_owned)];
    rows.extend(reports().map(cells));
    if let Some(ratio) = comparison.ratio {
        let mut row = [""; HEADINGS.len()].map(str::to_owned);
        row[0] = "ratio".to_owned();
        row[2] = format!("{ratio:.3}");
        rows.push(row);
    }
    let mut lines = align(&rows);
    lines.push(String::new());
    lines.push(conditions(&comparison.result));
    lines.extend(reports().map(outcomes));
    lines.extend(comparison.notes.iter().map(|note| format!("note: {note}")));
    lines.join("\n")
}

fn cells(report: &Report) -> [String; HEADINGS.len()] {
    let latency = &report.latency_ms;
    let ms = |value: f64| format!("{value:.3}");
    [
        report.name.clone(),
        grouped(report.requests as f64),
        grouped(report.requests_per_s),
        ms(latency.p50),
        ms(latency.p90),
        ms(latency.p99),
        ms(latency.p999),
        ms(latency.max),
        grouped(report.errors.total() as f64),
    ]
}

/// Pads columns to one width: names to the left, numbers to the right.
fn align(rows: &[[String; HEADINGS.len()]]) -> Vec<String> {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..HEADINGS.len()).map(width).collect();
    let line = |row: &[String; HEADINGS.len()]| {
        let numbers = row.iter().zip(&widths).skip(1).map(|(cell, width)| format!("  {cell:>width$}"));
        let text = format!("{:<width$}{}", row[0], numbers.collect::<String>(), width = widths[0]);
        text.trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

fn conditions(report: &Report) -> String {
    let pace = match report.rate_per_s {
        Some(rate) => format!("open loop at {}/s", grouped(f64::from(rate.get()))),
        None => "closed loop".to_owned(),
    };
    format!(
        "{} connections, {pace}, {}, {} s after {} s of warm-up",
        report.connections,
        counted(report.keys, "key"),
        report.duration_s,
        report.warmup_s
    )
}

fn outcomes(report: &Report) -> String {
    let statuses =
        report.statuses.iter().map(|(status, count)| format!("{status}: {}", grouped(*count as f64)));
    let ErrorCounts { connect, reset, timeout, protocol } = report.errors;
    let kinds = [("connect", connect), ("reset", reset), ("timeout", timeout), ("protocol", protocol)];
    let errors =
        kinds.into_iter().filter(|(_, count)| *count > 0).map(|(kind, count)| format!("{kind}: {count}"));
    let counts: Vec<String> = statuses.chain(errors).collect();
    let threads = counted(report.threads as u64, "thread");
    format!(
        "{}: {}; generator {:.2} cores on {threads}",
        report.name,
        counts.join(", "),
        report.generator_cores
    )
}

fn counted(count: u64, noun: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{} {noun}{plural}", grouped(count as f64))
}

/// A whole number with its thousands set apart.
pub(super) fn grouped(value: f64) -> String {
    let digits = format!("{:.0}", value.max(0.0));
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::tests::sample;
    use super::*;

    #[test]
    fn thousands_are_set_apart() {
        let cases = [(0.0, "0"), (999.4, "999"), (1000.0, "1,000"), (1_234_567.0, "1,234,567"), (-1.0, "0")];
        for (value, text) in cases {
            assert_eq!(grouped(value), text);
        }
    }

    #[test]
    fn columns_line_up_and_the_ratio_stands_under_the_rates() {
        let comparison =
            Comparison::new(sample("weir", 912_345), Some(sample("empty handler", 1_120_000)), Vec::new());
        let text = render(&comparison);
        let lines: Vec<&str> = text.lines().collect();
        let end = |line: &str, word: &str| line.find(word).unwrap() + word.len();
        let column = end(lines[0], "requests/s");
        assert_eq!(end(lines[1], "91,234"), column, "{text}");
        assert_eq!(end(lines[2], "112,000"), column, "{text}");
        assert_eq!(end(lines[3], "0.815"), column, "{text}");
        assert!(text.contains("128 connections, closed loop, 1 key"), "{text}");
    }

    #[test]
    fn statuses_errors_and_notes_are_spelled_out() {
        let mut report = sample("weir", 10);
        report.statuses.insert(503, 2);
        report.errors.reset = 4;
        let text = render(&Comparison::new(report, None, vec!["in memory".to_owned()]));
        assert!(text.contains("weir: 200: 10, 503: 2, reset: 4; generator 0.50 cores on 1 thread"), "{text}");
        assert!(text.contains("note: in memory") && !text.contains("ratio"), "{text}");
    }
}
