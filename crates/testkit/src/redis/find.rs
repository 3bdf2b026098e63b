//! Decides where a Redis comes from: a local binary, else apt, else Docker.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use crate::apt;
use crate::discover::{self, Source, succeeds};

/// The first with everything that Weir and the testkit ask of it.
const OLDEST: u32 = 7;

/// Looks once per process: when nothing works, a hundred tests should not each wait for apt to find that out.
pub(super) fn source() -> Result<&'static Source, &'static str> {
    static FOUND: OnceLock<Result<Source, String>> = OnceLock::new();
    FOUND.get_or_init(search).as_ref().map_err(String::as_str)
}

/// Local is the program `redis-server`.
fn search() -> Result<Source, String> {
    discover::search(local, install, |apt| {
        format!(
            "no Redis for the tests: no redis-server of version {OLDEST} or newer on PATH; {apt}; `docker info` \
             fails. Install Redis or start Docker; or set WEIR_TEST_REDIS to a redis:// URL, which serves all tests \
             but those that stop their server; or set WEIR_TEST_SKIP=redis to leave them out."
        )
    })
}

pub(super) fn local() -> Option<PathBuf> {
    let program = discover::on_path("redis-server")?;
    let output = Command::new(&program).arg("--version").stdin(Stdio::null()).output().ok()?;
    let new_enough = major_version(&String::from_utf8_lossy(&output.stdout)) >= Some(OLDEST);
    new_enough.then_some(program)
}

fn install() -> Result<PathBuf, String> {
    let program = apt::install(&["redis-server"], || {}, local)?;
    // The package also has its service started at every boot, and nobody asked for one. It fails where nothing
    // starts services anyway.
    succeeds(Command::new("update-rc.d").args(["redis-server", "disable"]));
    Ok(program)
}

/// Of a line such as `Redis server v=7.0.15 sha=…`.
fn major_version(line: &str) -> Option<u32> {
    line.split_once("v=")?.1.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_version_is_told_from_a_new_one() {
        let line =
            |version: &str| format!("Redis server v={version} sha=00000000:0 malloc=jemalloc-5.3.0 bits=64");
        assert_eq!(major_version(&line("6.2.7")), Some(6));
        assert!(major_version(&line("10.0.1")) >= Some(OLDEST));
        assert_eq!(major_version("no such thing"), None);
    }
}
