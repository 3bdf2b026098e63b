//! Installs an engine with apt if it is not found elsewhere and the tests run as root.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::discover::succeeds;
use crate::watchdog::Watchdog;

/// Debian runs this file to decide whether a package may start its service.
const POLICY: &str = "/usr/sbin/policy-rc.d";

/// Not in TMPDIR, which may differ between test processes.
const LOCK: &str = "/tmp/weir-testkit-apt.lock";

/// Installs `packages` and returns the result of `find`, or an error that says what was tried. Starts no service.
///
/// `before` runs only if something is going to be installed.
pub(crate) fn install<T>(
    packages: &[&str],
    before: impl FnOnce(),
    find: impl Fn() -> Option<T>,
) -> Result<T, String> {
    if !rustix::process::geteuid().is_root() {
        return Err("not root, so apt-get was not tried".to_owned());
    }
    if !succeeds(Command::new("apt-get").arg("--version")) {
        return Err("there is no apt-get".to_owned());
    }
    // Test processes run in parallel, and with dpkg's own lock the second one fails instead of waiting.
    let lock = File::create(LOCK).and_then(|file| {
        file.lock()?;
        Ok(file)
    });
    let _lock = lock.unwrap_or_else(|error| panic!("cannot lock {LOCK}: {error}"));
    if let Some(found) = find() {
        return Ok(found);
    }
    let names = packages.join(" ");
    eprintln!("weir-testkit: installing {names} with apt-get (once for this machine)");
    before();
    let _no_services = forbid_services(Path::new(POLICY));
    if !apt_get(&["update"]) || !apt_get(&[&["install", "-y", "--no-install-recommends"], packages].concat())
    {
        return Err(format!("apt-get install {names} failed (its output is above)"));
    }
    find().ok_or_else(|| format!("apt-get installed {names}, yet its programs are not where they should be"))
}

/// Keeps packages from starting services until the returned value is dropped or this process is killed. An existing
/// `policy` of the machine is left alone.
fn forbid_services(policy: &Path) -> Option<Watchdog> {
    if policy.exists() {
        return None;
    }
    let watchdog = Watchdog::start(r#"rm -f -- "$1""#, [policy]);
    let written = fs::write(policy, "#!/bin/sh\nexit 101\n")
        .and_then(|()| fs::set_permissions(policy, fs::Permissions::from_mode(0o755)));
    written.unwrap_or_else(|error| panic!("cannot write {}: {error}", policy.display()));
    Some(watchdog)
}

fn apt_get(arguments: &[&str]) -> bool {
    let status = Command::new("apt-get")
        // Another process may be using dpkg.
        .args(["-o", "DPkg::Lock::Timeout=120"])
        .args(arguments)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .env("UCF_FORCE_CONFFOLD", "1")
        .stdin(Stdio::null())
        // Standard output belongs to the test harness.
        .stdout(std::io::stderr())
        .status();
    status.is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_are_forbidden_until_dropped_and_an_existing_policy_stays() {
        let directory = tempfile::tempdir().unwrap();
        let policy = directory.path().join("policy-rc.d");
        let forbidden = forbid_services(&policy);
        assert_eq!(fs::metadata(&policy).unwrap().permissions().mode() & 0o777, 0o755);
        // Run by `sh`, not directly: a process forked in between may still have the file open for writing.
        assert_eq!(Command::new("sh").arg(&policy).status().unwrap().code(), Some(101));
        drop(forbidden);
        assert!(!policy.exists());

        fs::write(&policy, "theirs").unwrap();
        drop(forbid_services(&policy));
        assert_eq!(fs::read_to_string(&policy).unwrap(), "theirs");
    }
}
