//! A PostgreSQL cluster in a container, for machines that have Docker but not PostgreSQL.

use std::path::PathBuf;

use super::Options;
use crate::certificates::Certificates;
use crate::docker::Container;

const IMAGE: &str = "postgres:15";

/// Certificates are passed by environment, since a Docker engine may not share files with the host.
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

/// The container and, with TLS, the file of its certificate authority.
pub(super) fn container(port: u16, password: &str, options: &Options) -> (Container, Option<PathBuf>) {
    let mut arguments: Vec<String> = Vec::new();
    let mut add = |more: &[&str]| arguments.extend(more.iter().map(|&argument| argument.to_owned()));
    add(&["--publish", &format!("127.0.0.1:{port}:5432")]);
    add(&["--env", &format!("POSTGRES_PASSWORD={password}"), "--entrypoint", "sh"]);
    let certificates = options.tls.then(Certificates::generate);
    if let Some(certificates) = &certificates {
        add(&["--env", &format!("WEIR_KEY={}", certificates.server_key)]);
        add(&["--env", &format!("WEIR_CERTIFICATE={}", certificates.server)]);
    }
    add(&[IMAGE, "-c", ENTRYPOINT, "sh"]);
    for (name, value) in settings(options) {
        add(&["-c", &format!("{name}={value}")]);
    }
    let container = Container::create(arguments);
    let ca_file = certificates.map(|certificates| container.write("ca.pem", &certificates.authority));
    (container, ca_file)
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
