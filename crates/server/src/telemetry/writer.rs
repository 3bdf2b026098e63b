//! Where log lines go: to a thread that writes them. Whoever logs never waits for whoever reads the log; when that
//! one is too slow, lines are dropped and counted, and the server goes on.

use std::io::Write;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use tracing_subscriber::fmt::MakeWriter;

/// Lines that may wait to be written.
const WAITING_MAX: usize = 4_096;

static LINES: OnceLock<SyncSender<Item>> = OnceLock::new();
static DROPPED: AtomicU64 = AtomicU64::new(0);

enum Item {
    Line(Vec<u8>),
    /// Asks to be told when everything before it is written.
    Mark(SyncSender<()>),
}

/// Makes a writer for each event.
#[derive(Clone, Copy, Debug)]
pub struct Lines;

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Line;

    fn make_writer(&'a self) -> Line {
        Line(Vec::new())
    }
}

/// One event's line, handed over when it is complete.
#[derive(Debug)]
pub struct Line(Vec<u8>);

impl Write for Line {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        let line = Item::Line(std::mem::take(&mut self.0));
        if lines().try_send(line).is_err() {
            DROPPED.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Waits until what was logged so far is written, at most so long.
pub fn flush(at_most: Duration) {
    let (written, wait) = sync_channel(1);
    if lines().try_send(Item::Mark(written)).is_ok() {
        let _ = wait.recv_timeout(at_most);
    }
}

fn lines() -> &'static SyncSender<Item> {
    LINES.get_or_init(|| {
        let (sender, receiver) = sync_channel(WAITING_MAX);
        // Without a thread the receiver is gone and every line counts as dropped: a server without logs, not a dead one.
        let _ = std::thread::Builder::new().name("weir-log".into()).spawn(move || write_all(&receiver));
        sender
    })
}

fn write_all(items: &Receiver<Item>) {
    for item in items {
        match item {
            Item::Line(line) => write(&line),
            Item::Mark(written) => {
                let _ = written.try_send(());
            }
        }
        let dropped = DROPPED.swap(0, Ordering::Relaxed);
        if dropped > 0 {
            write(
                format!("{{\"level\":\"WARN\",\"message\":\"{dropped} log lines were dropped\"}}\n")
                    .as_bytes(),
            );
        }
    }
}

/// Nobody can be told that the log cannot be written.
fn write(line: &[u8]) {
    let mut stdout = std::io::stdout().lock();
    let _ = stdout.write_all(line).and_then(|()| stdout.flush());
}
