//! A Python with gRPC's own library in it, for tests of what others see.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::apt;
use crate::discover::{cache, succeeds};

/// What is installed into it.
const PACKAGES: [&str; 2] = ["grpcio", "grpcio-tools"];
const IMPORTS: &str = "import grpc, grpc_tools";

/// The Python of an environment of our own, made by an earlier run or just now.
/// Fails when there is none and none can be made; says why.
pub fn python_with_grpc() -> Result<PathBuf, String> {
    let directory = cache().join("python");
    let python = directory.join("bin/python3");
    fs::create_dir_all(&directory).map_err(|error| format!("{}: {error}", directory.display()))?;
    // Test processes run side by side; the second one waits for what the first one makes.
    let lock = File::create(directory.join("lock")).and_then(|file| {
        file.lock()?;
        Ok(file)
    });
    let _held = lock.map_err(|error| format!("{}: {error}", directory.display()))?;
    if succeeds(Command::new(&python).args(["-c", IMPORTS])) {
        return Ok(python);
    }
    eprintln!("weir-testkit: making a Python environment with {} (once for this user)", PACKAGES.join(", "));
    if !make(&directory) {
        apt::install(&["python3", "python3-venv"], || {}, || make(&directory).then_some(()))?;
    }
    let installed = run(Command::new(&python).args(["-m", "pip", "install", "--quiet"]).args(PACKAGES));
    if installed && succeeds(Command::new(&python).args(["-c", IMPORTS])) {
        return Ok(python);
    }
    Err(format!("pip install {} failed (its output is above)", PACKAGES.join(" ")))
}

fn make(directory: &std::path::Path) -> bool {
    succeeds(Command::new("python3").args(["-m", "venv"]).arg(directory))
}

fn run(command: &mut Command) -> bool {
    // Standard output belongs to the test harness.
    command.stdin(Stdio::null()).stdout(std::io::stderr()).status().is_ok_and(|status| status.success())
}
