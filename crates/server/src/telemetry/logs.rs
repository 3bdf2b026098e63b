//! Sets up logging to standard output: lines for people on a terminal, JSON otherwise.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

use super::log_writer::LogWriter;
use crate::settings::log::{LogFormat, LogSettings};

/// Target of the line that says the server is ready. Its events are written at every log level.
pub const READY: &str = "weir::ready";

/// Starts logging for the whole process. Later calls change nothing, so tests that start several servers in one
/// process share the first one's output.
pub fn init(settings: &LogSettings) {
    let filter = EnvFilter::builder().parse_lossy(&settings.level);
    let filter = match format!("{READY}=info").parse() {
        Ok(always) => filter.add_directive(always),
        Err(_invalid) => filter,
    };
    // The subscriber reports its own failures on standard error, which panics when that fails too.
    let builder =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(LogWriter).log_internal_errors(false);
    let _ = if is_human(settings.format) {
        builder.with_target(false).with_ansi(std::io::stdout().is_terminal()).try_init()
    } else {
        builder.json().flatten_event(true).with_current_span(false).with_span_list(false).try_init()
    };
}

/// Whether lines are written for people: set so, or standard output is a terminal.
#[must_use]
pub fn is_human(format: LogFormat) -> bool {
    match format {
        LogFormat::Human => true,
        LogFormat::Json => false,
        LogFormat::Auto => std::io::stdout().is_terminal(),
    }
}
