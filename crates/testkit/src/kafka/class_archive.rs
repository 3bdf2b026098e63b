//! A Java class data archive of the classes that a broker loads: with it Kafka starts in half the time.
//!
//! It is optional: a broker starts without it, and Java ignores an archive from another version of Java.

use std::ffi::OsString;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use super::{NAME, config, protocol};
use crate::daemon::Daemon;
use crate::instance::{Handle, Instance};

/// Starts a broker of `kafka`, stops it when it is ready, and archives the classes that it loaded.
pub(super) fn create(kafka: &Path) -> Result<(), String> {
    let unfinished = kafka.join("classes.unfinished");
    let port = crate::ports::unused();
    let daemon = config::daemon(kafka, port, None, &[option("-XX:ArchiveClassesAtExit=", &unfinished)]);
    let broker: Handle<Daemon> = Handle::new(NAME, Arc::new(Mutex::new(daemon)));
    broker.lock().launch();
    broker.wait_ready(|| protocol::probe(SocketAddr::from((Ipv4Addr::LOCALHOST, port))))?;
    broker.lock().stop();
    // Renamed when complete, since other test processes may look for it. A Java without archives is no error.
    let _ = fs::rename(unfinished, archive(kafka));
    Ok(())
}

/// The Java options that use the archive of `kafka`, if there is one.
pub(super) fn java_options(kafka: &Path) -> Vec<OsString> {
    let archive = archive(kafka);
    if archive.exists() { vec![option("-XX:SharedArchiveFile=", &archive)] } else { Vec::new() }
}

fn archive(kafka: &Path) -> PathBuf {
    kafka.join("classes.jsa")
}

fn option(name: &str, file: &Path) -> OsString {
    let mut option = OsString::from(name);
    option.push(file);
    option
}
