//! Prometheus's own checker of rules.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::apt;
use crate::discover::succeeds;

const PACKAGE: &str = "prometheus";

/// Where `promtool` is: installed already, or by Debian's package manager just now. `Err` says why it is not there.
/// Fails when it is not there and cannot be installed.
pub fn promtool() -> Result<PathBuf, String> {
    find().map_or_else(|| apt::install(&[PACKAGE], || {}, find), Ok)
}

fn find() -> Option<PathBuf> {
    let path = Path::new("promtool");
    succeeds(Command::new(path).arg("--version")).then(|| path.to_owned())
}
