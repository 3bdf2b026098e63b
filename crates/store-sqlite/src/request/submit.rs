//! Submissions: loads a chunk of the batch, lets its plan decide, and saves.

use std::collections::HashMap;
use std::sync::LazyLock;

use rusqlite::{Connection, OptionalExtension, params};
use weir_core::quota::Quota;
use weir_core::{RequestId, Timestamp};
use weir_store::request::{
    IdempotencyEntries, IdempotencyEntry, NewRequest, Submit, SubmitOutcome, SubmitReceipt, plan_submit,
};

use super::idempotency_journal::{IdempotencyJournal, KeyBatch};
use super::read_status;
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
         downstream, claimable_at, traceparent, tracestate)";
    MultiInsert::new(into, 13)
});
const WINDOW: &str = "SELECT current_count, last_refresh_time FROM request_tenant WHERE tenant_id = ?1";
const SAVE_WINDOW: &str = "
    INSERT OR REPLACE INTO request_tenant (tenant_id, current_count, last_refresh_time) VALUES (?1, ?2, ?3)";
const COUNT: &str = "UPDATE request_ledger SET accepted = accepted + ?1 WHERE id = 1";

pub(super) fn submit(
    connection: &Connection,
    keys: &mut IdempotencyJournal,
    batch: &mut BatchInTurns<Submit, SubmitOutcome>,
    now: Timestamp,
    turn: &WriterTurn,
) -> rusqlite::Result<()> {
    if batch.is_done() {
        return Ok(());
    }
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
        for NewRequest { submit, record, .. } in &plan.accepted {
            keys.put(&submit.tenant, &submit.key, *record)?;
        }
        write(&mut insert, &plan.accepted)?;
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
                Ok(Quota { limits, current_count: row.get(0)?, last_refresh })
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

fn write(insert: &mut PreparedInsert<'_>, accepted: &[NewRequest<'_>]) -> rusqlite::Result<()> {
    insert.insert(accepted, |NewRequest { submit, progress, .. }, values| {
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
        ])
    })
}
