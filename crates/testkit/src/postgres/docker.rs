//! A cluster in a container, for machines with Docker and without PostgreSQL.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use tempfile::TempDir;

use super::certificates::Certificates;
use super::{Instance, Options};
use crate::watchdog::Watchdog;

const IMAGE: &str = "postgres:15";

/// Certificates come in by environment, so that this works with an engine that shares no files with us.
const ENTRYPOINT: &str = r#"
if [ -n "$WEIR_KEY" ]; then
  umask 077
  mkdir -p /weir
  printf %s "$WEIR_KEY" > /weir/server.key
  printf %s "$WEIR_CERTIFICATE" > /weir/server.pem
  printf 'local all all trust\nhostssl all all all scram-sha-256\n' > /weir/hba.conf
  chown -R postgres:postgres /weir
fi
exec docker-entrypoint.sh postgres "$@"
"#;

pub(super) struct Container {
    name: String,
    /// Holds the authority's certificate for clients.
    directory: TempDir,
    _watchdog: Watchdog,
}

impl Container {
    pub(super) fn create(port: u16, password: &str, options: &Options) -> Self {
        let name = format!("weir-test-{:016x}", fastrand::u64(..));
        let watchdog = Watchdog::start(r#"docker rm --force --volumes "$1""#, [&name]);
        let directory = tempfile::tempdir().expect("the temporary directory takes a directory");
        let mut command = Command::new("docker");
        command.args(["create", "--name", &name, "--publish", &format!("127.0.0.1:{port}:5432")]).args([
            "--env",
            &format!("POSTGRES_PASSWORD={password}"),
            "--entrypoint",
            "sh",
        ]);
        if options.tls {
            let certificates = Certificates::generate();
            fs::write(directory.path().join("ca.pem"), certificates.authority)
                .expect("a new directory takes a file");
            command.args(["--env", &format!("WEIR_KEY={}", certificates.server_key)]);
            command.args(["--env", &format!("WEIR_CERTIFICATE={}", certificates.server)]);
        }
        command.args([IMAGE, "-c", ENTRYPOINT, "sh"]);
        for (name, value) in settings(options) {
            command.args(["-c", &format!("{name}={value}")]);
        }
        run(&mut command);
        Self { name, directory, _watchdog: watchdog }
    }

    pub(super) fn ca_file(&self) -> PathBuf {
        self.directory.path().join("ca.pem")
    }

    fn docker(&self, arguments: &[&str]) -> String {
        run(Command::new("docker").args(arguments).arg(&self.name))
    }
}

impl Instance for Container {
    fn launch(&mut self) {
        self.docker(&["start"]);
    }

    fn has_exited(&mut self) -> bool {
        self.docker(&["inspect", "--format", "{{.State.Running}}"]).trim() == "false"
    }

    fn stop(&mut self) {
        // The image declares SIGINT, PostgreSQL's orderly stop, as its stop signal.
        self.docker(&["stop", "-t", "30"]);
    }

    fn crash(&mut self) {
        self.docker(&["kill"]);
    }

    fn pause(&mut self) {
        self.docker(&["pause"]);
    }

    fn resume(&mut self) {
        self.docker(&["unpause"]);
    }

    fn log(&self) -> String {
        self.docker(&["logs"])
    }

    fn bin_dir(&self) -> Option<PathBuf> {
        None
    }
}

fn settings(options: &Options) -> Vec<(String, String)> {
    let tls = [
        ("ssl", "on"),
        ("ssl_cert_file", "/weir/server.pem"),
        ("ssl_key_file", "/weir/server.key"),
        ("hba_file", "/weir/hba.conf"),
    ];
    let own =
        tls.into_iter().filter(|_| options.tls).map(|(name, value)| (name.to_owned(), value.to_owned()));
    own.chain(options.settings.iter().cloned()).collect()
}

/// What the command printed, on both streams: `docker logs` uses both.
fn run(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().expect("`docker info` worked a moment ago");
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    // Not the command itself, which may carry a password and a key.
    assert!(output.status.success(), "docker {:?} failed: {text}", command.get_args().next());
    text
}
