//! Decides where a PostgreSQL comes from: local binaries, else apt, else Docker.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

pub(super) enum Source {
    /// The directory with `initdb` and `postgres`.
    Local(PathBuf),
    Docker,
}

/// Looks once per process: when nothing works, a hundred tests should not each wait for apt to find that out.
pub(super) fn source() -> Result<&'static Source, &'static str> {
    static FOUND: OnceLock<Result<Source, String>> = OnceLock::new();
    FOUND.get_or_init(search).as_ref().map_err(String::as_str)
}

fn search() -> Result<Source, String> {
    if let Some(bin_dir) = local() {
        return Ok(Source::Local(bin_dir));
    }
    let apt = match install() {
        Ok(bin_dir) => return Ok(Source::Local(bin_dir)),
        Err(reason) => reason,
    };
    if succeeds(Command::new("docker").arg("info")) {
        return Ok(Source::Docker);
    }
    Err(format!(
        "no PostgreSQL for the tests: none on PATH, in /usr/lib/postgresql/*/bin or /usr/local/pgsql/bin; {apt}; \
         `docker info` fails. Install PostgreSQL or start Docker; or set WEIR_TEST_POSTGRES to a superuser URL, \
         which serves all tests but those that stop their server; or set WEIR_TEST_SKIP=postgres to leave them out."
    ))
}

pub(super) fn local() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(debian_versions(Path::new("/usr/lib/postgresql")))
        .chain([PathBuf::from("/usr/local/pgsql/bin")])
        .find_map(|directory| {
            // PATH may hold single links to some of the programs; the rest are where the links lead.
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

fn install() -> Result<PathBuf, &'static str> {
    if !rustix::process::geteuid().is_root() {
        return Err("not root, so apt-get was not tried");
    }
    if !succeeds(Command::new("apt-get").arg("--version")) {
        return Err("there is no apt-get");
    }
    // Test processes run side by side and dpkg's own lock makes the second one fail instead of wait.
    let lock = File::create(std::env::temp_dir().join("weir-testkit-apt.lock")).and_then(|file| {
        file.lock()?;
        Ok(file)
    });
    let _held = lock.expect("the temporary directory takes a lock file");
    if let Some(bin_dir) = local() {
        return Ok(bin_dir);
    }
    eprintln!("weir-testkit: no PostgreSQL found; installing it with apt-get (once for this machine)");
    keep_package_from_starting_a_server();
    if !apt_get(&["update"]) || !apt_get(&["install", "-y", "--no-install-recommends", "postgresql"]) {
        return Err("apt-get install postgresql failed (its output is above)");
    }
    local().ok_or("apt-get installed postgresql, yet no binaries are in /usr/lib/postgresql/*/bin")
}

fn keep_package_from_starting_a_server() {
    let file = Path::new("/etc/postgresql-common/createcluster.conf");
    if !file.exists() {
        let written = fs::create_dir_all("/etc/postgresql-common")
            .and_then(|()| fs::write(file, "create_main_cluster = false\n"));
        written.unwrap_or_else(|error| panic!("cannot write {}: {error}", file.display()));
    }
}

fn apt_get(arguments: &[&str]) -> bool {
    let status = Command::new("apt-get")
        .args(arguments)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .env("UCF_FORCE_CONFFOLD", "1")
        .stdin(Stdio::null())
        // Standard output belongs to the test harness.
        .stdout(std::io::stderr())
        .status();
    status.is_ok_and(|status| status.success())
}

fn succeeds(command: &mut Command) -> bool {
    let command = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
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
