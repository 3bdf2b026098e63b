//! A server that is one local process with its own temporary directory.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal};

use crate::instance::{Erasable, Instance, STOP_TIMEOUT};
use crate::signal;
use crate::wait::becomes_true_blocking;
use crate::watchdog::{END_PROCESS, Watchdog};

/// A server process. Its directory holds configuration and log, and `data` in it what the server stores.
pub(crate) struct Daemon {
    /// The name in messages.
    name: &'static str,
    program: PathBuf,
    arguments: Vec<OsString>,
    environment: Vec<(OsString, OsString)>,
    directory: PathBuf,
    process: Option<Child>,
    watchdog: Watchdog,
}

impl Daemon {
    /// Creates the directory; `launch` starts the process.
    pub(crate) fn create(name: &'static str, program: &Path) -> Self {
        let prefix = format!("weir-{}-", name.to_lowercase());
        let directory = tempfile::Builder::new().prefix(&prefix).tempdir();
        let directory = directory.expect("the temporary directory is writable").keep();
        // Its data is not needed any more, so it need not stop in an orderly way.
        let watchdog = Watchdog::start(
            &format!("{END_PROCESS}rm -rf -- \"$2\""),
            ["KILL".as_ref(), directory.as_os_str()],
        );
        let program = program.to_owned();
        let (arguments, environment) = (Vec::new(), Vec::new());
        let daemon = Self { name, program, arguments, environment, directory, process: None, watchdog };
        daemon.create_data_directory();
        daemon
    }

    /// Sets the arguments of every launch.
    pub(crate) fn set_arguments<A: Into<OsString>>(&mut self, arguments: impl IntoIterator<Item = A>) {
        self.arguments = arguments.into_iter().map(Into::into).collect();
    }

    /// Sets additional environment variables of every launch.
    pub(crate) fn set_environment(&mut self, environment: Vec<(OsString, OsString)>) {
        self.environment = environment;
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    pub(crate) fn data(&self) -> PathBuf {
        self.directory.join("data")
    }

    /// Writes a file into the directory with mode 0600, since it may hold a key.
    pub(crate) fn write(&self, name: &str, content: &str) -> PathBuf {
        let file = self.directory.join(name);
        let written = fs::write(&file, content)
            .and_then(|()| fs::set_permissions(&file, fs::Permissions::from_mode(0o600)));
        written.unwrap_or_else(|error| panic!("cannot write {}: {error}", file.display()));
        file
    }

    /// The program with directory, process group and environment set.
    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        // With its own process group, Ctrl-C reaches only the tests.
        command.current_dir(&self.directory).process_group(0).stdin(Stdio::null()).env("LC_ALL", "C");
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }

    fn create_data_directory(&self) {
        let data = self.data();
        fs::create_dir(&data).unwrap_or_else(|error| panic!("cannot create {}: {error}", data.display()));
    }

    fn log_file(&self) -> File {
        let path = self.directory.join("log");
        let file = OpenOptions::new().append(true).create(true).open(&path);
        file.unwrap_or_else(|error| panic!("cannot open {}: {error}", path.display()))
    }

    fn pid(&self) -> Pid {
        let Some(process) = &self.process else {
            panic!("this {} is stopped: start() it first", self.name);
        };
        Pid::from_child(process)
    }

    /// Waits until the process has exited and reaps it. Returns false on timeout.
    fn reap_within(&mut self, deadline: Duration) -> bool {
        let exited = match &mut self.process {
            Some(process) => becomes_true_blocking(deadline, || !matches!(process.try_wait(), Ok(None))),
            None => true,
        };
        if exited && self.process.take().is_some() {
            self.watchdog.release();
        }
        exited
    }
}

impl Instance for Daemon {
    fn launch(&mut self) {
        assert!(self.process.is_none(), "this {} is running already: stop() or crash() it first", self.name);
        let log = self.log_file();
        let errors = log.try_clone().expect("a second descriptor for the log");
        let spawned = self.command().args(&self.arguments).stdout(log).stderr(errors).spawn();
        let process =
            spawned.unwrap_or_else(|error| panic!("cannot run {}: {error}", self.program.display()));
        self.watchdog.guard(Pid::from_child(&process));
        self.process = Some(process);
    }

    fn has_exited(&mut self) -> bool {
        self.reap_within(Duration::ZERO)
    }

    fn stop(&mut self) {
        let pid = self.pid();
        // In this order: a paused process must not continue before it has the signal.
        signal::send(pid, Signal::TERM);
        signal::send(pid, Signal::CONT);
        let stopped = self.reap_within(STOP_TIMEOUT);
        assert!(stopped, "{} did not stop within {STOP_TIMEOUT:?}; its log:\n{}", self.name, self.log());
    }

    fn crash(&mut self) {
        signal::send(self.pid(), Signal::KILL);
        let exited = self.reap_within(STOP_TIMEOUT);
        assert!(exited, "SIGKILL did not end {}: is it stuck on its disk?", self.name);
    }

    fn pause(&mut self) {
        signal::freeze(self.pid());
    }

    fn resume(&mut self) {
        signal::send(self.pid(), Signal::CONT);
    }

    fn log(&self) -> String {
        fs::read_to_string(self.directory.join("log")).unwrap_or_default()
    }
}

impl Erasable for Daemon {
    fn erase(&mut self) {
        assert!(self.process.is_none(), "this {} is running: stop() or crash() it first", self.name);
        let data = self.data();
        fs::remove_dir_all(&data).unwrap_or_else(|error| panic!("cannot remove {}: {error}", data.display()));
        self.create_data_directory();
    }
}

impl Drop for Daemon {
    /// Kills the server, which only its parent can reap; the watchdog then removes the directory.
    fn drop(&mut self) {
        if self.process.is_some() {
            self.crash();
        }
    }
}
