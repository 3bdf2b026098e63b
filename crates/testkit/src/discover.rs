//! Decides where an engine comes from: found locally, else installed, else from Docker.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

pub(crate) enum EngineSource {
    /// The program, or the directory of the programs.
    Local(PathBuf),
    Docker,
}

/// `explain` turns the reason why nothing could be installed into a message that says what to do.
pub(crate) fn search(
    local: impl FnOnce() -> Option<PathBuf>,
    install: impl FnOnce() -> Result<PathBuf, String>,
    explain: impl FnOnce(&str) -> String,
) -> Result<EngineSource, String> {
    if let Some(path) = local() {
        return Ok(EngineSource::Local(path));
    }
    let reason = match install() {
        Ok(path) => return Ok(EngineSource::Local(path)),
        Err(reason) => reason,
    };
    if succeeds(Command::new("docker").arg("info")) {
        return Ok(EngineSource::Docker);
    }
    Err(explain(&reason))
}

/// The directory of files that are downloaded or generated once and reused by later runs.
pub(crate) fn cache() -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
    cache.or_else(home).unwrap_or_else(std::env::temp_dir).join("weir-testkit")
}

/// The directories of PATH.
pub(crate) fn path_directories() -> Vec<PathBuf> {
    std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).collect()
}

pub(crate) fn on_path(program: &str) -> Option<PathBuf> {
    path_directories().iter().map(|directory| directory.join(program)).find(|file: &PathBuf| file.is_file())
}

pub(crate) fn succeeds(command: &mut Command) -> bool {
    let command = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}
