//! The proxy that Weir's own is measured against.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::apt;
use crate::discover::succeeds;

/// Where `nginx` is: installed already, or by Debian's package manager just now. `Err` says why it is not there.
/// Fails when it is not there and cannot be installed.
pub fn nginx() -> Result<PathBuf, String> {
    find().map_or_else(install, Ok)
}

fn install() -> Result<PathBuf, String> {
    let program = apt::install(&["nginx"], || {}, find)?;
    // The package also has its service started at every boot, and nobody asked for one. It fails where nothing starts
    // services anyway.
    succeeds(Command::new("update-rc.d").args(["nginx", "disable"]));
    Ok(program)
}

/// Debian keeps it where only root's PATH leads.
fn find() -> Option<PathBuf> {
    let mut candidates = ["nginx", "/usr/sbin/nginx"].into_iter().map(Path::new);
    candidates.find(|path| succeeds(Command::new(path).arg("-v"))).map(Path::to_owned)
}
