//! Runs Redis as a local process or in a container, and writes its `redis.conf`.

use std::fmt::Write;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{NAME, Options};
use crate::certificates::Certificates;
use crate::daemon::Daemon;
use crate::discover::EngineSource;
use crate::docker::Container;
use crate::instance::Erasable;

const IMAGE: &str = "redis:7";

/// Files are passed by environment, since a Docker engine may not share files with the host.
const ENTRYPOINT: &str = r#"
umask 077
mkdir -p /weir/data
cd /weir
printf %s "$WEIR_CONFIG" > redis.conf
printf %s "$WEIR_AUTHORITY" > ca.pem
printf %s "$WEIR_CERTIFICATE" > server.pem
printf %s "$WEIR_KEY" > server.key
exec redis-server redis.conf
"#;

/// A server that is not started yet and, with TLS, the file of its certificate authority. With `bus_port` it is a node of a
/// cluster with this bus port.
pub(super) fn instance(
    source: &EngineSource,
    port: u16,
    options: &Options,
    bus_port: Option<u16>,
) -> (Arc<Mutex<dyn Erasable>>, Option<PathBuf>) {
    let certificates = options.tls.then(Certificates::generate);
    match source {
        EngineSource::Local(program) => {
            let (daemon, ca_file) = daemon(program.into(), port, options, bus_port, certificates);
            (Arc::new(Mutex::new(daemon)), ca_file)
        }
        EngineSource::Docker => {
            let (container, ca_file) = container(port, options, bus_port, certificates);
            (Arc::new(Mutex::new(container)), ca_file)
        }
    }
}

fn daemon(
    program: PathBuf,
    port: u16,
    options: &Options,
    bus_port: Option<u16>,
    certificates: Option<Certificates>,
) -> (Daemon, Option<PathBuf>) {
    let mut daemon = Daemon::create(NAME, &program);
    let config = daemon.write("redis.conf", &config("127.0.0.1", port, options, bus_port));
    daemon.set_arguments([config]);
    daemon.set_environment(options.environment.clone());
    let ca_file = certificates.map(|certificates| {
        daemon.write("server.pem", &certificates.server);
        daemon.write("server.key", &certificates.server_key);
        daemon.write("ca.pem", &certificates.authority)
    });
    (daemon, ca_file)
}

fn container(
    port: u16,
    options: &Options,
    bus_port: Option<u16>,
    certificates: Option<Certificates>,
) -> (Container, Option<PathBuf>) {
    // The nodes of a cluster must reach each other at the same addresses as clients.
    let (bind, network) = match bus_port {
        Some(_) => ("127.0.0.1", ["--network".to_owned(), "host".to_owned()]),
        None => ("0.0.0.0", ["--publish".to_owned(), format!("127.0.0.1:{port}:{port}")]),
    };
    let mut files = vec![("WEIR_CONFIG", config(bind, port, options, bus_port))];
    if let Some(certificates) = &certificates {
        files.push(("WEIR_AUTHORITY", certificates.authority.clone()));
        files.push(("WEIR_CERTIFICATE", certificates.server.clone()));
        files.push(("WEIR_KEY", certificates.server_key.clone()));
    }
    let mut arguments = network.to_vec();
    arguments
        .extend(files.into_iter().flat_map(|(name, text)| ["--env".to_owned(), format!("{name}={text}")]));
    arguments.extend(["--entrypoint", "sh", IMAGE, "-c", ENTRYPOINT].map(str::to_owned));
    let container = Container::create(arguments);
    let ca_file = certificates.map(|certificates| container.write("ca.pem", &certificates.authority));
    (container, ca_file)
}

/// The text of `redis.conf`. Paths are relative to `dir`, which Redis enters first.
fn config(bind: &str, port: u16, options: &Options, bus_port: Option<u16>) -> String {
    let mut lines = vec![("bind", bind.to_owned()), ("protected-mode", "no".to_owned())];
    if options.tls {
        lines.extend([
            ("port", "0".to_owned()),
            ("tls-port", port.to_string()),
            ("tls-cert-file", "../server.pem".to_owned()),
            ("tls-key-file", "../server.key".to_owned()),
            ("tls-ca-cert-file", "../ca.pem".to_owned()),
            ("tls-auth-clients", "no".to_owned()),
        ]);
    } else {
        lines.push(("port", port.to_string()));
    }
    if let Some(password) = &options.password {
        lines.push(("requirepass", quoted(password)));
    }
    // No snapshots: what survives a stop would depend on their timing.
    lines.extend([("dir", "data".to_owned()), ("save", r#""""#.to_owned())]);
    if options.appendonly {
        lines.extend([("appendonly", "yes".to_owned()), ("appendfsync", "always".to_owned())]);
    }
    if let Some(bus_port) = bus_port {
        lines.extend([
            ("cluster-enabled", "yes".to_owned()),
            ("cluster-port", bus_port.to_string()),
            ("cluster-announce-ip", "127.0.0.1".to_owned()),
        ]);
        // A third of the default of 15 s: short enough to notice a crashed node soon, long enough for a busy machine.
        lines.push(("cluster-node-timeout", "5000".to_owned()));
    }
    let own = options.settings.iter().map(|(name, value)| (name.as_str(), value.clone()));
    lines.into_iter().chain(own).fold(String::new(), |mut text, (name, value)| {
        writeln!(text, "{name} {value}").expect("a String takes any text");
        text
    })
}

fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', r"\\").replace('"', "\\\""))
}
