//! Logs go to standard output: lines for people on a terminal, JSON otherwise.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

use super::log_writer::Lines;
use crate::settings::log::{LogFormat, LogSettings};

/// Events of this target are shown whatever the level: the line that says the server is ready.
pub const READY: &str = "weir::ready";

/// Starts logging for the whole process; later calls change nothing.
pub fn init(settings: &LogSettings) {
    let filter = EnvFilter::builder().parse_lossy(&settings.level);
    let filter = match format!("{READY}=info").parse() {
        Ok(always) => filter.add_directive(always),
        Err(_invalid) => filter,
    };
    let human = is_human(settings.format);
    // It reports its own failures on standard error, which panics when that fails too.
    let builder =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(Lines).log_internal_errors(false);
    // A second start in one process (tests) keeps the first one's output.
    let _ = if human {
        builder.with_target(false).with_ansi(std::io::stdout().is_terminal()).try_init()
    } else {
        builder.json().flatten_event(true).with_current_span(false).with_span_list(false).try_init()
    };
}

/// Whether lines are for people: asked for, or on a terminal.
#[must_use]
pub fn is_human(format: LogFormat) -> bool {
    match format {
        LogFormat::Human => true,
        LogFormat::Json => false,
        LogFormat::Auto => std::io::stdout().is_terminal(),
    }
}
