//! A service of the stack that is one local process, with its files and its log.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal};

use crate::instance::STOP_TIMEOUT;
use crate::signal;
use crate::wait::becomes_true_blocking;
use crate::watchdog::{END_PROCESS, Watchdog};

/// A running process. It is stopped when this value is dropped or this program ends.
pub(super) struct Process {
    name: String,
    child: Child,
    log: PathBuf,
    _watchdog: Watchdog,
}

impl Process {
    pub(super) fn start(
        name: &str,
        program: &Path,
        arguments: &[String],
        environment: &BTreeMap<String, String>,
        directory: &Path,
    ) -> Result<Self, String> {
        let explain = |error: std::io::Error| format!("{name}: cannot run {}: {error}", program.display());
        let log = directory.join("log");
        let output = File::create(&log).map_err(explain)?;
        let errors = output.try_clone().map_err(explain)?;
        let mut command = Command::new(program);
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"WEIR_"))
        {
            command.env_remove(name);
        }
        // With its own process group, Ctrl-C reaches only this program, which then stops the services in order.
        command.args(arguments).envs(environment).current_dir(directory).process_group(0);
        command.stdin(Stdio::null()).stdout(output).stderr(errors);
        let mut watchdog = Watchdog::start(END_PROCESS, ["TERM"]);
        let child = command.spawn().map_err(explain)?;
        watchdog.guard(Pid::from_child(&child));
        Ok(Self { name: name.to_owned(), child, log, _watchdog: watchdog })
    }

    pub(super) fn has_exited(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    pub(super) fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Sends SIGTERM and waits until the process has exited.
    pub(super) fn stop(&mut self) {
        if self.has_exited() {
            return;
        }
        let pid = Pid::from_child(&self.child);
        signal::send(pid, Signal::TERM);
        if !becomes_true_blocking(STOP_TIMEOUT, || self.has_exited()) {
            eprintln!(
                "{} did not stop within {STOP_TIMEOUT:?} and is killed; its log:\n{}",
                self.name,
                self.log()
            );
            signal::send(pid, Signal::KILL);
            let _ = self.child.wait();
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.stop();
    }
}
