//! Installs an engine with Debian's package manager, when it is found nowhere else and the tests run as root.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::discover::succeeds;
use crate::watchdog::Watchdog;

/// Debian asks this file before a package may start its service.
const POLICY: &str = "/usr/sbin/policy-rc.d";

/// Not in TMPDIR, which test processes may each have their own.
const LOCK: &str = "/tmp/weir-testkit-apt.lock";

/// Installs `packages` and returns what `find` then finds; `Err` says what was tried. No service is left running.
///
/// `before` runs only when something is really going to be installed.
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
    // Test processes run side by side and dpkg's own lock makes the second one fail instead of wait.
    let lock = File::create(LOCK).and_then(|file| {
        file.lock()?;
        Ok(file)
    });
    let _held = lock.unwrap_or_else(|error| panic!("cannot lock {LOCK}: {error}"));
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

/// Until the returned value is dropped, or this process is killed, packages start no service. A `policy` that the
/// machine has already is its own affair.
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
        // Another user of the machine may be at it.
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
    fn services_are_forbidden_only_for_a_while_and_a_policy_of_the_machine_stays() {
        let directory = tempfile::tempdir().unwrap();
        let policy = directory.path().join("policy-rc.d");
        let forbidden = forbid_services(&policy);
        assert_eq!(fs::metadata(&policy).unwrap().permissions().mode() & 0o777, 0o755);
        // Not by itself: a process forked meanwhile may still have it open for writing.
        assert_eq!(Command::new("sh").arg(&policy).status().unwrap().code(), Some(101));
        drop(forbidden);
        assert!(!policy.exists());

        fs::write(&policy, "theirs").unwrap();
        drop(forbid_services(&policy));
        assert_eq!(fs::read_to_string(&policy).unwrap(), "theirs");
    }
}
