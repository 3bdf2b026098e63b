//! Bulk loads: each uses one connection, sends events while responses arrive, and checks every response line.

use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use futures_util::future::try_join_all;
use futures_util::{StreamExt as _, stream};
use http::Request;
use http::header::CONTENT_TYPE;
use http_body_util::{BodyExt as _, BodyStream, Full, StreamBody};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde::Deserialize;
use tokio::time::timeout;

use super::{CONFIG, Server, TIME};
use crate::Bench;
use crate::postgres::Postgres;
use crate::results::{Row, Run};
use crate::table::grouped;
use crate::weir::Engines;

/// Lines per write, about 50 KB.
const LINES_PER_CHUNK: u64 = 500;
const LIMIT: Duration = Duration::from_secs(300);

/// The response lines of a load.
#[derive(Debug, Default)]
pub(super) struct Answers {
    first: u64,
    lines: u64,
    /// Lines that are new slots of the expected events.
    pub(super) new: u64,
    /// The time from before connecting until the last line was read.
    took: Duration,
    /// The first unexpected line.
    wrong: Option<String>,
    /// The incomplete next line.
    partial: Vec<u8>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Answer<'a> {
    event_id: &'a str,
    status: &'a str,
}

/// Loads a fresh server with concurrent uploads, then compares its audit with its responses.
pub(crate) async fn measure(bench: &Bench, engines: Engines<'_>, uploads: u64) -> Result<Run> {
    let (each, events) = (bench.events / uploads, bench.events / uploads * uploads);
    let at_once = if uploads == 1 { String::new() } else { format!(", {uploads} uploads at once") };
    let name = format!("weir {}, {} events in bulk{at_once}", engines.name(), grouped(events as f64));
    eprintln!("measuring: {name}");
    let server = Server::start(bench, &name, engines).await?;
    let parts = (0..uploads).map(|upload| send(&server.url, upload * each..(upload + 1) * each));
    let answers = try_join_all(parts).await.with_context(|| format!("load {name}"))?;
    let problems = answers.iter().filter_map(|answers| answers.problem(each));
    let mut failures: Vec<_> = problems.map(|problem| format!("{name}: {problem}")).collect();
    failures.extend(server.stop_and_audit(events..=events).await);
    let new: u64 = answers.iter().map(|answers| answers.new).sum();
    let took = answers.iter().map(|answers| answers.took).max().unwrap_or_default();
    let rate = new as f64 / took.as_secs_f64();
    Ok(Run { row: Row::without_latency(name, rate, events.saturating_sub(new)), failures })
}

/// Runs on an empty database, which is dropped afterwards.
pub(crate) async fn measure_on_postgres(bench: &Bench, postgres: &Postgres, uploads: u64) -> Result<Run> {
    let database = postgres.database().await;
    let engines = Engines { postgres: Some(database.url()), ..Engines::EMBEDDED };
    let run = measure(bench, engines, uploads).await?;
    postgres.drop_database(database).await?;
    Ok(run)
}

/// Sends these events and reads the response.
pub(super) async fn send(url: &str, events: Range<u64>) -> Result<Answers> {
    timeout(LIMIT, exchange(url, events)).await.context("the load took too long")?
}

async fn exchange(url: &str, events: Range<u64>) -> Result<Answers> {
    let began = Instant::now();
    let Range { start: first, end } = events;
    let firsts = events.step_by(usize::try_from(LINES_PER_CHUNK)?);
    let chunks = firsts.map(move |first| lines(first..end.min(first + LINES_PER_CHUNK)));
    let upload = stream::iter(chunks).flat_map(|chunk| BodyStream::new(Full::new(chunk)));
    let request = Request::post(format!("{url}/api/v1/slots/bulk"))
        .header(CONTENT_TYPE, "application/x-ndjson")
        .body(StreamBody::new(upload))?;
    let client = Client::builder(TokioExecutor::new()).build_http();
    let response = client.request(request).await.context("send a bulk load")?;
    ensure!(response.status() == 200, "a bulk load was answered {}", response.status());
    let mut body = response.into_body();
    let mut answers = Answers { first, ..Answers::default() };
    while let Some(frame) = body.frame().await {
        let frame = frame.context("the answers broke off")?;
        answers.take(frame.data_ref().map_or(&[], |data| data));
    }
    answers.took = began.elapsed();
    Ok(answers)
}

fn lines(events: Range<u64>) -> Bytes {
    let line = |event| {
        format!(
            "{{\"eventId\":\"bulk-{event:010}\",\"configName\":\"{CONFIG}\",\"requestedTime\":\"{TIME}\"}}\n"
        )
    };
    events.map(line).collect::<String>().into()
}

impl Answers {
    fn take(&mut self, mut chunk: &[u8]) {
        while let Some(end) = chunk.iter().position(|byte| *byte == b'\n') {
            if self.partial.is_empty() {
                self.count(&chunk[..end]);
            } else {
                let mut line = std::mem::take(&mut self.partial);
                line.extend_from_slice(&chunk[..end]);
                self.count(&line);
            }
            chunk = &chunk[end + 1..];
        }
        self.partial.extend_from_slice(chunk);
    }

    fn count(&mut self, line: &[u8]) {
        if is_new_slot(line, self.first + self.lines) {
            self.new += 1;
        } else if self.wrong.is_none() {
            self.wrong = Some(String::from_utf8_lossy(line).into_owned());
        }
        self.lines += 1;
    }

    /// Returns what is wrong with the response to this many events.
    fn problem(&self, events: u64) -> Option<String> {
        let Self { lines, new, wrong, partial, .. } = self;
        let as_promised = (*lines, *new) == (events, events) && partial.is_empty();
        let other =
            wrong.as_deref().map(|line| format!("; the first other answer: {line}")).unwrap_or_default();
        (!as_promised).then(|| format!("{events} events got {lines} answers and {new} new slots{other}"))
    }
}

fn is_new_slot(line: &[u8], event: u64) -> bool {
    let answer = serde_json::from_slice::<Answer<'_>>(line);
    answer.is_ok_and(|Answer { event_id, status }| {
        let number = event_id.strip_prefix("bulk-").and_then(|digits| digits.parse().ok());
        status == "NEW" && number == Some(event)
    })
}
