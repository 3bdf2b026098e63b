//! Request keys from a command, as secret stores and key management services have one: its output is the keys.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use super::encryption::{KeyProvider, TextKeys};
use crate::settings::source::SettingError;

/// How long the command may take.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How much it may write: more keys than anybody has.
const OUTPUT_MAX: u64 = 64 << 10;

const SETTING: &str = "keys.command";

/// Keys that a command writes, in the format of [`TextKeys`].
#[derive(Clone, Debug)]
pub(crate) struct CommandKeys(pub(crate) String);

impl KeyProvider for CommandKeys {
    /// Neither the command nor what it writes is shown, not even its error output: by mistake the keys may be there.
    fn keys(&self) -> Result<Vec<(String, Vec<u8>)>, SettingError> {
        let text = run(&self.0, TIMEOUT).map_err(|problem| {
            let must = "must be a command that writes the request keys within 10 s and ends with exit code 0";
            SettingError::conflict(format!("{SETTING} {must}: {problem}"))
        })?;
        TextKeys { setting: "the output of keys.command", text }.keys()
    }
}

/// A command and all processes that it starts.
struct ProcessGroup(Child);

impl Drop for ProcessGroup {
    /// Ends what is left of it.
    fn drop(&mut self) {
        let group = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw);
        if let Some(group) = group {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.0.wait();
    }
}

fn run(command: &str, timeout: Duration) -> Result<String, String> {
    let mut shell = Command::new("/bin/sh");
    shell.arg("-c").arg(command).process_group(0);
    shell.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut group = ProcessGroup(shell.spawn().map_err(|error| format!("it cannot be started ({error})"))?);
    let output = group.0.stdout.take().ok_or("its output cannot be read")?;
    let (sender, receiver) = mpsc::sync_channel(1);
    // Ends when the command and what it started have closed their output, at the latest when they are killed.
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let read = output.take(OUTPUT_MAX + 1).read_to_end(&mut bytes);
        let _ = sender.send(read.map(|_length| bytes));
    });
    let late = || format!("it was not done after {timeout:?}");
    let give_up_at = Instant::now() + timeout;
    let bytes = receiver.recv_timeout(timeout).map_err(|_late| late())?;
    let bytes = bytes.map_err(|error| format!("its output cannot be read ({error})"))?;
    if bytes.len() as u64 > OUTPUT_MAX {
        return Err(format!("it wrote more than {OUTPUT_MAX} bytes"));
    }
    let status = wait(&mut group.0, give_up_at).ok_or_else(late)?;
    if !status.success() {
        return Err(format!("it failed ({status}); run it by hand to see why"));
    }
    String::from_utf8(bytes).map_err(|_not_text| "it wrote something that is not text".to_owned())
}

/// Waits for a command that has closed its output.
fn wait(child: &mut Child, give_up_at: Instant) -> Option<ExitStatus> {
    loop {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        if Instant::now() >= give_up_at {
            return None;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "a:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";

    #[test]
    fn the_output_of_a_command_is_the_keys() {
        let keys = CommandKeys(format!("echo noise >&2; printf '# a comment\\n{KEY}\\n'")).keys().unwrap();
        assert_eq!(keys, [("a".to_owned(), vec![0; 32])]);
    }

    #[test]
    fn a_command_that_fails_is_named_and_its_output_is_not() {
        for (command, problem) in [
            (format!("echo {KEY}; exit 3"), "exit status: 3"),
            ("/nowhere/keys".to_owned(), "exit status: 127"),
            ("kill -9 $$".to_owned(), "signal: 9"),
            ("head -c 70000 /dev/zero".to_owned(), "more than 65536 bytes"),
            ("printf '\\377'".to_owned(), "not text"),
        ] {
            let sentence = CommandKeys(command.clone()).keys().unwrap_err().to_string();
            assert!(sentence.contains("keys.command") && sentence.contains(problem), "{command}: {sentence}");
            assert!(!sentence.contains(&KEY[2..]), "{sentence}");
        }
        for empty in ["true", "echo c2hvcnQ="] {
            let sentence = CommandKeys(empty.to_owned()).keys().unwrap_err().to_string();
            assert!(sentence.contains("the output of keys.command"), "{sentence}");
        }
    }

    #[test]
    fn a_command_that_does_not_end_is_killed_with_all_that_it_started() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("pid");
        // The shell ends at once; what it leaves behind keeps the output open.
        let command = format!("sleep 600 & echo $! > {}", file.display());
        let problem = run(&command, Duration::from_millis(300)).unwrap_err();
        assert!(problem.contains("300ms"), "{problem}");
        let pid: i32 = std::fs::read_to_string(&file).unwrap().trim().parse().unwrap();
        let is_gone = || {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.is_empty() || stat.contains(") Z ")
        };
        while !is_gone() {
            std::thread::yield_now();
        }
    }
}
