//! Collects the output of a child process line by line.

use std::io::{BufRead, BufReader, Read};
use std::process::Child;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;

use crate::wait::becomes_true_blocking;

#[derive(Clone, Copy, PartialEq)]
enum Stream {
    Stdout,
    Stderr,
}

type Lines = Vec<(Stream, String)>;

#[derive(Default)]
pub(super) struct Log {
    lines: Arc<Mutex<Lines>>,
    /// Index of the current process's first line; earlier lines are from before a restart.
    start: usize,
    readers: Vec<JoinHandle<()>>,
}

impl Log {
    /// Collects the output of a process that was just started.
    pub(super) fn follow(&mut self, child: &mut Child) {
        let start = self.lines.lock().len();
        self.start = start;
        let stdout = child.stdout.take().expect("stdout was piped");
        let stderr = child.stderr.take().expect("stderr was piped");
        self.readers = vec![self.read(Stream::Stdout, stdout), self.read(Stream::Stderr, stderr)];
    }

    fn read(&self, stream: Stream, from: impl Read + Send + 'static) -> JoinHandle<()> {
        let lines = Arc::clone(&self.lines);
        std::thread::spawn(move || {
            // Split as bytes: reading must continue after invalid UTF-8, or the child would block.
            for line in BufReader::new(from).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).into_owned();
                lines.lock().push((stream, line));
            }
        })
    }

    /// Waits for the last lines of a process that has exited.
    pub(super) fn finish(&self) {
        let finished = || self.readers.iter().all(JoinHandle::is_finished);
        assert!(
            becomes_true_blocking(Duration::from_secs(10), finished),
            "weir exited, but another process holds its output open"
        );
    }

    pub(super) fn lines(&self) -> Vec<String> {
        self.lines.lock().iter().map(|(_, line)| line.clone()).collect()
    }

    pub(super) fn text(&self) -> String {
        self.lines().join("\n")
    }

    /// The current process's first line on standard output with `text` in it.
    pub(super) fn find_on_stdout(&self, text: &str) -> Option<String> {
        let lines = self.lines.lock();
        let mut current = lines.iter().skip(self.start);
        current
            .find(|(stream, line)| *stream == Stream::Stdout && line.contains(text))
            .map(|(_, line)| line.clone())
    }
}
