//! Child processes: output to files, one way to find out that a server is ready, and an end on every path.
//!
//! A server logs a line for each message, so its output goes to a file, which wakes nobody, not to a pipe.

use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process};
use tokio::time::sleep;

const READY_WITHIN: Duration = Duration::from_secs(30);
const STOPS_WITHIN: Duration = Duration::from_secs(20);
/// What a process gets after SIGTERM when the suite itself is being ended.
const DROPPED_STOPS_WITHIN: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(10);
const SHOWN_BYTES: u64 = 4 * 1024;

/// A running child. Dropped, it is sent SIGTERM and, should that not do, killed.
pub(crate) struct Process {
    child: Child,
    /// Where its output goes: `output.log` there.
    log: PathBuf,
}

impl Process {
    /// Starts `command` in `directory`, which is created and takes its output.
    pub(crate) fn spawn(command: Command, directory: &Path) -> Result<Self> {
        Self::start(command, directory, Stdio::from)
    }

    /// The same, but its standard output is a pipe, to be read to its end.
    pub(crate) fn spawn_piped(command: Command, directory: &Path) -> Result<(Self, ChildStdout)> {
        let mut process = Self::start(command, directory, |_log| Stdio::piped())?;
        let stdout = process.child.stdout.take().context("stdout was piped")?;
        Ok((process, stdout))
    }

    fn start(mut command: Command, directory: &Path, stdout: impl FnOnce(File) -> Stdio) -> Result<Self> {
        fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
        let log = directory.join("output.log");
        let output = File::create(&log).with_context(|| format!("create {}", log.display()))?;
        command.current_dir(directory).stdin(Stdio::null()).stderr(output.try_clone()?);
        command.stdout(stdout(output));
        let child = command.spawn().with_context(|| format!("run {}", command.get_program().display()))?;
        Ok(Self { child, log })
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the line that says `weir ready`, and returns the URL in it.
    pub(crate) async fn ready_url(&mut self) -> Result<String> {
        let deadline = Instant::now() + READY_WITHIN;
        loop {
            // Asked before the log is read, so that an exit cannot overtake the last line.
            let exited = self.child.try_wait().context("look after a child process")?;
            if let Some(url) = url_when_ready(&self.output()) {
                return Ok(url);
            }
            if let Some(status) = exited {
                bail!("it ended with {status} before it was ready: {}", self.output());
            }
            ensure!(Instant::now() < deadline, "it was not ready within {READY_WITHIN:?}: {}", self.output());
            sleep(POLL).await;
        }
    }

    /// Waits for it to end by itself; past the limit it is stopped and that is an error.
    pub(crate) async fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait().context("wait for a child process")? {
                return Ok(status);
            }
            ensure!(Instant::now() < deadline, "it did not end within {limit:?}: {}", self.output());
            sleep(POLL).await;
        }
    }

    /// SIGTERM, and it has to end well.
    pub(crate) async fn stop(mut self) -> Result<()> {
        self.terminate();
        let status = self.wait(STOPS_WITHIN).await.context("after SIGTERM")?;
        ensure!(status.success(), "it ended with {status} after SIGTERM: {}", self.output());
        Ok(())
    }

    /// The end of what it wrote so far; a file that cannot be read counts as nothing written.
    pub(crate) fn output(&self) -> String {
        let read = || -> std::io::Result<Vec<u8>> {
            let mut file = File::open(&self.log)?;
            let length = file.metadata()?.len();
            file.seek(SeekFrom::Start(length.saturating_sub(SHOWN_BYTES)))?;
            let mut bytes = Vec::new();
            file.take(SHOWN_BYTES).read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        String::from_utf8_lossy(&read().unwrap_or_default()).into_owned()
    }

    fn terminate(&self) {
        // A process that is gone already cannot be told to go.
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let deadline = Instant::now() + DROPPED_STOPS_WITHIN;
        // The first look is before the signal: the number of a reaped process may be a stranger's by now.
        if !matches!(self.child.try_wait(), Ok(None)) {
            return;
        }
        self.terminate();
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
            std::thread::sleep(POLL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The binary that serves, where it is not the one that was just built.
static SERVER: Mutex<Option<PathBuf>> = Mutex::new(None);

/// Has this binary serve from now on; without one, the one that was just built.
pub(crate) fn set_server(path: Option<&Path>) {
    *SERVER.lock() = path.map(Path::to_owned);
}

/// The server under test.
pub(crate) fn server() -> Command {
    let server = SERVER.lock().clone();
    server.map_or_else(weir, |path| without_settings(Command::new(path)))
}

/// The `weir` that was just built: it also is the empty handler, and signs tokens.
pub(crate) fn weir() -> Command {
    without_settings(Command::new(env!("CARGO_BIN_EXE_weir")))
}

/// Leaves out every setting of the person who runs the suite.
fn without_settings(mut command: Command) -> Command {
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"WEIR_")) {
        command.env_remove(name);
    }
    command.env("WEIR_LISTEN", "127.0.0.1:0").env("WEIR_GRPC_LISTEN", "127.0.0.1:0");
    command
}

fn url_when_ready(output: &str) -> Option<String> {
    let complete = &output[..=output.rfind('\n')?];
    let line = complete.lines().find(|line| line.contains("weir ready"))?;
    let address = &line[line.find("http://")? + "http://".len()..];
    let end =
        address.find(|c: char| !c.is_ascii_alphanumeric() && !".:".contains(c)).unwrap_or(address.len());
    Some(format!("http://{}", &address[..end]))
}
