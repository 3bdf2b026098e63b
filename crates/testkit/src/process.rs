//! The `weir` binary as a child process: start it, read its log, kill it, and restart it on the same port.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal};

use crate::signal;
use crate::wait::becomes_true;
use crate::watchdog::{END_PROCESS, Watchdog};
use log::Log;

mod log;

const READY_TIMEOUT: Duration = Duration::from_secs(60);
const READY: &str = "weir ready";

/// How to run `weir serve`. Inherited `WEIR_*` variables are removed, so that a developer's shell does not affect tests.
pub struct Builder {
    binary: PathBuf,
    arguments: Vec<OsString>,
    environment: Vec<(OsString, OsString)>,
    data_dir: Option<PathBuf>,
}

impl Builder {
    /// Adds an argument after `serve`.
    #[must_use]
    pub fn arg(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.arguments.push(argument.as_ref().to_owned());
        self
    }

    /// Sets an environment variable; it overrides those that this builder sets.
    #[must_use]
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.environment.push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Uses this data directory and keeps it. By default a fresh one is removed with the handle.
    #[must_use]
    pub fn data_dir(mut self, path: impl AsRef<Path>) -> Self {
        self.data_dir = Some(absolute(path.as_ref()));
        self
    }

    /// Starts the process and waits until it is ready; panics with its output if it exits first.
    pub async fn spawn(self) -> Weir {
        let fresh = self.data_dir.is_none();
        let data_dir = self.data_dir.clone().unwrap_or_else(|| {
            let directory = tempfile::Builder::new().prefix("weir-data-").tempdir();
            directory.expect("the temporary directory is writable").keep()
        });
        let remove = if fresh { "rm -rf -- \"$2\"" } else { "" };
        let watchdog =
            Watchdog::start(&format!("{END_PROCESS}{remove}"), ["KILL".as_ref(), data_dir.as_os_str()]);
        let unused = || SocketAddr::from((Ipv4Addr::LOCALHOST, crate::ports::unused()));
        let (addr, grpc_addr) = (unused(), unused());
        let (scheme, log) = ("http", Log::default());
        let mut weir = Weir { builder: self, data_dir, addr, scheme, grpc_addr, log, child: None, watchdog };
        weir.launch().await;
        weir
    }
}

/// A `weir` process. Dropping the handle kills it.
pub struct Weir {
    builder: Builder,
    data_dir: PathBuf,
    addr: SocketAddr,
    /// `http` or `https`.
    scheme: &'static str,
    grpc_addr: SocketAddr,
    log: Log,
    child: Option<Child>,
    watchdog: Watchdog,
}

impl Weir {
    pub fn builder(binary: impl AsRef<Path>) -> Builder {
        let binary = absolute(binary.as_ref());
        Builder { binary, arguments: Vec::new(), environment: Vec::new(), data_dir: None }
    }

    pub fn base_url(&self) -> String {
        format!("{}://{}", self.scheme, self.addr)
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The address of gRPC (`WEIR_GRPC_LISTEN`).
    pub fn grpc_addr(&self) -> SocketAddr {
        self.grpc_addr
    }

    pub fn pid(&self) -> u32 {
        self.running().id()
    }

    /// The resident memory in bytes.
    pub fn memory(&self) -> u64 {
        self.status_bytes("VmRSS:")
    }

    /// The peak of the resident memory in bytes.
    pub fn peak_memory(&self) -> u64 {
        self.status_bytes("VmHWM:")
    }

    fn status_bytes(&self, name: &str) -> u64 {
        let file = format!("/proc/{}/status", self.pid());
        let status = fs::read_to_string(&file).unwrap_or_else(|error| panic!("{file}: {error}"));
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        kib.unwrap_or_else(|| panic!("no {name} in {file}")) * 1_024
    }

    pub fn data_dir(&self) -> &Path {
        &self.data_dir
    }

    /// The admin key that `weir` generated into its data directory.
    pub fn admin_key(&self) -> String {
        let file = self.data_dir.join("admin.key");
        let key = fs::read_to_string(&file);
        key.unwrap_or_else(|error| panic!("{}: {error}", file.display())).trim().to_owned()
    }

    /// Kills the process with SIGKILL and waits until it is gone.
    pub fn kill_9(&mut self) {
        signal::send(Pid::from_child(self.running()), Signal::KILL);
        if let Some(mut child) = self.child.take() {
            child.wait().expect("a child can be waited for");
        }
        self.watchdog.release();
        self.log.finish();
    }

    /// Sends SIGTERM; [`wait`](Self::wait) waits for the exit.
    pub fn terminate(&self) {
        signal::send(Pid::from_child(self.running()), Signal::TERM);
    }

    /// Sends SIGSTOP: the process keeps its connections and locks but does nothing.
    pub fn pause(&self) {
        signal::send(Pid::from_child(self.running()), Signal::STOP);
    }

    pub fn resume(&self) {
        signal::send(Pid::from_child(self.running()), Signal::CONT);
    }

    /// Waits for the exit; panics with the output on timeout.
    pub async fn wait(&mut self, timeout: Duration) -> ExitStatus {
        let mut status = None;
        let child = self.child.as_mut().expect(NOT_RUNNING);
        let exited = async || {
            status = child.try_wait().expect("a child can be waited for");
            status.is_some()
        };
        let in_time = becomes_true(timeout, exited).await;
        assert!(in_time, "weir did not exit within {timeout:?}; its output:\n{}", self.log.text());
        self.child = None;
        self.watchdog.release();
        self.log.finish();
        status.expect("the condition above was met")
    }

    /// Restarts with the same arguments, data directory and port; sends SIGTERM first if the process is running.
    pub async fn restart(&mut self) {
        if self.child.is_some() {
            self.terminate();
            self.wait(READY_TIMEOUT).await;
        }
        self.launch().await;
    }

    /// Every line of stdout and stderr so far, over all restarts.
    pub fn log_lines(&self) -> Vec<String> {
        self.log.lines()
    }

    /// Waits until a line matches and returns the first one that does, past ones included; panics with the output on timeout.
    pub async fn wait_for_log(&self, mut wanted: impl FnMut(&str) -> bool, timeout: Duration) -> String {
        let mut found = None;
        let condition = async || {
            found = self.log.lines().into_iter().find(|line| wanted(line));
            found.is_some()
        };
        let in_time = becomes_true(timeout, condition).await;
        assert!(in_time, "no matching line within {timeout:?}; weir's output:\n{}", self.log.text());
        found.expect("the condition above was met")
    }

    fn running(&self) -> &Child {
        self.child.as_ref().expect(NOT_RUNNING)
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.builder.binary);
        let inherited = std::env::vars_os().map(|(name, _)| name);
        for name in inherited.filter(|name| name.as_encoded_bytes().starts_with(b"WEIR_")) {
            command.env_remove(name);
        }
        command
            .arg("serve")
            .args(&self.builder.arguments)
            .env("WEIR_LISTEN", self.addr.to_string())
            .env("WEIR_GRPC_LISTEN", self.grpc_addr.to_string())
            .env("WEIR_DATA", &self.data_dir)
            .envs(self.builder.environment.iter().map(|(name, value)| (name, value)))
            // Not the directory of the tests: a stray weir.toml there would be read as configuration.
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    async fn launch(&mut self) {
        let spawned = self.command().spawn();
        let mut child =
            spawned.unwrap_or_else(|error| panic!("cannot run {}: {error}", self.builder.binary.display()));
        self.watchdog.guard(Pid::from_child(&child));
        self.log.follow(&mut child);
        self.child = Some(child);
        (self.scheme, self.addr) = self.ready_addr().await;
    }

    /// The scheme and the address in the ready line, which differs from the requested one if a test sets `WEIR_LISTEN`.
    async fn ready_addr(&mut self) -> (&'static str, SocketAddr) {
        let mut line = None;
        let (log, child) = (&self.log, self.child.as_mut().expect(NOT_RUNNING));
        let condition = async || {
            // Before the log is read, so that no line before the exit is missed.
            let exited = child.try_wait().expect("a child can be waited for");
            if let Some(status) = exited {
                log.finish();
                panic!("weir exited before it was ready ({status}); its output:\n{}", log.text());
            }
            line = log.find_on_stdout(READY);
            line.is_some()
        };
        let in_time = becomes_true(READY_TIMEOUT, condition).await;
        assert!(in_time, "weir was not ready within {READY_TIMEOUT:?}; its output:\n{}", log.text());
        let line = line.expect("the condition above was met");
        parse_addr(&line).unwrap_or_else(|| panic!("no URL on 127.0.0.1 in weir's ready line: {line}"))
    }
}

const NOT_RUNNING: &str = "weir is not running: restart() it first";

impl Drop for Weir {
    fn drop(&mut self) {
        if self.child.is_some() {
            self.kill_9();
        }
    }
}

/// Makes a path absolute, because the child runs in another directory.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn parse_addr(line: &str) -> Option<(&'static str, SocketAddr)> {
    let (before, rest) = line.split_once("://127.0.0.1:")?;
    let scheme = if before.ends_with("https") { "https" } else { "http" };
    let digits = rest.split(|c: char| !c.is_ascii_digit()).next()?;
    Some((scheme, SocketAddr::from((Ipv4Addr::LOCALHOST, digits.parse().ok()?))))
}

#[cfg(test)]
mod tests;
