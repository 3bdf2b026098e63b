//! The cost of full windows for an event that requests their time: one client, alternating between a database without
//! full windows and one that a bulk load for the same time has filled.

use anyhow::{Context as _, Result, ensure};
use weir_testkit::postgres::Database;

use super::{MAX_PER_WINDOW, Server, bulk, single};
use crate::Bench;
use crate::postgres::Postgres;
use crate::results::{Row, Run};
use crate::table::grouped;
use crate::weir::Engines;

const CLIENTS: usize = 1;
const TURNS: u64 = 2;
const FULL: &str = "SELECT count(*) FROM rate_limit_window_counter WHERE status = 'CLOSED'";

pub(crate) struct Found {
    /// In the order of measurement.
    pub(crate) runs: Vec<Run>,
    /// The name of the ratio.
    pub(crate) name: String,
    pub(crate) ratio: f64,
}

struct Side {
    server: Server,
    database: Database,
    /// The slots assigned by the bulk load and the calls, without those of warm-ups.
    slots: u64,
    /// The sum of the median latencies of its turns.
    medians_ms: f64,
}

/// Compares the median latencies, each the mean of its turns.
pub(crate) async fn measure(bench: &Bench, postgres: &Postgres) -> Result<Found> {
    let windows = bench.events / MAX_PER_WINDOW;
    let mut empty = Side::start(bench, postgres, "no full windows").await?;
    let mut full = Side::start(bench, postgres, &format!("{} full windows", grouped(windows as f64))).await?;
    full.fill(bench.events, windows).await?;
    postgres.settle().await;
    let mut runs = Vec::new();
    for turn in 1..=TURNS {
        runs.push(empty.measure(bench, turn).await?);
        runs.push(full.measure(bench, turn).await?);
    }
    let name = format!("{} / none, median latency", full.server.name);
    let ratio = full.medians_ms / empty.medians_ms;
    for side in [empty, full] {
        let failures = side.server.stop_and_audit(side.slots..).await;
        runs.iter_mut().last().context("there were turns")?.failures.extend(failures);
        postgres.drop_database(side.database).await?;
    }
    Ok(Found { runs, name, ratio })
}

impl Side {
    async fn start(bench: &Bench, postgres: &Postgres, has: &str) -> Result<Self> {
        let database = postgres.database().await;
        let engines = Engines { postgres: Some(database.url()), ..Engines::EMBEDDED };
        let server = Server::start(bench, &format!("weir Postgres, one client, {has}"), engines).await?;
        Ok(Self { server, database, slots: 0, medians_ms: 0.0 })
    }

    async fn fill(&mut self, events: u64, windows: u64) -> Result<()> {
        eprintln!("filling {} windows", grouped(windows as f64));
        let answers = bulk::send(&self.server.url, 0..events).await.context("fill windows")?;
        ensure!(answers.new == events, "of {events} events {} got a slot", answers.new);
        let rows = self.database.query_strings(FULL).await;
        let full = rows.iter().flatten().flatten().next().context("a count is a row")?;
        ensure!(*full == windows.to_string(), "{full} windows are full instead of {windows}");
        self.slots += events;
        Ok(())
    }

    async fn measure(&mut self, bench: &Bench, turn: u64) -> Result<Run> {
        let Server { name, url, .. } = &self.server;
        eprintln!("measuring: {name}, turn {turn} of {TURNS}");
        let report = single::load(bench, name, url, &format!("turn-{turn}"), CLIENTS).await?;
        self.slots += single::new(&report);
        self.medians_ms += report.latency_ms.p50;
        Ok(Run { row: Row::from_report(&report), failures: single::repeats(&report) })
    }
}
