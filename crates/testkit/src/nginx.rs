//! Finds or installs nginx, the baseline for benchmarks of Weir's proxy.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::apt;
use crate::discover::succeeds;

/// Returns the path of `nginx`, installing it with apt if needed, or an error that says why that failed.
pub fn nginx() -> Result<PathBuf, String> {
    find().map_or_else(install, Ok)
}

fn install() -> Result<PathBuf, String> {
    let program = apt::install(&["nginx"], || {}, find)?;
    // The package also enables its service at boot, which is not wanted here. Disabling fails where there is no init
    // system, which is fine.
    succeeds(Command::new("update-rc.d").args(["nginx", "disable"]));
    Ok(program)
}

/// Debian installs it into `/usr/sbin`, which is only in root's PATH.
fn find() -> Option<PathBuf> {
    let mut candidates = ["nginx", "/usr/sbin/nginx"].into_iter().map(Path::new);
    candidates.find(|path| succeeds(Command::new(path).arg("-v"))).map(Path::to_owned)
}
