//! Decides where a Kafka comes from: jars that an earlier run has fetched, else Maven fetches them, else Docker.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use super::{archive, config};
use crate::apt;
use crate::discover::{self, Source};

pub(super) const VERSION: &str = "4.3.1";
/// The oldest Java that this Kafka runs on.
const OLDEST_JAVA: u32 = 17;

/// The broker, and the smallest way for it to log.
const POM: &str = include_str!("pom.xml");

/// Looks once per process: when nothing works, a hundred tests should not each wait for Maven to find that out.
pub(super) fn source() -> Result<&'static Source, &'static str> {
    static FOUND: OnceLock<Result<Source, String>> = OnceLock::new();
    FOUND.get_or_init(search).as_ref().map_err(String::as_str)
}

/// Local is the directory that [`prepare`] makes.
fn search() -> Result<Source, String> {
    discover::search(local, install, |maven| {
        format!(
            "no Kafka for the tests: none in {}; {maven}; `docker info` fails. Install Java {OLDEST_JAVA} and Maven \
             or start Docker; or set WEIR_TEST_KAFKA to host:port, which serves all tests but those that stop their \
             broker; or set WEIR_TEST_SKIP=kafka to leave them out.",
            prepared().display()
        )
    })
}

pub(super) fn local() -> Option<PathBuf> {
    java()?;
    Some(prepared()).filter(|directory| directory.exists())
}

/// A Java new enough.
pub(super) fn java() -> Option<PathBuf> {
    let home = std::env::var_os("JAVA_HOME").map(|home| Path::new(&home).join("bin/java"));
    let mut candidates = home.into_iter().filter(|java| java.is_file()).chain(discover::on_path("java"));
    candidates.find(|java| {
        let output = Command::new(java).arg("-version").stdin(Stdio::null()).output();
        output
            .is_ok_and(|output| major_version(&String::from_utf8_lossy(&output.stderr)) >= Some(OLDEST_JAVA))
    })
}

/// Of a text such as `openjdk version "17.0.15" 2025-04-15`.
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
    prepare(&prepared(), &maven, &java)
}

/// Where this version is kept from run to run.
fn prepared() -> PathBuf {
    discover::cache().join(format!("kafka-{VERSION}"))
}

/// Makes `directory` with the jars, and with storage that is formatted once for all brokers, whose clusters never
/// meet: formatting takes as long as starting does.
fn prepare(directory: &Path, maven: &Path, java: &Path) -> Result<PathBuf, String> {
    let parent = directory.parent().expect("it is in weir-testkit");
    fs::create_dir_all(parent).unwrap_or_else(|error| panic!("cannot make {}: {error}", parent.display()));
    let lock = parent.join(format!("kafka-{VERSION}.lock"));
    let held = File::create(&lock).and_then(|file| {
        file.lock()?;
        Ok(file)
    });
    let _held = held.unwrap_or_else(|error| panic!("cannot lock {}: {error}", lock.display()));
    // Another test process may have made it while this one waited.
    if directory.exists() {
        return Ok(directory.to_owned());
    }
    eprintln!("weir-testkit: fetching Kafka {VERSION} with Maven (once for this user)");
    let unfinished = parent.join(format!("kafka-{VERSION}.unfinished"));
    // A test process that was killed leaves one.
    let _ = fs::remove_dir_all(&unfinished);
    fs::create_dir(&unfinished)
        .unwrap_or_else(|error| panic!("cannot make {}: {error}", unfinished.display()));
    fetch(&unfinished, maven)?;
    format(&unfinished, java)?;
    // All of it or nothing: whoever sees the directory may use it.
    fs::rename(&unfinished, directory)
        .unwrap_or_else(|error| panic!("cannot rename {}: {error}", unfinished.display()));
    // Last, as it holds only for jars that are not moved any more.
    archive::make(directory)?;
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
    // The port is written nowhere.
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
    fn an_old_java_is_told_from_a_new_one() {
        assert_eq!(major_version("java version \"1.8.0_202\"\nJava(TM) SE Runtime"), Some(1));
        assert_eq!(major_version("openjdk version \"17.0.15\" 2025-04-15\n"), Some(17));
        assert_eq!(major_version("openjdk version \"24\" 2025-03-18\n"), Some(24));
        assert_eq!(major_version("no such thing"), None);
    }
}
