//! The two text formats of `/metrics`: `OpenMetrics`, which the library writes, and Prometheus's older text format, which is
//! converted from it. They differ in the names of counter families and in a few lines that only `OpenMetrics` has.

use std::fmt::Write;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricsFormat {
    /// `OpenMetrics` 1.0.0.
    OpenMetrics,
    /// Prometheus's text format 0.0.4.
    PrometheusText,
}

impl MetricsFormat {
    /// Chooses by the header `Accept`: `OpenMetrics` if it is named and preferred, otherwise Prometheus's text format, which
    /// every client reads.
    #[must_use]
    pub fn from_accept(accept: &str) -> Self {
        let (mut open_metrics, mut text) = (0.0_f32, 0.0_f32);
        for range in accept.split(',') {
            let mut parts = range.split(';').map(str::trim);
            let kind = parts.next().unwrap_or_default().to_ascii_lowercase();
            let weight = parts.find_map(|part| part.strip_prefix("q=")).map_or(Some(1.0), |q| q.parse().ok());
            // An invalid weight excludes the range.
            let weight = weight.filter(|weight| (0.0..=1.0).contains(weight)).unwrap_or(0.0);
            match kind.as_str() {
                "application/openmetrics-text" => open_metrics = open_metrics.max(weight),
                "text/plain" | "text/*" => text = text.max(weight),
                _ => {}
            }
        }
        if open_metrics > 0.0 && open_metrics >= text { Self::OpenMetrics } else { Self::PrometheusText }
    }

    /// The value of `Content-Type`.
    #[must_use]
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::PrometheusText => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// Converts `OpenMetrics` text to Prometheus's text format.
pub(super) fn to_prometheus_text(open_metrics: &str) -> String {
    let mut text = String::with_capacity(open_metrics.len());
    // The help of a family comes before its type, and the type decides the family's name.
    let mut help = None;
    for line in open_metrics.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = rest.split_once(' ');
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
        {
            let (suffix, kind) = match kind {
                "counter" => ("_total", "counter"),
                "info" => ("_info", "gauge"),
                "unknown" => ("", "untyped"),
                kind => ("", kind),
            };
            // Writing to a string cannot fail.
            if let Some((_, help)) = help.take().filter(|(family, _)| *family == name) {
                let _ = writeln!(text, "# HELP {name}{suffix} {help}");
            }
            let _ = writeln!(text, "# TYPE {name}{suffix} {kind}");
        } else if !line.starts_with('#') {
            let _ = writeln!(text, "{line}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_metrics_is_chosen_only_when_accept_names_and_prefers_it() {
        use MetricsFormat::{OpenMetrics, PrometheusText};
        let prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,\
                          application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        for (accept, format) in [
            (prometheus, OpenMetrics),
            ("application/openmetrics-text", OpenMetrics),
            ("text/html, Application/OpenMetrics-Text; charset=utf-8", OpenMetrics),
            ("application/openmetrics-text, text/plain", OpenMetrics),
            ("application/openmetrics-text;q=0.1, text/plain", PrometheusText),
            ("application/openmetrics-text;q=0", PrometheusText),
            ("application/openmetrics-text;q=x", PrometheusText),
            ("*/*", PrometheusText),
            ("text/plain;version=0.0.4", PrometheusText),
            ("text/html,application/xhtml+xml,*/*;q=0.8", PrometheusText),
            ("", PrometheusText),
        ] {
            assert_eq!(MetricsFormat::from_accept(accept), format, "{accept}");
        }
    }

    #[test]
    fn counter_families_are_named_like_their_samples() {
        let open_metrics = "# HELP a Some help.\n# TYPE a counter\n# UNIT a bytes\na_total{b=\"c\"} 1\n\
                            # HELP e More.\n# TYPE e gauge\ne 2\n# HELP f Last.\n# TYPE f unknown\nf 3\n# EOF\n";
        let text = "# HELP a_total Some help.\n# TYPE a_total counter\na_total{b=\"c\"} 1\n\
                    # HELP e More.\n# TYPE e gauge\ne 2\n# HELP f Last.\n# TYPE f untyped\nf 3\n";
        assert_eq!(to_prometheus_text(open_metrics), text);
    }
}
