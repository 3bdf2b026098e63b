//! An archive of the classes that a broker loads, already parsed: with it Kafka starts in half the time.
//!
//! It is a convenience: a broker starts without it, and Java ignores one that was made by another Java.

use std::ffi::OsString;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use super::{NAME, config, protocol};
use crate::daemon::Daemon;
use crate::instance::{Handle, Instance};

/// Has a broker of `kafka` start, be ready and stop, and archives the classes that this took.
pub(super) fn make(kafka: &Path) -> Result<(), String> {
    let unfinished = kafka.join("classes.unfinished");
    let port = crate::ports::unused();
    let daemon = config::daemon(kafka, port, None, &[option("-XX:ArchiveClassesAtExit=", &unfinished)]);
    let broker: Handle<Daemon> = Handle::new(NAME, Arc::new(Mutex::new(daemon)));
    broker.lock().launch();
    broker.wait_ready(|| protocol::probe(SocketAddr::from((Ipv4Addr::LOCALHOST, port))))?;
    broker.lock().stop();
    // Other test processes may look for it meanwhile. A Java that archives nothing is no reason to fail.
    let _ = fs::rename(unfinished, archive(kafka));
    Ok(())
}

/// The Java options to use the archive of `kafka`, if there is one.
pub(super) fn use_of(kafka: &Path) -> Vec<OsString> {
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
