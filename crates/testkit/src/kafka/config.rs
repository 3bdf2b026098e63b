//! How a Kafka is run: its `server.properties`, as a local Java process or in a container.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{NAME, Proxied, archive, find};
use crate::daemon::Daemon;
use crate::discover::Source;
use crate::docker::Container;
use crate::instance::Instance;

/// Any would do, as each broker is a cluster of its own.
pub(super) const CLUSTER_ID: &str = "AAAAAAAAAAAAAAAAAAAAAQ";

/// The configuration comes in by environment, so that this works with an engine that shares no files with us.
const ENTRYPOINT: &str = r#"
printf %s "$WEIR_CONFIG" > /tmp/server.properties
/opt/kafka/bin/kafka-storage.sh format --ignore-formatted -t "$1" -c /tmp/server.properties &&
exec /opt/kafka/bin/kafka-server-start.sh /tmp/server.properties
"#;

/// Few threads and partitions: a test broker has one client, and starting is most of what it does. The session's end
/// is what a broker waits for before it may come back from a crash: nine seconds, were it not set here.
const SMALL_AND_QUICK: &str = "
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

/// A broker that is not launched yet.
pub(super) fn instance(source: &Source, port: u16, proxied: Option<Proxied>) -> Arc<Mutex<dyn Instance>> {
    match source {
        Source::Local(kafka) => Arc::new(Mutex::new(daemon(kafka, port, proxied, &archive::use_of(kafka)))),
        Source::Docker => Arc::new(Mutex::new(container(port, proxied))),
    }
}

/// A broker on this machine, its Java given `more` options.
pub(super) fn daemon(kafka: &Path, port: u16, proxied: Option<Proxied>, more: &[OsString]) -> Daemon {
    let java = find::java().expect("find::source looked for it or installed it");
    let mut daemon = Daemon::create(NAME, &java);
    for file in fs::read_dir(kafka.join("formatted")).into_iter().flatten().flatten() {
        let copied = fs::copy(file.path(), daemon.data().join(file.file_name()));
        copied.unwrap_or_else(|error| panic!("cannot copy {}: {error}", file.path().display()));
    }
    let config = daemon.write("server.properties", &properties("127.0.0.1", port, proxied, &daemon.data()));
    let mut arguments = more.to_vec();
    arguments.extend(java_arguments(&kafka.join("jars"), daemon.directory()));
    arguments.extend(["kafka.Kafka".into(), config.into()]);
    daemon.set_arguments(arguments);
    daemon
}

/// All but the main class and what it takes.
pub(super) fn java_arguments(jars: &Path, temporary: &Path) -> Vec<OsString> {
    let mut temporary_files = OsString::from("-Djava.io.tmpdir=");
    temporary_files.push(temporary);
    let options = [
        "-Xmx256m",
        // What a process of seconds does not need is left out: the second compiler, parallel collection, statistics
        // in a file that would outlive it.
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

/// In an order that does not change, because an archive of classes holds for one order only.
fn class_path(jars: &Path) -> OsString {
    let entries = fs::read_dir(jars).unwrap_or_else(|error| panic!("no jars in {}: {error}", jars.display()));
    let mut files: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    files.sort_unstable();
    std::env::join_paths(files).expect("no colon in the path of the cache directory")
}

fn container(port: u16, proxied: Option<Proxied>) -> Container {
    let data = Path::new("/tmp/weir-data");
    let config = properties("0.0.0.0", port, proxied, data);
    let ports = [Some(port), proxied.map(|proxied| proxied.listens.port())];
    let publish = ports.into_iter().flatten();
    let mut arguments: Vec<String> =
        publish.flat_map(|port| ["--publish".to_owned(), format!("127.0.0.1:{port}:{port}")]).collect();
    arguments.extend(["--env".to_owned(), format!("WEIR_CONFIG={config}")]);
    let image = format!("apache/kafka:{}", find::VERSION);
    let command = ["--entrypoint", "sh", &image, "-c", ENTRYPOINT, "sh", CLUSTER_ID];
    arguments.extend(command.map(str::to_owned));
    Container::create(arguments)
}

/// The text of `server.properties`.
pub(super) fn properties(bind: &str, port: u16, proxied: Option<Proxied>, data: &Path) -> String {
    let controller = crate::ports::unused();
    let mut listeners = vec![format!("MAIN://{bind}:{port}"), format!("CONTROLLER://127.0.0.1:{controller}")];
    let mut advertised = vec![format!("MAIN://127.0.0.1:{port}")];
    if let Some(Proxied { listens, advertises }) = proxied {
        listeners.push(format!("PROXIED://{bind}:{}", listens.port()));
        advertised.push(format!("PROXIED://{advertises}"));
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
log.dirs={data}{SMALL_AND_QUICK}"
    )
}
