//! How a Redis is run: its `redis.conf`, as a local process or in a container.

use std::fmt::Write;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{NAME, Options};
use crate::certificates::Certificates;
use crate::daemon::Daemon;
use crate::discover::Source;
use crate::docker::Container;
use crate::instance::Erasable;

const IMAGE: &str = "redis:7";

/// Files come in by environment, so that this works with an engine that shares no files with us.
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

/// A server that is not launched yet and, with TLS, its certificate authority. With `bus_port` it is a node of a
/// cluster and talks to the others there.
pub(super) fn instance(
    source: &Source,
    port: u16,
    options: &Options,
    bus_port: Option<u16>,
) -> (Arc<Mutex<dyn Erasable>>, Option<PathBuf>) {
    let certificates = options.tls.then(Certificates::generate);
    match source {
        Source::Local(program) => {
            let (daemon, ca_file) = daemon(program.into(), port, options, bus_port, certificates);
            (Arc::new(Mutex::new(daemon)), ca_file)
        }
        Source::Docker => {
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
    // The nodes of a cluster must find each other where clients find them.
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

/// The text of `redis.conf`. Redis enters `dir` before it looks for any other file.
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
    // No snapshots: they would make what survives a stop a matter of timing.
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
        // A third of Redis's own 15 s: a crashed node is noticed soon, a busy machine's hiccup is not.
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
