//! Finds Redis: a local binary, else apt, else Docker.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use crate::apt;
use crate::discover::{self, EngineSource, succeeds};

/// The oldest version that has everything that Weir and the testkit use.
const OLDEST: u32 = 7;

/// Searches once per process, so that not every test waits for apt if nothing works.
pub(super) fn source() -> Result<&'static EngineSource, &'static str> {
    static FOUND: OnceLock<Result<EngineSource, String>> = OnceLock::new();
    FOUND.get_or_init(search).as_ref().map_err(String::as_str)
}

/// The local source is the program `redis-server`.
fn search() -> Result<EngineSource, String> {
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
    // The package also enables its service at boot, which is not wanted here. Disabling fails where there is no init
    // system, which is fine.
    succeeds(Command::new("update-rc.d").args(["redis-server", "disable"]));
    Ok(program)
}

/// Parses a line such as `Redis server v=7.0.15 sha=…`.
fn major_version(line: &str) -> Option<u32> {
    line.split_once("v=")?.1.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_major_version_of_redis_is_parsed() {
        let line =
            |version: &str| format!("Redis server v={version} sha=00000000:0 malloc=jemalloc-5.3.0 bits=64");
        assert_eq!(major_version(&line("6.2.7")), Some(6));
        assert!(major_version(&line("10.0.1")) >= Some(OLDEST));
        assert_eq!(major_version("no such thing"), None);
    }
}
