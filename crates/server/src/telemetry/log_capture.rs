//! Log lines for tests: returns what a function has logged on its own thread.

use std::cell::RefCell;
use std::io::Write;
use std::sync::Once;

use tracing_subscriber::EnvFilter;

static SUBSCRIBER: Once = Once::new();

thread_local! {
    static CAPTURED: RefCell<Option<Vec<u8>>> = const { RefCell::new(None) };
}

/// Runs a function and returns its log lines, of every level.
pub(crate) fn capture(run: impl FnOnce()) -> String {
    // One subscriber for the whole process: with one per test, a call site that another test reaches first may be
    // registered as disabled.
    SUBSCRIBER.call_once(|| {
        let subscriber = tracing_subscriber::fmt()
            .with_env_filter(EnvFilter::new("weir=trace,weir_server=trace"))
            .with_ansi(false)
            .with_writer(|| CaptureWriter)
            .finish();
        tracing::subscriber::set_global_default(subscriber).expect("no other subscriber in these tests");
        tracing::callsite::rebuild_interest_cache();
    });
    CAPTURED.set(Some(Vec::new()));
    run();
    let lines = CAPTURED.take().unwrap_or_default();
    String::from_utf8(lines).expect("log lines are UTF-8")
}

/// Appends to the lines of the thread if it captures, and discards them otherwise.
struct CaptureWriter;

impl Write for CaptureWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        CAPTURED.with_borrow_mut(|lines| {
            if let Some(lines) = lines {
                lines.extend_from_slice(bytes);
            }
        });
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
