//! Finds PostgreSQL: local binaries, else apt, else Docker.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::apt;
use crate::discover::{self, EngineSource};

/// Searches once per process, so that not every test waits for apt if nothing works.
pub(super) fn source() -> Result<&'static EngineSource, &'static str> {
    static FOUND: OnceLock<Result<EngineSource, String>> = OnceLock::new();
    FOUND.get_or_init(search).as_ref().map_err(String::as_str)
}

/// The local source is the directory with `initdb` and `postgres`.
fn search() -> Result<EngineSource, String> {
    let install = || apt::install(&["postgresql"], keep_package_from_creating_a_cluster, local);
    discover::search(local, install, |apt| {
        format!(
            "no PostgreSQL for the tests: none on PATH, in /usr/lib/postgresql/*/bin or /usr/local/pgsql/bin; {apt}; \
             `docker info` fails. Install PostgreSQL or start Docker; or set WEIR_TEST_POSTGRES to a superuser URL, \
             which serves all tests but those that stop their server; or set WEIR_TEST_SKIP=postgres to leave them out."
        )
    })
}

pub(super) fn local() -> Option<PathBuf> {
    discover::path_directories()
        .into_iter()
        .chain(debian_versions(Path::new("/usr/lib/postgresql")))
        .chain([PathBuf::from("/usr/local/pgsql/bin")])
        .find_map(|directory| {
            // PATH may contain links to some of the programs; the others are next to the link's target.
            let postgres = fs::canonicalize(directory.join("postgres")).ok()?;
            let bin_dir = postgres.parent()?;
            bin_dir.join("initdb").exists().then(|| bin_dir.to_owned())
        })
}

/// `<root>/<major version>/bin`, newest first.
fn debian_versions(root: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(root).into_iter().flatten().flatten();
    let mut versions: Vec<u32> =
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    versions.sort_unstable_by(|a, b| b.cmp(a));
    versions.iter().map(|version| root.join(version.to_string()).join("bin")).collect()
}

fn keep_package_from_creating_a_cluster() {
    let file = Path::new("/etc/postgresql-common/createcluster.conf");
    if !file.exists() {
        let written = fs::create_dir_all("/etc/postgresql-common")
            .and_then(|()| fs::write(file, "create_main_cluster = false\n"));
        written.unwrap_or_else(|error| panic!("cannot write {}: {error}", file.display()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_version_comes_first_by_number() {
        let root = tempfile::tempdir().unwrap();
        for version in ["9", "15", "17", "common"] {
            fs::create_dir(root.path().join(version)).unwrap();
        }
        let found = debian_versions(root.path());
        let expected = ["17", "15", "9"].map(|version| root.path().join(version).join("bin"));
        assert_eq!(found, expected);
    }
}
