//! How long calls of an engine take, as histograms and as spans of the trace that they belong to. Each engine creates its own
//! and passes clones to its parts.

use std::fmt;
use std::time::Instant;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::spans::{self, Span, SpanKind};

/// Bucket bounds in seconds.
const BUCKETS: [f64; 16] =
    [0.000_1, 0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0];

/// Clones share the histograms.
#[derive(Clone)]
pub struct EngineCalls {
    engine: &'static str,
    seconds: Family<CallLabels, Histogram, fn() -> Histogram>,
}

/// One of an engine's few kinds of calls.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabels {
    call: &'static str,
}

impl EngineCalls {
    #[must_use]
    pub fn new(engine: &'static str) -> Self {
        Self { engine, seconds: Family::new_with_constructor(|| Histogram::new(BUCKETS)) }
    }

    /// Begins to time a call. It ends when the timer is dropped: with an answer, an error, or because its caller went away.
    #[must_use]
    pub fn start(&self, call: &'static str) -> CallTimer<'_> {
        CallTimer { calls: self, call, started: Instant::now() }
    }

    /// Registers the histograms under the engine's name.
    pub fn register(&self, r: &mut Registry) {
        let (name, help) =
            (format!("{}_call_seconds", self.engine), "Duration of calls, by kind, in seconds");
        r.register(name, help, self.seconds.clone());
    }
}

impl fmt::Debug for EngineCalls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineCalls").field("engine", &self.engine).finish_non_exhaustive()
    }
}

/// A call that has begun.
#[derive(Debug)]
pub struct CallTimer<'a> {
    calls: &'a EngineCalls,
    call: &'static str,
    started: Instant,
}

impl Drop for CallTimer<'_> {
    fn drop(&mut self) {
        let Self { calls, call, started } = self;
        // Looked up at the end: a batch has its span once the engine has taken it.
        if let Some(parent) = spans::current() {
            let span = Span::begin(parent, format!("{} {call}", calls.engine), SpanKind::Client);
            drop(span.map(|span| span.since(*started)));
        }
        let labels = CallLabels { call };
        self.calls.seconds.get_or_create(&labels).observe(self.started.elapsed().as_secs_f64());
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text;

    use super::*;

    #[test]
    fn calls_are_timed_by_kind_also_when_they_fail_or_are_dropped() {
        let calls = EngineCalls::new("engine");
        drop(calls.start("read"));
        drop(calls.start("read"));
        drop(calls.start("write"));
        let (mut registry, mut shown) = (Registry::default(), String::new());
        calls.register(&mut registry);
        text::encode(&mut shown, &registry).unwrap();
        for line in
            ["engine_call_seconds_count{call=\"read\"} 2", "engine_call_seconds_count{call=\"write\"} 1"]
        {
            assert!(shown.contains(line), "{line} is not in:\n{shown}");
        }
    }
}
