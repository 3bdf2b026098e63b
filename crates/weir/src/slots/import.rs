//! `weir slots import`: sends a file in parts, shows how far it is, and tries again what the server could not answer.
//! Events are idempotent, so a load that was broken off is simply run again.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::Args;
use serde::Deserialize;

use super::ServerArgs;
use super::events::{Defaults, Events};
use crate::client::Client;

/// Events in one request.
const PART: usize = 5_000;
/// How often a part is tried, and the pauses in between.
const ATTEMPTS: u32 = 10;
const PAUSE_MIN: Duration = Duration::from_millis(200);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// Errors that are shown; the rest are counted.
const SHOWN_MAX: u64 = 20;
/// Codes of errors that pass by themselves.
const PASSING: [&str; 2] = ["DEPENDENCY_UNAVAILABLE", "SLOTS_EXHAUSTED"];

#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    #[command(flatten)]
    server: ServerArgs,
    /// A .ndjson file of events, a .csv file with the columns eventId, configName and requestedTime, or - for NDJSON from standard input
    file: PathBuf,
    /// The config of events in a CSV file without the column configName
    #[arg(long, value_name = "NAME")]
    config: Option<String>,
    /// The time of events in a CSV file without the column requestedTime
    #[arg(long, value_name = "TIME")]
    time: Option<String>,
}

/// Events that are sent together, one a line, and in which line of the file each of them stands.
#[derive(Debug, Default, PartialEq)]
struct Part {
    lines: Vec<u8>,
    places: Vec<u64>,
}

impl Part {
    /// The next events of a file; empty at its end.
    fn read(events: &mut Events) -> anyhow::Result<Self> {
        let mut part = Self::default();
        while part.places.len() < PART
            && let Some(place) = events.next_line(&mut part.lines)?
        {
            part.places.push(place);
        }
        Ok(part)
    }

    fn push(&mut self, line: &[u8], place: u64) {
        self.lines.extend_from_slice(line);
        self.places.push(place);
    }

    /// Each line with its place.
    fn iter(&self) -> impl Iterator<Item = (&[u8], u64)> {
        self.lines.split_inclusive(|byte| *byte == b'\n').zip(self.places.iter().copied())
    }
}

/// One line of an answer: a slot, or what was wrong.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Answer {
    status: Option<String>,
    event_id: Option<String>,
    code: Option<String>,
    message: Option<String>,
}

#[derive(Default)]
struct Tally {
    new: u64,
    existing: u64,
    failed: u64,
}

impl Tally {
    const fn total(&self) -> u64 {
        self.new + self.existing + self.failed
    }
}

pub(super) async fn run(arguments: ImportArgs) -> anyhow::Result<ExitCode> {
    let ImportArgs { server, file, config, time } = arguments;
    let client = Client::new(server.url.as_deref())?;
    let (mut events, size) = Events::open(&file, Defaults { config, time })?;
    let mut progress = Progress::new(size);
    let mut tally = Tally::default();
    loop {
        let part = Part::read(&mut events)?;
        if part.places.is_empty() {
            break;
        }
        send(&client, part, &mut tally, &progress).await?;
        progress.show(&tally, events.bytes());
    }
    progress.end(&tally)?;
    Ok(if tally.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Sends one part until every event of it has an answer that will not change.
async fn send(client: &Client, part: Part, tally: &mut Tally, progress: &Progress) -> anyhow::Result<()> {
    let mut left = part;
    let mut pause = PAUSE_MIN;
    for attempt in 1..=ATTEMPTS {
        let is_last = attempt == ATTEMPTS;
        let lines = Bytes::copy_from_slice(&left.lines);
        match client.post("/api/v1/slots/bulk", "application/x-ndjson", lines).await {
            Ok((200, answers)) => {
                left = take(&left, &answers, tally, progress, is_last)?;
                if left.places.is_empty() {
                    return Ok(());
                }
            }
            Ok((status, answer)) if status < 500 || is_last => {
                anyhow::bail!("the server answered {status}: {}", String::from_utf8_lossy(&answer));
            }
            Err(error) if is_last => return Err(error),
            Ok(_) | Err(_) => {}
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
    Ok(())
}

/// Counts what was answered for good, and returns the lines that are worth another try.
fn take(
    part: &Part,
    answers: &[u8],
    tally: &mut Tally,
    progress: &Progress,
    is_last: bool,
) -> anyhow::Result<Part> {
    let mut again = Part::default();
    let mut answers = answers.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    for (line, place) in part.iter() {
        let Some(answer) = answers.next() else {
            // The server stopped in the middle: what it did not answer is sent again.
            again.push(line, place);
            continue;
        };
        let answer: Answer = serde_json::from_slice(answer)?;
        match (answer.status.as_deref(), answer.code.as_deref()) {
            (Some("NEW"), _) => tally.new += 1,
            (Some(_), _) => tally.existing += 1,
            (None, Some(code)) if PASSING.contains(&code) && !is_last => again.push(line, place),
            (None, _) => {
                tally.failed += 1;
                if tally.failed <= SHOWN_MAX {
                    progress.tell(place, &answer);
                }
            }
        }
    }
    Ok(again)
}

/// The line that moves, on a terminal; a result at the end, always.
struct Progress {
    started: Instant,
    size: Option<u64>,
    is_terminal: bool,
}

impl Progress {
    fn new(size: Option<u64>) -> Self {
        Self { started: Instant::now(), size, is_terminal: std::io::stderr().is_terminal() }
    }

    fn show(&mut self, tally: &Tally, bytes: u64) {
        if self.is_terminal {
            // A terminal that cannot be written to must not end a load.
            let _ = write!(std::io::stderr(), "\r\x1b[2K{}", self.line(tally, bytes));
        }
    }

    fn line(&self, tally: &Tally, bytes: u64) -> String {
        let elapsed = self.started.elapsed().as_secs_f64().max(0.001);
        let rate = tally.total() as f64 / elapsed;
        let size = self.size.filter(|size| *size > 0);
        let part = size.map(|size| bytes as f64 / size as f64);
        let bar = part.map_or(String::new(), |part| {
            let left = Duration::from_secs_f64((elapsed / part.max(0.000_1) * (1.0 - part)).max(0.0));
            let filled =
                "█".repeat(size.map_or(0, |size| usize::try_from(bytes * 20 / size).unwrap_or(0).min(20)));
            format!(
                "{filled:░<20} {:3.0} %  ETA {}:{:02}  ",
                part * 100.0,
                left.as_secs() / 60,
                left.as_secs() % 60
            )
        });
        let Tally { new, existing, failed } = tally;
        format!("{bar}{rate:.0} events/s  {new} new, {existing} existing, {failed} failed")
    }

    fn tell(&self, place: u64, answer: &Answer) {
        let clear = if self.is_terminal { "\r\x1b[2K" } else { "" };
        let event = answer.event_id.as_deref().map_or(String::new(), |event| format!(" ({event})"));
        let (code, message) =
            (answer.code.as_deref().unwrap_or("?"), answer.message.as_deref().unwrap_or_default());
        let _ = writeln!(std::io::stderr(), "{clear}line {place}{event}: {code}: {message}");
    }

    fn end(&self, tally: &Tally) -> std::io::Result<()> {
        if self.is_terminal {
            let _ = write!(std::io::stderr(), "\r\x1b[2K");
        }
        let elapsed = self.started.elapsed().as_secs_f64().max(0.001);
        let Tally { new, existing, failed } = tally;
        let rate = tally.total() as f64 / elapsed;
        writeln!(
            std::io::stdout(),
            "{} events in {elapsed:.1} s ({rate:.0} events/s): {new} new, {existing} existing, {failed} failed",
            tally.total()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_pass_is_sent_again_and_what_will_not_is_counted() {
        let part = Part { lines: b"1\n2\n3\n4\n5\n".to_vec(), places: vec![1, 2, 4, 5, 9] };
        let answers = br#"{"status":"NEW"}
{"status":"EXISTING"}
{"line":3,"code":"DEPENDENCY_UNAVAILABLE","message":"m"}
{"line":4,"code":"INVALID_REQUEST","message":"m"}
"#;
        let (mut tally, progress) = (Tally::default(), Progress::new(None));
        let again = take(&part, answers, &mut tally, &progress, false).unwrap();
        let expected = Part { lines: b"3\n5\n".to_vec(), places: vec![4, 9] };
        assert_eq!(again, expected, "the one that passes and the one without an answer");
        assert_eq!((tally.new, tally.existing, tally.failed), (1, 1, 1));
    }

    #[test]
    fn the_line_shows_how_far_it_is() {
        let progress = Progress { size: Some(100), ..Progress::new(None) };
        let line = progress.line(&Tally { new: 10, existing: 0, failed: 0 }, 50);
        assert!(line.contains("██████████░░░░░░░░░░  50 %") && line.contains("10 new"), "{line}");
    }
}
