//! Submissions: loads a chunk of the batch, lets its plan decide, and saves.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::LazyLock;

use rusqlite::{Connection, OptionalExtension, params};
use weir_core::quota::Quota;
use weir_core::{RequestId, Timestamp};
use weir_store::Batch;
use weir_store::request::{
    ExpressCounts, IdempotencyEntries, IdempotencyEntry, NewRequest, Submit, SubmitOutcome, SubmitReceipt,
    plan_submit,
};

use super::idempotency_journal::{IdempotencyJournal, KeyBatch};
use super::read_status;
use super::turns::count_unfinished;
use crate::multi_insert::{MultiInsert, PreparedInsert};
use crate::writer::{BatchInTurns, WriterTurn};

/// Submissions decided and saved between two checks of the turn.
const CHUNK_MAX: usize = 64;

const FIND_RECEIPT: &str = "
    SELECT CASE WHEN is_cancelled THEN 'CANCELLED' ELSE status END, created_at
    FROM request_record WHERE request_id = ?1";
pub(crate) static INSERT: LazyLock<MultiInsert> = LazyLock::new(|| {
    let into = "INSERT OR FAIL INTO request_record
        (request_id, tenant_id, request_type, status, payload, payload_key_id, callback_url, created_at, updated_at,
         downstream, claimable_at, traceparent, tracestate, is_express)";
    MultiInsert::new(into, 14)
});
const WINDOW: &str = "SELECT current_count, last_refresh_time FROM request_tenant WHERE tenant_id = ?1";
const SAVE_WINDOW: &str = "
    INSERT OR REPLACE INTO request_tenant (tenant_id, current_count, last_refresh_time) VALUES (?1, ?2, ?3)";
const COUNT: &str = "UPDATE request_ledger SET accepted = accepted + ?1 WHERE id = 1";

/// A batch of submissions.
pub(super) struct SubmitJob {
    batch: BatchInTurns<Submit, SubmitOutcome>,
    counts: ExpressCounts,
    /// Whether express jobs were accepted.
    is_express: bool,
}

impl SubmitJob {
    pub(super) fn new(batch: Batch<Submit>) -> Self {
        Self { batch: BatchInTurns::new(batch), counts: ExpressCounts::default(), is_express: false }
    }

    /// Submits for one turn. Breaks with all outcomes at the end, and whether there are express jobs.
    pub(super) fn run_turn(
        &mut self,
        connection: &Connection,
        keys: &mut IdempotencyJournal,
        now: Timestamp,
        turn: &WriterTurn,
    ) -> rusqlite::Result<ControlFlow<(Vec<SubmitOutcome>, bool)>> {
        if !self.batch.is_done() {
            self.submit(connection, keys, now, turn)?;
        }
        Ok(self.batch.finish().map_break(|outcomes| (outcomes, self.is_express)))
    }

    fn submit(
        &mut self,
        connection: &Connection,
        keys: &mut IdempotencyJournal,
        now: Timestamp,
        turn: &WriterTurn,
    ) -> rusqlite::Result<()> {
        let Self { batch, counts, is_express } = self;
        let mut accepted = 0_usize;
        let mut keys = keys.batch(connection, batch.remaining())?;
        let mut insert = INSERT.prepare(connection)?;
        loop {
            let chunk = batch.next_chunk(CHUNK_MAX, turn);
            if chunk.is_empty() {
                break;
            }
            let mut known = known_keys(connection, &mut keys, &chunk)?;
            let mut windows = load_windows(connection, &chunk, now)?;
            let plan = plan_submit(&chunk, &mut known, &mut windows, now);
            let mut express = Vec::with_capacity(plan.accepted.len());
            for NewRequest { submit, record, .. } in &plan.accepted {
                keys.put(&submit.tenant, &submit.key, *record)?;
                express.push(counts.is_express(submit, || count_unfinished(connection, submit))?);
            }
            *is_express |= express.contains(&true);
            write(&mut insert, &plan.accepted, &express)?;
            save_windows(connection, &plan.windows)?;
            accepted += plan.accepted.len();
            batch.outcomes.extend(plan.outcomes);
        }
        keys.finish(connection)?;
        if accepted > 0 {
            connection.prepare_cached(COUNT)?.execute([accepted])?;
        }
        Ok(())
    }
}

/// Finds the requests that earlier submissions with the same keys created.
fn known_keys<'a>(
    connection: &Connection,
    keys: &mut KeyBatch<'_>,
    chunk: &'a [Submit],
) -> rusqlite::Result<IdempotencyEntries<'a>> {
    let mut known = IdempotencyEntries::new();
    for submit in chunk {
        let mut record = keys.find(&submit.tenant, &submit.key)?;
        if let (None, Some(plain)) = (record, &submit.plain) {
            record = keys.find(&submit.tenant, &plain.key)?;
        }
        if let Some(record) = record
            && let Some(receipt) = find_receipt(connection, record.request_id)?
        {
            known.insert((submit.tenant.as_str(), submit.key.as_str()), IdempotencyEntry { record, receipt });
        }
    }
    Ok(known)
}

/// The receipt of a request, or `None` if it was purged.
fn find_receipt(connection: &Connection, id: RequestId) -> rusqlite::Result<Option<SubmitReceipt>> {
    let read = |row: &rusqlite::Row<'_>| {
        Ok(SubmitReceipt {
            id,
            status: read_status(row, 0)?,
            accepted_at: Timestamp::from_micros(row.get(1)?),
            window: None,
        })
    };
    connection.prepare_cached(FIND_RECEIPT)?.query_row([id.to_string()], read).optional()
}

/// Loads the windows of the tenants that have limits.
fn load_windows<'a>(
    connection: &Connection,
    chunk: &'a [Submit],
    now: Timestamp,
) -> rusqlite::Result<HashMap<&'a str, Quota>> {
    let mut windows = HashMap::new();
    for submit in chunk {
        let (tenant, Some(limits)) = (submit.tenant.as_str(), submit.limits) else { continue };
        if !windows.contains_key(tenant) {
            let read = |row: &rusqlite::Row<'_>| {
                let last_refresh = Timestamp::from_micros(row.get(1)?);
                Ok(Quota { current_count: row.get(0)?, ..Quota::new(limits, last_refresh) })
            };
            let mut statement = connection.prepare_cached(WINDOW)?;
            let window = statement.query_row([tenant], read).optional()?;
            windows.insert(tenant, window.unwrap_or_else(|| Quota::new(limits, now)));
        }
    }
    Ok(windows)
}

fn save_windows(connection: &Connection, windows: &[(&str, Quota)]) -> rusqlite::Result<()> {
    for (tenant, Quota { current_count, last_refresh, .. }) in windows {
        let values = params![tenant, current_count, last_refresh.as_micros()];
        connection.prepare_cached(SAVE_WINDOW)?.execute(values)?;
    }
    Ok(())
}

fn write(
    insert: &mut PreparedInsert<'_>,
    accepted: &[NewRequest<'_>],
    express: &[bool],
) -> rusqlite::Result<()> {
    let rows: Vec<(&NewRequest<'_>, bool)> = accepted.iter().zip(express.iter().copied()).collect();
    insert.insert(&rows, |(NewRequest { submit, progress, .. }, is_express), values| {
        values.bind(params![
            submit.id.to_string(),
            submit.tenant.as_str(),
            submit.request_type.as_str(),
            progress.status.as_str(),
            submit.payload.bytes,
            submit.payload.key_id,
            submit.callback_url,
            progress.due.as_micros(),
            progress.due.as_micros(),
            submit.downstream,
            progress.due.as_micros(),
            submit.trace.as_ref().map(|trace| trace.parent.to_string()),
            submit.trace.as_ref().and_then(|trace| trace.state.as_deref()),
            is_express,
        ])
    })
}
