//! Child processes: their output in files, a check that a server is ready, and termination on every path.
//!
//! A server logs a line per message. Its output goes to a file and not to a pipe, because writing to a file wakes no
//! reader.

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
/// The time a process has after SIGTERM when the suite itself is terminated.
const DROPPED_STOPS_WITHIN: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(10);
const SHOWN_BYTES: u64 = 4 * 1024;

/// A running child process. When dropped, it gets SIGTERM and, if that does not suffice, SIGKILL.
pub(crate) struct Process {
    child: Child,
    /// The log file with its output.
    log: PathBuf,
}

impl Process {
    /// Starts `command` in `directory`, which is created and gets the log file.
    pub(crate) fn spawn(command: Command, directory: &Path) -> Result<Self> {
        Self::start(command, directory, Stdio::from)
    }

    /// Starts `command` with a pipe as its standard output, which the caller must read to the end.
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

    /// Waits for the line with `weir ready`, and returns the URL in it.
    pub(crate) async fn ready_url(&mut self) -> Result<String> {
        let deadline = Instant::now() + READY_WITHIN;
        loop {
            // Checked before the log is read, so that the last line before an exit is not missed.
            let exited = self.child.try_wait().context("check a child process")?;
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

    /// Waits for the process to end by itself; fails after `limit`.
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

    /// Sends SIGTERM and waits; fails unless the process exits with success.
    pub(crate) async fn stop(mut self) -> Result<()> {
        self.terminate();
        let status = self.wait(STOPS_WITHIN).await.context("after SIGTERM")?;
        ensure!(status.success(), "it ended with {status} after SIGTERM: {}", self.output());
        Ok(())
    }

    /// Returns the end of its output so far, or nothing if the file cannot be read.
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
        // Fails only if the process has ended already.
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let deadline = Instant::now() + DROPPED_STOPS_WITHIN;
        // Checked before the signal: the id of a reaped process may belong to another process by now.
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

/// The server binary, unless it is the one that was just built.
static SERVER: Mutex<Option<PathBuf>> = Mutex::new(None);

/// Sets the server binary; `None` selects the one that was just built.
pub(crate) fn set_server(path: Option<&Path>) {
    *SERVER.lock() = path.map(Path::to_owned);
}

pub(crate) fn server() -> Command {
    let server = SERVER.lock().clone();
    server.map_or_else(weir, |path| without_settings(Command::new(path)))
}

/// The `weir` binary that was just built, which also provides the empty handler and signs tokens.
pub(crate) fn weir() -> Command {
    without_settings(Command::new(env!("CARGO_BIN_EXE_weir")))
}

/// Removes all Weir settings from the environment.
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
