//! The baseline of slot: pgbench calling a function that assigns one event per transaction, on Weir's own tables.

use anyhow::{Context as _, Result, bail, ensure};

use super::{CONFIG, MAX_PER_WINDOW, TIME, WINDOW_SIZE};
use crate::Bench;
use crate::pgbench::Pgbench;
use crate::postgres::Postgres;
use crate::results::Row;

/// The tables that Weir uses.
const TABLES: &str = include_str!("../../../../store-postgres/migrations/0004_slot.sql");
const FUNCTION: &str = include_str!("baseline.sql");
const BATCH_TABLES: &str = "rate_limit_window_counter, rate_limit_event_slot";
/// In windows, as in Weir.
const HEADROOM: u64 = 100;
const WINDOW_MS: u64 = 4_000;

pub(crate) struct Baseline<'a> {
    postgres: &'a Postgres,
    pgbench: Pgbench,
}

impl<'a> Baseline<'a> {
    pub(crate) async fn new(bench: &Bench, postgres: &'a Postgres) -> Result<Self> {
        postgres.baselines().execute(TABLES).await;
        postgres.baselines().execute(FUNCTION).await;
        Ok(Self { postgres, pgbench: Pgbench::new(bench, postgres, "slot", &script())? })
    }

    /// Measures events per second, starting with empty tables, and checks that every event gets a slot.
    pub(crate) async fn measure(&self, bench: &Bench) -> Result<Row> {
        let name = "pgbench, one event a transaction";
        eprintln!("measuring: {name}");
        self.postgres.baselines().execute(&format!("TRUNCATE {BATCH_TABLES}")).await;
        self.postgres.tidy(BATCH_TABLES).await;
        let measured = self.pgbench.measure(bench, name.to_owned(), &[]).await?;
        self.check(measured.transactions).await?;
        Ok(measured.row)
    }

    async fn check(&self, transactions: usize) -> Result<()> {
        let books = "SELECT (SELECT count(*) FROM rate_limit_event_slot), sum(slot_count), max(slot_count)
                     FROM rate_limit_window_counter";
        let rows = self.postgres.baselines().query_strings(books).await;
        let values: Option<Vec<u64>> =
            rows.iter().flatten().map(|value| value.as_ref()?.parse().ok()).collect();
        let Some([slots, counted, most]) = values.as_deref() else {
            bail!("the baseline assigned no slot: {rows:?}");
        };
        let transactions = u64::try_from(transactions).context("a number of transactions")?;
        ensure!(*slots == transactions, "{transactions} transactions of the baseline made {slots} slots");
        ensure!(slots == counted, "the baseline counted {counted} slots of {slots}");
        ensure!(*most <= MAX_PER_WINDOW, "the baseline put {most} slots into a window");
        Ok(())
    }
}

/// The requested time is the start of its window, so that its whole capacity and length are available.
fn script() -> String {
    format!(
        r"\set event random(1, 9223372036854775806)
\set first_jitter random(0, {WINDOW_MS} - 1)
\set full_jitter random(0, {WINDOW_MS} - 1)
SELECT assign_slot(:event, '{CONFIG}', '{TIME}', '{TIME}', '{WINDOW_SIZE}', {MAX_PER_WINDOW},
    {MAX_PER_WINDOW}, :first_jitter, :full_jitter, {HEADROOM});
"
    )
}
