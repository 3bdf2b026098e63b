//! Finds Kafka: jars from an earlier run, else fetched by Maven, else Docker.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use super::{class_archive, config};
use crate::apt;
use crate::discover::{self, EngineSource};

pub(super) const VERSION: &str = "4.3.1";
/// The oldest Java that this Kafka runs on.
const OLDEST_JAVA: u32 = 17;

/// The broker and a minimal logger.
const POM: &str = include_str!("pom.xml");

/// Searches once per process, so that not every test waits for Maven if nothing works.
pub(super) fn source() -> Result<&'static EngineSource, &'static str> {
    static FOUND: OnceLock<Result<EngineSource, String>> = OnceLock::new();
    FOUND.get_or_init(search).as_ref().map_err(String::as_str)
}

/// The local source is the directory that [`prepare`] creates.
fn search() -> Result<EngineSource, String> {
    discover::search(local, install, |maven| {
        format!(
            "no Kafka for the tests: none in {}; {maven}; `docker info` fails. Install Java {OLDEST_JAVA} and Maven \
             or start Docker; or set WEIR_TEST_KAFKA to host:port, which serves all tests but those that stop their \
             broker; or set WEIR_TEST_SKIP=kafka to leave them out.",
            cache_directory().display()
        )
    })
}

pub(super) fn local() -> Option<PathBuf> {
    java()?;
    Some(cache_directory()).filter(|directory| directory.exists())
}

/// A Java of version [`OLDEST_JAVA`] or newer.
pub(super) fn java() -> Option<PathBuf> {
    let home = std::env::var_os("JAVA_HOME").map(|home| Path::new(&home).join("bin/java"));
    let mut candidates = home.into_iter().filter(|java| java.is_file()).chain(discover::on_path("java"));
    candidates.find(|java| {
        let output = Command::new(java).arg("-version").stdin(Stdio::null()).output();
        output
            .is_ok_and(|output| major_version(&String::from_utf8_lossy(&output.stderr)) >= Some(OLDEST_JAVA))
    })
}

/// Parses a text such as `openjdk version "17.0.15" 2025-04-15`.
fn major_version(text: &str) -> Option<u32> {
    let (_, version) = text.split_once("version \"")?;
    version.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

fn install() -> Result<PathBuf, String> {
    let java = java().map_or_else(|| apt::install(&["default-jre-headless"], || {}, java), Ok);
    let java = java.map_err(|reason| format!("no Java {OLDEST_JAVA} on PATH: {reason}"))?;
    let maven = || discover::on_path("mvn");
    let maven = maven().map_or_else(|| apt::install(&["maven"], || {}, maven), Ok);
    let maven = maven.map_err(|reason| format!("no mvn on PATH: {reason}"))?;
    prepare(&cache_directory(), &maven, &java)
}

/// The directory of this version, which later runs reuse.
fn cache_directory() -> PathBuf {
    discover::cache().join(format!("kafka-{VERSION}"))
}

/// Creates `directory` with the jars and with formatted storage that all brokers copy, since formatting takes as long as
/// starting, and brokers of different tests never meet.
fn prepare(directory: &Path, maven: &Path, java: &Path) -> Result<PathBuf, String> {
    let parent = directory.parent().expect("the directory is inside weir-testkit");
    fs::create_dir_all(parent).unwrap_or_else(|error| panic!("cannot create {}: {error}", parent.display()));
    let lock = parent.join(format!("kafka-{VERSION}.lock"));
    let held = File::create(&lock).and_then(|file| {
        file.lock()?;
        Ok(file)
    });
    let _lock = held.unwrap_or_else(|error| panic!("cannot lock {}: {error}", lock.display()));
    // Another test process may have created it while this one waited.
    if directory.exists() {
        return Ok(directory.to_owned());
    }
    eprintln!("weir-testkit: fetching Kafka {VERSION} with Maven (once for this user)");
    let unfinished = parent.join(format!("kafka-{VERSION}.unfinished"));
    // A killed test process may have left one.
    let _ = fs::remove_dir_all(&unfinished);
    fs::create_dir(&unfinished)
        .unwrap_or_else(|error| panic!("cannot create {}: {error}", unfinished.display()));
    fetch(&unfinished, maven)?;
    format(&unfinished, java)?;
    // Renamed when complete, since other processes may use the directory as soon as it exists.
    fs::rename(&unfinished, directory)
        .unwrap_or_else(|error| panic!("cannot rename {}: {error}", unfinished.display()));
    // Last, since the archive contains the final path of the jars.
    class_archive::create(directory)?;
    Ok(directory.to_owned())
}

fn fetch(directory: &Path, maven: &Path) -> Result<(), String> {
    let mut output = String::from("-DoutputDirectory=");
    output.push_str(&directory.join("jars").to_string_lossy());
    fs::write(directory.join("pom.xml"), POM.replace("KAFKA_VERSION", VERSION))
        .unwrap_or_else(|error| panic!("cannot write into {}: {error}", directory.display()));
    let mut command = Command::new(maven);
    command.args(["--batch-mode", "--quiet", "dependency:copy-dependencies", &output]).current_dir(directory);
    succeed(&mut command, "mvn dependency:copy-dependencies")
}

fn format(directory: &Path, java: &Path) -> Result<(), String> {
    let formatted = directory.join("formatted");
    let config = directory.join("server.properties");
    // The port is not stored by formatting.
    let properties = config::properties("127.0.0.1", crate::ports::unused(), None, &formatted);
    fs::write(&config, properties)
        .unwrap_or_else(|error| panic!("cannot write {}: {error}", config.display()));
    let mut command = Command::new(java);
    command
        .args(config::java_arguments(&directory.join("jars"), directory))
        .args(["kafka.tools.StorageTool", "format", "-t", config::CLUSTER_ID, "-c"])
        .arg(config);
    succeed(&mut command, "kafka.tools.StorageTool format")
}

fn succeed(command: &mut Command, name: &str) -> Result<(), String> {
    // Standard output belongs to the test harness.
    let status = command.stdin(Stdio::null()).stdout(std::io::stderr()).status();
    let succeeded = status.is_ok_and(|status| status.success());
    if succeeded { Ok(()) } else { Err(format!("{name} failed (its output is above)")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_major_version_of_java_is_parsed() {
        assert_eq!(major_version("java version \"1.8.0_202\"\nJava(TM) SE Runtime"), Some(1));
        assert_eq!(major_version("openjdk version \"17.0.15\" 2025-04-15\n"), Some(17));
        assert_eq!(major_version("openjdk version \"24\" 2025-03-18\n"), Some(24));
        assert_eq!(major_version("no such thing"), None);
    }
}
