//! A real Kafka with a listener for each way of connecting: TLS, TLS with clients' certificates, and SASL over either.

use std::fmt::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::{NAME, class_archive, config, find, protocol};
use crate::certificates::{Authority, Certificate};
use crate::daemon::Daemon;
use crate::discover::EngineSource;
use crate::instance::{Handle, Instance, with_unused_port};

/// The user of every SASL mechanism.
pub const USER: &str = "weir";
pub const PASSWORD: &str = "kafka-hunter2";

/// A running Kafka. It needs a local Java, not Docker, because it reads files.
pub struct SecureBroker {
    instance: Handle<Daemon>,
    files: PathBuf,
    ports: [u16; 4],
}

impl SecureBroker {
    /// The broker that all tests of this process share, started on first use. Blocks until it is ready.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<SecureBroker> = OnceLock::new();
        SHARED.get_or_init(|| with_unused_port(NAME, Self::start))
    }

    fn start(port: u16) -> Result<Self, String> {
        let source = find::source().unwrap_or_else(|reason| panic!("{reason}"));
        let EngineSource::Local(kafka) = source else {
            panic!("the tests of TLS and SASL need a local Kafka: install Java and Maven")
        };
        let java = find::java().expect("find::source has found or installed Java");
        let mut daemon = Daemon::create(NAME, &java);
        let authority = Authority::generate();
        let server = authority.issue(&["localhost"]);
        let client = authority.issue(&["weir"]);
        let ca = daemon.write("ca.pem", &authority.pem());
        let keystore = daemon.write("server.pem", &format!("{}{}", server.key, server.certificate));
        write_identity(&daemon, "client", &client);
        daemon.write("other-ca.pem", &Authority::generate().pem());
        let ports = [(); 4].map(|()| crate::ports::unused());
        let mut properties = config::properties("127.0.0.1", port, None, &daemon.data());
        secure(&mut properties, ports, &ca, &keystore);
        let file = daemon.write("server.properties", &properties);
        // Users of SCRAM are stored when the storage is formatted.
        let mut format = Command::new(&java);
        format.args(config::java_arguments(&kafka.join("jars"), daemon.directory()));
        format.args(["kafka.tools.StorageTool", "format", "-t", config::CLUSTER_ID, "-c"]).arg(&file);
        for mechanism in ["SCRAM-SHA-256", "SCRAM-SHA-512"] {
            format.args(["--add-scram", &format!("{mechanism}=[name={USER},password={PASSWORD}]")]);
        }
        let output = format.stdin(Stdio::null()).output().map_err(|error| error.to_string())?;
        if !output.status.success() {
            return Err(format!("StorageTool failed: {}", String::from_utf8_lossy(&output.stderr)));
        }
        let mut arguments = class_archive::java_options(kafka);
        arguments.extend(config::java_arguments(&kafka.join("jars"), daemon.directory()));
        arguments.extend(["kafka.Kafka".into(), file.into()]);
        daemon.set_arguments(arguments);
        let files = daemon.directory().to_owned();
        let instance = Handle::new(NAME, Arc::new(Mutex::new(daemon)));
        instance.lock().launch();
        instance.wait_ready(|| protocol::probe(SocketAddr::from((Ipv4Addr::LOCALHOST, port))))?;
        Ok(Self { instance, files, ports })
    }

    /// TLS.
    pub fn tls(&self) -> String {
        format!("kafka+ssl://localhost:{}", self.ports[0])
    }

    /// TLS that requires clients' certificates.
    pub fn mutual_tls(&self) -> String {
        format!("kafka+ssl://localhost:{}", self.ports[1])
    }

    /// SASL over TLS.
    pub fn sasl_over_tls(&self) -> String {
        format!("kafka+ssl://localhost:{}", self.ports[2])
    }

    /// SASL without TLS.
    pub fn sasl(&self) -> String {
        format!("kafka://localhost:{}", self.ports[3])
    }

    /// `ca.pem`, `other-ca.pem`, which has signed nothing, `client.pem` or `client.key`.
    pub fn file(&self, name: &str) -> PathBuf {
        self.files.join(name)
    }

    /// The broker's log so far, warnings and errors.
    pub fn log(&self) -> String {
        self.instance.lock().log()
    }
}

fn write_identity(daemon: &Daemon, name: &str, identity: &Certificate) {
    daemon.write(&format!("{name}.pem"), &identity.certificate);
    daemon.write(&format!("{name}.key"), &identity.key);
}

/// Adds the listeners to a broker's properties. Clients that come by one are told to stay with it.
fn secure(properties: &mut String, ports: [u16; 4], ca: &Path, keystore: &Path) {
    let names = ["TLS", "MUTUAL", "SASLTLS", "SASLPLAIN"];
    let protocols = ["SSL", "SSL", "SASL_SSL", "SASL_PLAINTEXT"];
    let mut edited = String::new();
    for line in properties.lines() {
        edited.push_str(line);
        for (name, (port, protocol)) in names.iter().zip(ports.iter().zip(protocols)) {
            // Writing to memory cannot fail.
            let _ = match line.split_once('=').map(|(key, _)| key) {
                Some("listeners") => write!(edited, ",{name}://127.0.0.1:{port}"),
                Some("advertised.listeners") => write!(edited, ",{name}://localhost:{port}"),
                Some("listener.security.protocol.map") => write!(edited, ",{name}:{protocol}"),
                _ => Ok(()),
            };
        }
        edited.push('\n');
    }
    let (ca, keystore) = (ca.display(), keystore.display());
    let jaas = "org.apache.kafka.common.security";
    let _ = write!(
        edited,
        "ssl.keystore.type=PEM
ssl.keystore.location={keystore}
ssl.truststore.type=PEM
ssl.truststore.location={ca}
listener.name.mutual.ssl.client.auth=required
"
    );
    for listener in ["sasltls", "saslplain"] {
        let _ = write!(
            edited,
            "listener.name.{listener}.sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256,SCRAM-SHA-512
listener.name.{listener}.plain.sasl.jaas.config={jaas}.plain.PlainLoginModule required user_{USER}=\"{PASSWORD}\";
listener.name.{listener}.scram-sha-256.sasl.jaas.config={jaas}.scram.ScramLoginModule required;
listener.name.{listener}.scram-sha-512.sasl.jaas.config={jaas}.scram.ScramLoginModule required;
"
        );
    }
    *properties = edited;
}
