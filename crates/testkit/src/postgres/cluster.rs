//! A PostgreSQL cluster that runs from local binaries in a temporary directory.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::fs::statvfs;
use rustix::process::{Pid, Signal};
use url::Url;

use super::{Options, SUPERUSER};
use crate::certificates::Certificates;
use crate::instance::{Instance, STOP_TIMEOUT};
use crate::signal;
use crate::wait::becomes_true_blocking;
use crate::watchdog::{END_PROCESS, Watchdog};

/// Removes the directory `$2`. A cluster that crashed and was not restarted leaves a System V shared memory segment, of
/// which a machine has only a few; its id is in line 7 of the pid file.
const REMOVE_CLUSTER: &str = r#"
if [ -f "$2/data/postmaster.pid" ]; then ipcrm -m "$(sed -n '7s/.* //p' "$2/data/postmaster.pid")"; fi
rm -rf -- "$2"
"#;

/// The in-memory file system of Linux.
const MEMORY: &str = "/dev/shm";
/// Free space that is required there: the largest suite needs half of it.
const MEMORY_MIN: u64 = 2 << 30;

pub(super) struct Cluster {
    bin_dir: PathBuf,
    directory: PathBuf,
    owner: Option<Owner>,
    settings: Vec<(String, String)>,
    environment: Vec<(OsString, OsString)>,
    postmaster: Option<Child>,
    watchdog: Watchdog,
}

/// The user that PostgreSQL runs as if the tests run as root, which PostgreSQL refuses.
#[derive(Clone, Copy)]
struct Owner {
    uid: u32,
    gid: u32,
}

impl Cluster {
    pub(super) fn create(bin_dir: &Path, port: u16, password: &str, options: &Options) -> Self {
        let cluster = Self::empty(bin_dir, port, options);
        cluster.initialise(password);
        if options.tls {
            cluster.require_tls();
        }
        cluster
    }

    /// A copy of the running server `primary`, which follows it. Its password is the primary's.
    pub(super) fn create_standby(bin_dir: &Path, port: u16, primary: &Url, options: &Options) -> Self {
        let cluster = Self::empty(bin_dir, port, options);
        // Makes pg_basebackup write the settings with which the standby connects, the password among them.
        let arguments = ["--write-recovery-conf", "--checkpoint=fast", "--no-sync", "-D"];
        let mut command = cluster.command("pg_basebackup");
        cluster.run(command.args(arguments).arg(cluster.data()).arg(format!("--dbname={primary}")));
        cluster
    }

    /// A directory for a cluster.
    fn empty(bin_dir: &Path, port: u16, options: &Options) -> Self {
        let owner = rustix::process::geteuid().is_root().then(unprivileged_user);
        let directory = temporary_directory(options.in_memory);
        let watchdog = Watchdog::start(
            &format!("{END_PROCESS}{REMOVE_CLUSTER}"),
            ["QUIT".as_ref(), directory.as_os_str()],
        );
        let cluster = Self {
            bin_dir: bin_dir.to_owned(),
            settings: settings(port, options, &directory),
            environment: options.environment.clone(),
            directory,
            owner,
            postmaster: None,
            watchdog,
        };
        cluster.give_to_owner(&cluster.directory.clone());
        cluster
    }

    pub(super) fn ca_file(&self) -> PathBuf {
        self.directory.join("ca.pem")
    }

    fn data(&self) -> PathBuf {
        self.directory.join("data")
    }

    fn initialise(&self, password: &str) {
        let password_file = self.write("password", password);
        let arguments =
            ["--username", SUPERUSER, "--auth=scram-sha-256", "--encoding=UTF8", "--no-locale", "--no-sync"];
        let mut command = self.command("initdb");
        self.run(command.args(arguments).arg("--pwfile").arg(password_file).arg("-D").arg(self.data()));
    }

    /// Runs a program, which must succeed.
    fn run(&self, command: &mut Command) {
        let output = command.output();
        let output = output.unwrap_or_else(|error| {
            panic!("cannot run a program in {}: {error}", self.bin_dir.display());
        });
        assert!(
            output.status.success(),
            "{} failed: {}{}",
            command.get_program().display(),
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }

    fn require_tls(&self) {
        let certificates = Certificates::generate();
        self.write("ca.pem", &certificates.authority);
        self.write("server.pem", &certificates.server);
        self.write("server.key", &certificates.server_key);
        self.write("data/pg_hba.conf", "hostssl all all 127.0.0.1/32 scram-sha-256\n");
    }

    /// Writes a file that only the owner of the cluster can read, which PostgreSQL requires for keys.
    fn write(&self, name: &str, content: &str) -> PathBuf {
        let file = self.directory.join(name);
        let written = fs::write(&file, content)
            .and_then(|()| fs::set_permissions(&file, fs::Permissions::from_mode(0o600)));
        written.unwrap_or_else(|error| panic!("cannot write {}: {error}", file.display()));
        self.give_to_owner(&file);
        file
    }

    fn give_to_owner(&self, path: &Path) {
        if let Some(Owner { uid, gid }) = self.owner {
            chown(path, Some(uid), Some(gid))
                .unwrap_or_else(|error| panic!("cannot give {} to user {uid}: {error}", path.display()));
        }
    }

    /// A PostgreSQL program that runs as the owner of the cluster.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.bin_dir.join(program));
        // The owner may not be able to enter the tests' directory. With its own process group, Ctrl-C reaches only the tests.
        command.current_dir(&self.directory).process_group(0).stdin(Stdio::null()).env("LC_ALL", "C");
        if let Some(Owner { uid, gid }) = self.owner {
            // As root this also drops the supplementary groups. Unlike `runuser` it keeps the process id.
            command.uid(uid).gid(gid);
        }
        command
    }

    fn log_file(&self) -> File {
        let path = self.directory.join("postgres.log");
        let file = OpenOptions::new().append(true).create(true).open(&path);
        file.unwrap_or_else(|error| panic!("cannot open {}: {error}", path.display()))
    }

    fn pid(&self) -> Pid {
        Pid::from_child(self.postmaster.as_ref().expect("this PostgreSQL is stopped: start() it first"))
    }

    /// Waits until the postmaster has exited and reaps it. Returns false on timeout.
    fn reap_within(&mut self, deadline: Duration) -> bool {
        let stopped = match &mut self.postmaster {
            Some(postmaster) => {
                becomes_true_blocking(deadline, || !matches!(postmaster.try_wait(), Ok(None)))
            }
            None => true,
        };
        if stopped && self.postmaster.take().is_some() {
            self.watchdog.release();
        }
        stopped
    }
}

impl Instance for Cluster {
    fn launch(&mut self) {
        assert!(self.postmaster.is_none(), "this PostgreSQL is running already: stop() or crash() it first");
        let log = self.log_file();
        let errors = log.try_clone().expect("a second descriptor for the log");
        let mut command = self.command("postgres");
        command.arg("-D").arg(self.data()).stdout(log).stderr(errors);
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        for (name, value) in &self.settings {
            command.arg("-c").arg(format!("{name}={value}"));
        }
        let postmaster = command.spawn();
        let postmaster = postmaster
            .unwrap_or_else(|error| panic!("cannot run {}/postgres: {error}", self.bin_dir.display()));
        self.watchdog.guard(Pid::from_child(&postmaster));
        self.postmaster = Some(postmaster);
    }

    fn has_exited(&mut self) -> bool {
        self.reap_within(Duration::ZERO)
    }

    fn stop(&mut self) {
        let pid = self.pid();
        self.resume();
        signal::send(pid, Signal::INT);
        assert!(
            self.reap_within(STOP_TIMEOUT),
            "PostgreSQL did not stop within {STOP_TIMEOUT:?}; its log:\n{}",
            self.log()
        );
    }

    fn crash(&mut self) {
        let pid = self.pid();
        // A frozen postmaster forks and restarts no children.
        signal::freeze(pid);
        let children = signal::children(pid);
        signal::send(pid, Signal::KILL);
        for child in &children {
            signal::send(*child, Signal::KILL);
        }
        assert!(
            self.reap_within(STOP_TIMEOUT),
            "SIGKILL did not end the postmaster: is it stuck on its disk?"
        );
        // The cluster cannot start again until its last process is gone.
        let gone = || children.iter().all(|child| !signal::is_alive(*child));
        assert!(
            becomes_true_blocking(STOP_TIMEOUT, gone),
            "SIGKILL did not end every backend: are they stuck on their disk?"
        );
    }

    fn pause(&mut self) {
        let pid = self.pid();
        signal::freeze(pid);
        for child in signal::children(pid) {
            signal::freeze(child);
        }
    }

    fn resume(&mut self) {
        let pid = self.pid();
        for child in signal::children(pid) {
            signal::send(child, Signal::CONT);
        }
        signal::send(pid, Signal::CONT);
    }

    fn log(&self) -> String {
        fs::read_to_string(self.directory.join("postgres.log")).unwrap_or_default()
    }

    fn demote(&mut self) {
        assert!(self.postmaster.is_none(), "this PostgreSQL is running: stop() or crash() it first");
        self.write("data/standby.signal", "");
    }
}

impl Drop for Cluster {
    /// Kills the server, which only its parent can reap; the watchdog then removes the directory.
    fn drop(&mut self) {
        if self.postmaster.is_none() {
            return;
        }
        self.resume();
        signal::send(self.pid(), Signal::QUIT);
        if !self.reap_within(Duration::from_secs(10)) {
            self.crash();
        }
    }
}

fn settings(port: u16, options: &Options, directory: &Path) -> Vec<(String, String)> {
    let file = |name: &str| directory.join(name).display().to_string();
    let mut settings = vec![
        ("listen_addresses", "127.0.0.1".to_owned()),
        ("port", port.to_string()),
        ("unix_socket_directories", String::new()),
        // In the data directory, so that a crashed cluster leaves nothing in /dev/shm, which has 64 MB in many containers.
        ("dynamic_shared_memory_type", "mmap".to_owned()),
    ];
    if options.tls {
        settings.push(("ssl", "on".to_owned()));
        settings.push(("ssl_cert_file", file("server.pem")));
        settings.push(("ssl_key_file", file("server.key")));
    }
    let settings = settings.into_iter().map(|(name, value)| (name.to_owned(), value));
    settings.chain(options.settings.iter().cloned()).collect()
}

/// `postgres` if that user exists, else `nobody`.
fn unprivileged_user() -> Owner {
    let users =
        fs::read_to_string("/etc/passwd").expect("/etc/passwd lists the user that PostgreSQL runs as");
    let owner = |wanted: &str| {
        let line = users.lines().find_map(|line| line.strip_prefix(wanted)?.strip_prefix(':'))?;
        let mut fields = line.split(':').skip(1).map(|field| field.parse().ok());
        Some(Owner { uid: fields.next()??, gid: fields.next()?? })
    };
    owner("postgres")
        .or_else(|| owner("nobody"))
        .expect("PostgreSQL does not run as root, and neither the user postgres nor nobody exists: run useradd -r postgres")
}

/// A fresh directory, mode 0700, whose parents any user can enter: TMPDIR may be in a home that only root can enter.
fn temporary_directory(in_memory: bool) -> PathBuf {
    let open = |directory: &PathBuf| {
        directory
            .ancestors()
            .all(|part| fs::metadata(part).is_ok_and(|meta| meta.permissions().mode() & 0o001 != 0))
    };
    let memory = in_memory.then(|| PathBuf::from(MEMORY)).filter(|memory| has_room(memory));
    let root = memory.unwrap_or_else(std::env::temp_dir);
    let root = if open(&root) { root } else { PathBuf::from("/tmp") };
    let directory = tempfile::Builder::new().prefix("weir-postgres-").tempdir_in(&root);
    directory
        .unwrap_or_else(|error| panic!("cannot create a directory in {}: {error}", root.display()))
        .keep()
}

fn has_room(directory: &Path) -> bool {
    statvfs(directory).is_ok_and(|system| system.f_bavail.saturating_mul(system.f_frsize) >= MEMORY_MIN)
}
