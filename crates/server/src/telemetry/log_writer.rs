//! Where log lines go: to a thread that writes them. Whoever logs never waits for whoever reads the log; when that
//! one is too slow, lines are dropped and counted, and the server goes on.
//!
//! A busy server logs a line for every request. Woken for each, the thread would cost it several system calls a line, so it
//! lets lines gather for a moment and writes them together.

use std::io::Write;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use tracing_subscriber::fmt::MakeWriter;

/// Lines that may wait to be written.
const WAITING_MAX: usize = 4_096;
/// How long lines gather behind the first. Few enough come in that time to leave room for more.
const GATHERED_FOR: Duration = Duration::from_millis(1);
/// Bytes written at once, about.
const WRITTEN_MAX: usize = 64 << 10;

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
    let (mut text, mut marks) = (Vec::new(), Vec::new());
    for first in items {
        if let Item::Line(_) = first {
            std::thread::sleep(GATHERED_FOR);
        }
        gather(first, items, &mut text, &mut marks);
        let dropped = DROPPED.swap(0, Ordering::Relaxed);
        if dropped > 0 {
            let line = format!("{{\"level\":\"WARN\",\"message\":\"{dropped} log lines were dropped\"}}\n");
            text.extend_from_slice(line.as_bytes());
        }
        write(&text);
        text.clear();
        for written in marks.drain(..) {
            let _ = SyncSender::try_send(&written, ());
        }
    }
}

/// Puts together what waits, as far as it is written at once.
fn gather(first: Item, items: &Receiver<Item>, text: &mut Vec<u8>, marks: &mut Vec<SyncSender<()>>) {
    let mut next = Some(first);
    while let Some(item) = next {
        match item {
            Item::Line(line) => text.extend_from_slice(&line),
            Item::Mark(written) => marks.push(written),
        }
        next = if text.len() < WRITTEN_MAX { items.try_recv().ok() } else { None };
    }
}

/// Nobody can be told that the log cannot be written.
fn write(text: &[u8]) {
    let mut stdout = std::io::stdout().lock();
    let _ = stdout.write_all(text).and_then(|()| stdout.flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_waits_is_put_together_in_order_and_a_mark_stands_for_all_before_it() {
        let (sender, items) = sync_channel(10);
        let (written, _wait) = sync_channel(1);
        sender.send(Item::Line(b"b\n".to_vec())).unwrap();
        sender.send(Item::Mark(written)).unwrap();
        sender.send(Item::Line(vec![b'c'; WRITTEN_MAX])).unwrap();
        sender.send(Item::Line(b"d\n".to_vec())).unwrap();
        let (mut text, mut marks) = (Vec::new(), Vec::new());
        gather(Item::Line(b"a\n".to_vec()), &items, &mut text, &mut marks);
        assert!(text.starts_with(b"a\nb\nc") && text.len() == WRITTEN_MAX + 4, "{} bytes", text.len());
        assert_eq!(marks.len(), 1);
        assert!(
            matches!(items.try_recv(), Ok(Item::Line(line)) if line == b"d\n"),
            "it is for the next writing"
        );
    }
}
