//! A server as a child process of the same binary: starts it, waits until it is ready, stops it with SIGTERM.
//!
//! Its output goes to files, not pipes: a server that logs a line per message must not wake the generator for it.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout};

const START_LIMIT: Duration = Duration::from_secs(30);
const STOP_LIMIT: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(20);
/// How much output to show: enough for a start. A server that logs each message may have written far more by its end.
const TAIL_BYTES: u64 = 64 * 1024;
const STDOUT: &str = "stdout.log";
const STDERR: &str = "stderr.log";

/// A running server and the directory of its output. Dropping it ends the server and deletes the directory.
pub(crate) struct Server {
    process: Child,
    directory: TempDir,
    pub(crate) url: String,
}

impl Server {
    /// Starts the real server with an empty data directory and ports chosen by the system.
    pub(crate) async fn start_weir() -> Result<Self> {
        let directory = scratch()?;
        let data = directory.path().join("data");
        let mut command = this_binary()?;
        command.arg("serve").arg("--data").arg(data).args(["--listen", "127.0.0.1:0"]);
        Self::start(command, directory).await.context("start a private server")
    }

    /// Starts the baseline, an empty handler.
    pub(crate) async fn start_empty() -> Result<Self> {
        let mut command = this_binary()?;
        command.args(["bench", "empty", "--listen", "127.0.0.1:0"]);
        Self::start(command, scratch()?).await.context("start the empty handler")
    }

    async fn start(mut command: Command, directory: TempDir) -> Result<Self> {
        let output = |name: &str| File::create(directory.path().join(name)).map(Stdio::from);
        // The directory is also where the child looks for weir.toml: an operator's file must not shape the run.
        command.current_dir(directory.path()).kill_on_drop(true).stdin(Stdio::null());
        command.stdout(output(STDOUT)?).stderr(output(STDERR)?);
        let process = command.spawn().context("spawn the server process")?;
        let mut server = Self { process, directory, url: String::new() };
        server.url = server.wait_ready().await?;
        Ok(server)
    }

    async fn wait_ready(&mut self) -> Result<String> {
        let deadline = Instant::now() + START_LIMIT;
        loop {
            let exited = self.process.try_wait().context("look after the server process")?;
            if let Some(url) = ready_url(&self.tail(STDOUT)) {
                return Ok(url);
            }
            if let Some(status) = exited {
                bail!("the server ended with {status} before it was ready: {}", self.last_output());
            }
            ensure!(
                Instant::now() < deadline,
                "it was not ready within {START_LIMIT:?}: {}",
                self.last_output()
            );
            sleep(POLL).await;
        }
    }

    /// Stops the server with SIGTERM. Kills it, and fails, if it does not end in time.
    pub(crate) async fn stop(mut self) -> Result<()> {
        let pid = self.process.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        if let Some(pid) = pid {
            kill_process(pid, Signal::TERM).context("send SIGTERM to the server")?;
        }
        let Ok(status) = timeout(STOP_LIMIT, self.process.wait()).await else {
            self.process.kill().await.context("kill the server")?;
            bail!("the server did not stop within {STOP_LIMIT:?} of SIGTERM and was killed");
        };
        let status: ExitStatus = status.context("wait for the server to stop")?;
        ensure!(status.success(), "the server ended with {status}: {}", self.last_output());
        Ok(())
    }

    /// Whether the server's files are in memory, where an fsync costs nothing.
    pub(crate) fn is_on_tmpfs(&self) -> bool {
        const TMPFS_MAGIC: i128 = 0x0102_1994;
        rustix::fs::statfs(self.directory.path()).is_ok_and(|stat| i128::from(stat.f_type) == TMPFS_MAGIC)
    }

    fn last_output(&self) -> String {
        let text = format!("{}\n{}", self.tail(STDOUT), self.tail(STDERR));
        let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        match lines.len() {
            0 => "it printed nothing".to_owned(),
            count => lines[count.saturating_sub(5)..].join("\n"),
        }
    }

    /// The end of the child's output so far; empty if the file cannot be read.
    fn tail(&self, name: &str) -> String {
        let read = || -> std::io::Result<Vec<u8>> {
            let mut file = File::open(self.directory.path().join(name))?;
            let length = file.metadata()?.len();
            file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
            let mut bytes = Vec::new();
            file.take(TAIL_BYTES).read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        String::from_utf8_lossy(&read().unwrap_or_default()).into_owned()
    }
}

fn scratch() -> Result<TempDir> {
    tempfile::Builder::new().prefix("weir-bench-").tempdir().context("create a temporary directory")
}

/// This executable without the operator's settings: a private run must not use their database.
fn this_binary() -> Result<Command> {
    let path = std::env::current_exe().context("find the path of this executable")?;
    let mut command = Command::new::<&Path>(path.as_ref());
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("WEIR_")) {
        command.env_remove(name);
    }
    command.env("WEIR_GRPC_LISTEN", "127.0.0.1:0");
    Ok(command)
}

/// The address in the line that announces readiness, once that line is complete.
fn ready_url(output: &str) -> Option<String> {
    let complete = &output[..=output.rfind('\n')?];
    let line = complete.lines().find(|line| line.contains("weir ready"))?;
    let address = &line[line.find("http://")? + "http://".len()..];
    let in_address = |c: char| c.is_ascii_alphanumeric() || ".:-[]".contains(c);
    let end = address.find(|c| !in_address(c)).unwrap_or(address.len());
    Some(format!("http://{}", &address[..end]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ready_line_gives_the_url() {
        let line = "starting\nweir ready http://127.0.0.1:4321, grpc http://127.0.0.1:4322\n";
        assert_eq!(ready_url(line).unwrap(), "http://127.0.0.1:4321");
        assert_eq!(ready_url("weir ready empty http://[::1]:80\n").unwrap(), "http://[::1]:80");
    }

    #[test]
    fn a_half_written_line_is_not_ready() {
        assert_eq!(ready_url("weir ready http://127.0.0.1:43"), None);
        assert_eq!(ready_url("http://127.0.0.1:4321\n"), None);
        assert_eq!(ready_url(""), None);
    }
}
