//! Signals to the processes that this crate started and to their children.

use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};

use crate::wait::becomes_true_blocking;

/// Sends `signal`. A process that is already gone is no error, since every signal here races with an exit.
pub(crate) fn send(pid: Pid, signal: Signal) {
    match kill_process(pid, signal) {
        Ok(()) | Err(Errno::SRCH) => {}
        Err(error) => panic!("cannot send {signal:?} to process {pid:?}: {error}"),
    }
}

/// Sends SIGSTOP and waits until it has taken effect: the process starts no more children.
pub(crate) fn freeze(pid: Pid) {
    send(pid, Signal::STOP);
    let frozen = || stat(pid).is_none_or(|(state, _)| ["T", "t", "Z", "X"].contains(&state.as_str()));
    assert!(becomes_true_blocking(Duration::from_secs(10), frozen), "SIGSTOP did not stop process {pid:?}");
}

/// The direct children of `parent`, from `/proc`.
pub(crate) fn children(parent: Pid) -> Vec<Pid> {
    let entries =
        std::fs::read_dir("/proc").expect("crash() and pause() find processes in /proc, so need Linux");
    entries
        .filter_map(|entry| Pid::from_raw(entry.ok()?.file_name().to_str()?.parse().ok()?))
        .filter(|pid| stat(*pid).is_some_and(|(_, its_parent)| its_parent == parent.as_raw_nonzero().get()))
        .collect()
}

/// Whether a process is running. A zombie is not: in many containers process 1 reaps orphans late or never.
pub(crate) fn is_alive(pid: Pid) -> bool {
    stat(pid).is_some_and(|(state, _)| state != "Z" && state != "X")
}

/// State and parent of a process.
fn stat(pid: Pid) -> Option<(String, i32)> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    // "pid (name) state parent …", and the name may itself hold spaces and parentheses.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace();
    Some((fields.next()?.to_owned(), fields.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn finds_and_kills_a_child() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let pid = Pid::from_child(&child);
        assert!(children(rustix::process::getpid()).contains(&pid));
        freeze(pid);
        assert!(is_alive(pid));
        send(pid, Signal::KILL);
        assert!(becomes_true_blocking(Duration::from_secs(5), || !is_alive(pid)), "a zombie is not alive");
        assert!(!child.wait().unwrap().success());
        send(pid, Signal::KILL);
    }
}
