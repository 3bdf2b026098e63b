//! A Python environment with the official gRPC library, for tests of interoperability.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::apt;
use crate::discover::{cache, succeeds};

const PACKAGES: [&str; 2] = ["grpcio", "grpcio-tools"];
const IMPORTS: &str = "import grpc, grpc_tools";

/// Returns the Python of our own environment, which is created on first use, or an error that says why that failed.
pub fn python_with_grpc() -> Result<PathBuf, String> {
    let directory = cache().join("python");
    let python = directory.join("bin/python3");
    fs::create_dir_all(&directory).map_err(|error| format!("{}: {error}", directory.display()))?;
    // Test processes run in parallel; the second one waits until the first has created the environment.
    let lock = File::create(directory.join("lock")).and_then(|file| {
        file.lock()?;
        Ok(file)
    });
    let _lock = lock.map_err(|error| format!("{}: {error}", directory.display()))?;
    if succeeds(Command::new(&python).args(["-c", IMPORTS])) {
        return Ok(python);
    }
    eprintln!(
        "weir-testkit: creating a Python environment with {} (once for this user)",
        PACKAGES.join(", ")
    );
    if !create_environment(&directory) {
        apt::install(&["python3", "python3-venv"], || {}, || create_environment(&directory).then_some(()))?;
    }
    let installed = run(Command::new(&python).args(["-m", "pip", "install", "--quiet"]).args(PACKAGES));
    if installed && succeeds(Command::new(&python).args(["-c", IMPORTS])) {
        return Ok(python);
    }
    Err(format!("pip install {} failed (its output is above)", PACKAGES.join(" ")))
}

fn create_environment(directory: &std::path::Path) -> bool {
    succeeds(Command::new("python3").args(["-m", "venv"]).arg(directory))
}

fn run(command: &mut Command) -> bool {
    // Standard output belongs to the test harness.
    command.stdin(Stdio::null()).stdout(std::io::stderr()).status().is_ok_and(|status| status.success())
}
