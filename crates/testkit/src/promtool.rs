//! Finds or installs promtool, Prometheus's checker of rules.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::apt;
use crate::discover::succeeds;

const PACKAGE: &str = "prometheus";

/// Returns the path of `promtool`, installing it with apt if needed, or an error that says why that failed.
pub fn promtool() -> Result<PathBuf, String> {
    find().map_or_else(|| apt::install(&[PACKAGE], || {}, find), Ok)
}

fn find() -> Option<PathBuf> {
    let path = Path::new("promtool");
    succeeds(Command::new(path).arg("--version")).then(|| path.to_owned())
}
