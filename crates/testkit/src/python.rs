//! Python environments with packages of the package index, for tests of interoperability.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::apt;
use crate::discover::{cache, succeeds};

/// Returns the Python of our own environment, which is created on first use, or an error that says why that failed.
pub fn python_with_grpc() -> Result<PathBuf, String> {
    let is_installed = |python: &Path| succeeds(Command::new(python).args(["-c", "import grpc, grpc_tools"]));
    environment("python", &["grpcio", "grpcio-tools"], is_installed)
}

/// Returns the Python of an environment of this name with these packages, which is created on first use, or an error that
/// says why that failed.
pub(crate) fn environment(
    name: &str,
    packages: &[&str],
    is_installed: impl Fn(&Path) -> bool,
) -> Result<PathBuf, String> {
    let directory = cache().join(name);
    let python = directory.join("bin/python3");
    fs::create_dir_all(&directory).map_err(|error| format!("{}: {error}", directory.display()))?;
    // Test processes run in parallel; the second one waits until the first has created the environment.
    let lock = File::create(directory.join("lock")).and_then(|file| {
        file.lock()?;
        Ok(file)
    });
    let _lock = lock.map_err(|error| format!("{}: {error}", directory.display()))?;
    if is_installed(&python) {
        return Ok(python);
    }
    let names = packages.join(" ");
    eprintln!("weir-testkit: creating a Python environment with {names} (once for this user)");
    if !create_environment(&directory) {
        apt::install(&["python3", "python3-venv"], || {}, || create_environment(&directory).then_some(()))?;
    }
    let installed = run(Command::new(&python).args(["-m", "pip", "install", "--quiet"]).args(packages));
    if installed && is_installed(&python) {
        return Ok(python);
    }
    Err(format!("pip install {names} failed (its output is above)"))
}

fn create_environment(directory: &Path) -> bool {
    succeeds(Command::new("python3").args(["-m", "venv"]).arg(directory))
}

fn run(command: &mut Command) -> bool {
    // Standard output belongs to the test harness.
    command.stdin(Stdio::null()).stdout(std::io::stderr()).status().is_ok_and(|status| status.success())
}
