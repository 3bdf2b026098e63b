//! A server in a container, for machines that have Docker but not the engine.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use tempfile::TempDir;

use crate::instance::{Erasable, Instance};
use crate::watchdog::Watchdog;

pub(crate) struct Container {
    name: String,
    /// The arguments of `docker create`, without the name.
    arguments: Vec<String>,
    /// Files that clients need, such as the authority's certificate.
    directory: TempDir,
    _watchdog: Watchdog,
}

impl Container {
    /// Creates the container; `launch` starts it.
    pub(crate) fn create(arguments: Vec<String>) -> Self {
        let name = format!("weir-test-{:016x}", fastrand::u64(..));
        let watchdog = Watchdog::start(r#"docker rm --force --volumes "$1""#, [&name]);
        let directory = tempfile::tempdir().expect("the temporary directory is writable");
        let container = Self { name, arguments, directory, _watchdog: watchdog };
        container.create_container();
        container
    }

    /// Writes a file for clients on the host.
    pub(crate) fn write(&self, name: &str, content: &str) -> PathBuf {
        let file = self.directory.path().join(name);
        fs::write(&file, content).unwrap_or_else(|error| panic!("cannot write {}: {error}", file.display()));
        file
    }

    fn create_container(&self) {
        run(Command::new("docker").args(["create", "--name", &self.name]).args(&self.arguments));
    }

    fn docker(&self, arguments: &[&str]) -> String {
        run(Command::new("docker").args(arguments).arg(&self.name))
    }
}

impl Instance for Container {
    fn launch(&mut self) {
        self.docker(&["start"]);
    }

    fn has_exited(&mut self) -> bool {
        self.docker(&["inspect", "--format", "{{.State.Running}}"]).trim() == "false"
    }

    fn stop(&mut self) {
        // The images declare the signal for an orderly stop.
        self.docker(&["stop", "-t", "30"]);
    }

    fn crash(&mut self) {
        self.docker(&["kill"]);
    }

    fn pause(&mut self) {
        self.docker(&["pause"]);
    }

    fn resume(&mut self) {
        self.docker(&["unpause"]);
    }

    fn log(&self) -> String {
        self.docker(&["logs"])
    }
}

impl Erasable for Container {
    fn erase(&mut self) {
        self.docker(&["rm", "--force", "--volumes"]);
        self.create_container();
    }
}

/// Runs a command. Returns its output on both streams, since `docker logs` uses both.
fn run(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().expect("`docker info` succeeded before");
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    // Without the other arguments, which may contain a password and a key.
    assert!(output.status.success(), "docker {:?} failed: {text}", command.get_args().next());
    text
}
