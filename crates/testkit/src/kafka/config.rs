//! Runs Kafka as a local Java process or in a container, and writes its `server.properties`.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use super::{NAME, ProxyListener, class_archive, find};
use crate::daemon::Daemon;
use crate::discover::EngineSource;
use crate::docker::Container;
use crate::instance::Instance;

/// The same for all, since each broker is its own cluster.
pub(super) const CLUSTER_ID: &str = "AAAAAAAAAAAAAAAAAAAAAQ";

/// The configuration is passed by environment, since a Docker engine may not share files with the host.
const ENTRYPOINT: &str = r#"
printf %s "$WEIR_CONFIG" > /tmp/server.properties
/opt/kafka/bin/kafka-storage.sh format --ignore-formatted -t "$1" -c /tmp/server.properties &&
exec /opt/kafka/bin/kafka-server-start.sh /tmp/server.properties
"#;

/// Few threads and partitions: a test broker has one client and spends most of its time starting. After a crash a broker
/// waits for the end of its old session, by default nine seconds.
const TEST_PROPERTIES: &str = "
num.partitions=2
auto.create.topics.enable=true
default.replication.factor=1
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
share.coordinator.state.topic.num.partitions=1
group.initial.rebalance.delay.ms=0
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500
num.network.threads=2
num.io.threads=4
log.cleaner.dedupe.buffer.size=4194304
";

/// A broker that is not started yet.
pub(super) fn instance(
    source: &EngineSource,
    port: u16,
    proxied: Option<ProxyListener>,
) -> Arc<Mutex<dyn Instance>> {
    match source {
        EngineSource::Local(kafka) => {
            Arc::new(Mutex::new(daemon(kafka, port, proxied, &class_archive::java_options(kafka))))
        }
        EngineSource::Docker => Arc::new(Mutex::new(container(port, proxied))),
    }
}

/// A local broker with `more` options for Java.
pub(super) fn daemon(kafka: &Path, port: u16, proxied: Option<ProxyListener>, more: &[OsString]) -> Daemon {
    let java = find::java().expect("find::source has found or installed Java");
    let mut daemon = Daemon::create(NAME, &java);
    copy_formatted(kafka, &daemon.data()).unwrap_or_else(|reason| panic!("{reason}"));
    let config = daemon.write("server.properties", &properties("127.0.0.1", port, proxied, &daemon.data()));
    let mut arguments = more.to_vec();
    arguments.extend(java_arguments(&kafka.join("jars"), daemon.directory()));
    arguments.extend(["kafka.Kafka".into(), config.into()]);
    daemon.set_arguments(arguments);
    daemon
}

/// Copies formatted storage, which every broker here begins with.
fn copy_formatted(kafka: &Path, data: &Path) -> Result<(), String> {
    for file in fs::read_dir(kafka.join("formatted")).into_iter().flatten().flatten() {
        fs::copy(file.path(), data.join(file.file_name()))
            .map_err(|error| format!("cannot copy {}: {error}", file.path().display()))?;
    }
    Ok(())
}

/// The program and arguments of a broker that is configured as the image does it: `KAFKA_LOG_DIRS` is `log.dirs`, and so on.
pub(super) fn image_command(
    kafka: &Path,
    environment: &BTreeMap<String, String>,
    directory: &Path,
) -> Result<(PathBuf, Vec<String>), String> {
    let java = find::java().ok_or("Java is not installed")?;
    let heap = environment.get("KAFKA_HEAP_OPTS").map(String::as_str).unwrap_or_default();
    let data = environment.get("KAFKA_LOG_DIRS").ok_or("KAFKA_LOG_DIRS is not set")?;
    copy_formatted(kafka, Path::new(data))?;
    let mut properties = String::new();
    for (name, value) in environment.iter().filter(|(name, _)| *name != "KAFKA_HEAP_OPTS") {
        if let Some(name) = name.strip_prefix("KAFKA_") {
            let _ = writeln!(properties, "{}={value}", name.to_lowercase().replace('_', "."));
        }
    }
    let config = directory.join("server.properties");
    fs::write(&config, properties).map_err(|error| format!("cannot write {}: {error}", config.display()))?;
    let text = |argument: OsString| argument.to_string_lossy().into_owned();
    let mut arguments: Vec<String> = class_archive::java_options(kafka).into_iter().map(text).collect();
    arguments.extend(java_arguments(&kafka.join("jars"), directory).into_iter().map(text));
    arguments.extend(heap.split_whitespace().map(str::to_owned));
    arguments.extend(["kafka.Kafka".to_owned(), config.display().to_string()]);
    Ok((java, arguments))
}

/// The arguments of Java before the main class.
pub(super) fn java_arguments(jars: &Path, temporary: &Path) -> Vec<OsString> {
    let mut temporary_files = OsString::from("-Djava.io.tmpdir=");
    temporary_files.push(temporary);
    let options = [
        "-Xmx256m",
        // Without what a process of a few seconds does not need: the second compiler, parallel garbage collection, and a
        // file of statistics.
        "-XX:TieredStopAtLevel=1",
        "-XX:+UseSerialGC",
        "-XX:-UsePerfData",
        "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
        "-Dorg.slf4j.simpleLogger.showDateTime=true",
        "-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss.SSS",
    ];
    let mut arguments: Vec<OsString> = options.map(OsString::from).to_vec();
    arguments.extend([temporary_files, "-cp".into(), class_path(jars)]);
    arguments
}

/// Sorted, because an archive of classes is valid for one order only.
fn class_path(jars: &Path) -> OsString {
    let entries = fs::read_dir(jars).unwrap_or_else(|error| panic!("no jars in {}: {error}", jars.display()));
    let mut files: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    files.sort_unstable();
    std::env::join_paths(files).expect("no colon in the path of the cache directory")
}

fn container(port: u16, proxied: Option<ProxyListener>) -> Container {
    let data = Path::new("/tmp/weir-data");
    let config = properties("0.0.0.0", port, proxied, data);
    let ports = [Some(port), proxied.map(|proxied| proxied.listen.port())];
    let publish = ports.into_iter().flatten();
    let mut arguments: Vec<String> =
        publish.flat_map(|port| ["--publish".to_owned(), format!("127.0.0.1:{port}:{port}")]).collect();
    arguments.extend(["--env".to_owned(), format!("WEIR_CONFIG={config}")]);
    let image = format!("apache/kafka:{}", find::VERSION);
    let command = ["--entrypoint", "sh", &image, "-c", ENTRYPOINT, "sh", CLUSTER_ID];
    arguments.extend(command.map(str::to_owned));
    Container::create(arguments)
}

pub(super) fn properties(bind: &str, port: u16, proxied: Option<ProxyListener>, data: &Path) -> String {
    let controller = crate::ports::unused();
    let mut listeners = vec![format!("MAIN://{bind}:{port}"), format!("CONTROLLER://127.0.0.1:{controller}")];
    let mut advertised = vec![format!("MAIN://127.0.0.1:{port}")];
    if let Some(ProxyListener { listen, advertise }) = proxied {
        listeners.push(format!("PROXIED://{bind}:{}", listen.port()));
        advertised.push(format!("PROXIED://{advertise}"));
    }
    let (listeners, advertised, data) = (listeners.join(","), advertised.join(","), data.display());
    format!(
        "process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners={listeners}
advertised.listeners={advertised}
listener.security.protocol.map=MAIN:PLAINTEXT,PROXIED:PLAINTEXT,CONTROLLER:PLAINTEXT
inter.broker.listener.name=MAIN
controller.listener.names=CONTROLLER
log.dirs={data}{TEST_PROPERTIES}"
    )
}
