//! Stops the processes that a test process started and removes their files, also if the test process is killed.
//!
//! The watchdog is a `sh` that reads from a pipe whose only write end is in the test process. Statics are not
//! dropped and SIGKILL cannot be caught, but the kernel closes the pipe in every case, and then the script runs.
//! (`PR_SET_PDEATHSIG` would not do: it fires when the *thread* that spawned the child ends, which in a test run
//! is long before the process does.)

use std::ffi::OsStr;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use rustix::process::Pid;

/// Reads until the pipe is closed; `$pid` is then the process to end, if any.
const UNTIL_THE_TEST_ENDS: &str = r#"
pid=
while read -r line; do pid=$line; done
"#;

/// Ends `$pid` with signal `$1` and kills it if it is still running after ten seconds. A paused process must be continued
/// first, or it would not handle the signal. A zombie counts as ended: its parent, the test process, is gone, and in many
/// containers process 1 does not reap.
pub(crate) const END_PROCESS: &str = r#"
if [ -n "$pid" ]; then
  kill -CONT "$pid" $(cat "/proc/$pid/task/$pid/children")
  kill -s "$1" "$pid"
  tries=0
  while kill -0 "$pid" && ! grep -q '^State:.Z' "/proc/$pid/status" && [ $tries -lt 200 ]; do
    sleep 0.05
    tries=$((tries + 1))
  done
  kill -KILL "$pid"
fi
"#;

pub(crate) struct Watchdog {
    shell: Child,
}

impl Watchdog {
    /// Runs `script` with `arguments` as `$1`, `$2`, … when this value is dropped or the test process ends.
    pub(crate) fn start<S: AsRef<OsStr>>(script: &str, arguments: impl IntoIterator<Item = S>) -> Self {
        let shell = Command::new("sh")
            .args(["-c", &format!("{UNTIL_THE_TEST_ENDS}{script}"), "weir-test-watchdog"])
            .args(arguments)
            .current_dir("/")
            // With its own process group, Ctrl-C ends the tests but not their cleanup.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("tests need a POSIX sh on PATH");
        Self { shell }
    }

    /// Makes `pid` the process to end.
    pub(crate) fn guard(&mut self, pid: Pid) {
        self.write_line(&pid.as_raw_nonzero().to_string());
    }

    /// Forgets the process to end. It was reaped, so its id may belong to another process now.
    pub(crate) fn release(&mut self) {
        self.write_line("");
    }

    fn write_line(&mut self, line: &str) {
        let pipe = self.shell.stdin.as_mut().expect("stdin was piped");
        writeln!(pipe, "{line}")
            .expect("the watchdog sh reads until its pipe is closed; did something kill it?");
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        drop(self.shell.stdin.take());
        let _ = self.shell.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    fn sleeper() -> Child {
        Command::new("cat").stdin(Stdio::piped()).spawn().unwrap()
    }

    #[test]
    fn ends_the_guarded_process_and_runs_its_script() {
        let directory = tempfile::tempdir().unwrap();
        let mark = directory.path().join("mark");
        let mut child = sleeper();
        let mut watchdog =
            Watchdog::start(&format!("{END_PROCESS}touch \"$2\""), ["TERM", mark.to_str().unwrap()]);
        watchdog.guard(Pid::from_child(&child));
        // `wait` would close it, and then `cat` would exit.
        let _lock = child.stdin.take();
        let reaper = std::thread::spawn(move || child.wait().unwrap().signal());
        drop(watchdog);
        assert_eq!(reaper.join().unwrap(), Some(rustix::process::Signal::TERM.as_raw()));
        assert!(mark.exists());
    }

    #[test]
    fn leaves_a_released_process_alone() {
        let mut child = sleeper();
        let mut watchdog = Watchdog::start(END_PROCESS, ["KILL"]);
        watchdog.guard(Pid::from_child(&child));
        watchdog.release();
        drop(watchdog);
        assert_eq!(child.try_wait().unwrap(), None);
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
    }
}
