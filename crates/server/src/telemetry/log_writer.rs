//! Writes log lines to standard output on a thread of its own. Code that logs never waits for whoever reads the log:
//! when the reader is too slow, lines are dropped and counted, and the server continues.
//!
//! A busy server logs a line for every request. Waking the thread for each one would cost several system calls per line,
//! so the thread lets lines collect for a moment and writes them together.

use std::io::Write;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use tracing_subscriber::fmt::MakeWriter;

/// Lines that may wait to be written.
const QUEUE_MAX: usize = 4_096;
/// How long lines collect after the first one. Few enough arrive in that time that the queue keeps room for more.
const COLLECT_TIME: Duration = Duration::from_millis(1);
/// A write ends after the line that reaches this many bytes.
const WRITE_BYTES: usize = 64 << 10;

static QUEUE: OnceLock<SyncSender<LogItem>> = OnceLock::new();
static DROPPED: AtomicU64 = AtomicU64::new(0);

enum LogItem {
    Line(Vec<u8>),
    /// Asks for a notification when everything before it is written.
    Flush(SyncSender<()>),
}

/// Creates a writer for each log event.
#[derive(Clone, Copy, Debug)]
pub struct LogWriter;

impl<'a> MakeWriter<'a> for LogWriter {
    type Writer = LineWriter;

    fn make_writer(&'a self) -> LineWriter {
        LineWriter(Vec::new())
    }
}

/// Collects one event's line and queues it when dropped.
#[derive(Debug)]
pub struct LineWriter(Vec<u8>);

impl Write for LineWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Drop for LineWriter {
    fn drop(&mut self) {
        let line = LogItem::Line(std::mem::take(&mut self.0));
        if queue().try_send(line).is_err() {
            DROPPED.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Waits until everything logged so far is written, but no longer than `timeout`.
pub fn flush(timeout: Duration) {
    let (written, wait) = sync_channel(1);
    if queue().try_send(LogItem::Flush(written)).is_ok() {
        let _ = wait.recv_timeout(timeout);
    }
}

fn queue() -> &'static SyncSender<LogItem> {
    QUEUE.get_or_init(|| {
        let (sender, receiver) = sync_channel(QUEUE_MAX);
        // If the thread cannot be started, every line counts as dropped: the server runs without logs.
        let _ = std::thread::Builder::new().name("weir-log".into()).spawn(move || write_all(&receiver));
        sender
    })
}

fn write_all(items: &Receiver<LogItem>) {
    let (mut text, mut flushes) = (Vec::new(), Vec::new());
    for first in items {
        if let LogItem::Line(_) = first {
            std::thread::sleep(COLLECT_TIME);
        }
        collect(first, items, &mut text, &mut flushes);
        let dropped = DROPPED.swap(0, Ordering::Relaxed);
        if dropped > 0 {
            let line = format!("{{\"level\":\"WARN\",\"message\":\"{dropped} log lines were dropped\"}}\n");
            text.extend_from_slice(line.as_bytes());
        }
        write(&text);
        text.clear();
        for written in flushes.drain(..) {
            let _ = SyncSender::try_send(&written, ());
        }
    }
}

/// Takes queued items until `text` is large enough for one write.
fn collect(first: LogItem, items: &Receiver<LogItem>, text: &mut Vec<u8>, flushes: &mut Vec<SyncSender<()>>) {
    let mut next = Some(first);
    while let Some(item) = next {
        match item {
            LogItem::Line(line) => text.extend_from_slice(&line),
            LogItem::Flush(written) => flushes.push(written),
        }
        next = if text.len() < WRITE_BYTES { items.try_recv().ok() } else { None };
    }
}

/// Ignores errors: there is nowhere to report that the log cannot be written.
fn write(text: &[u8]) {
    let mut stdout = std::io::stdout().lock();
    let _ = stdout.write_all(text).and_then(|()| stdout.flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queued_lines_are_collected_in_order_up_to_the_size_of_a_write() {
        let (sender, items) = sync_channel(10);
        let (written, _wait) = sync_channel(1);
        sender.send(LogItem::Line(b"b\n".to_vec())).unwrap();
        sender.send(LogItem::Flush(written)).unwrap();
        sender.send(LogItem::Line(vec![b'c'; WRITE_BYTES])).unwrap();
        sender.send(LogItem::Line(b"d\n".to_vec())).unwrap();
        let (mut text, mut flushes) = (Vec::new(), Vec::new());
        collect(LogItem::Line(b"a\n".to_vec()), &items, &mut text, &mut flushes);
        assert!(text.starts_with(b"a\nb\nc") && text.len() == WRITE_BYTES + 4, "{} bytes", text.len());
        assert_eq!(flushes.len(), 1);
        assert!(
            matches!(items.try_recv(), Ok(LogItem::Line(line)) if line == b"d\n"),
            "the last line waits for the next write"
        );
    }
}
