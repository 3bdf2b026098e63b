//! Taking submissions.

use std::collections::HashMap;
use std::sync::LazyLock;

use rusqlite::{CachedStatement, Connection, OptionalExtension, params};
use weir_core::quota::{Limits, Quota};
use weir_core::request::idempotency::{Record, Submission, decide};
use weir_core::request::state::Progress;
use weir_core::{RequestId, TenantId, Timestamp, Verdict};
use weir_store::request::{Receipt, Submit, SubmitOutcome};

use super::keys::Keys;
use super::read_status;
use crate::error::fault;
use crate::rows::{Insert, Inserting};
use crate::writer::{BatchInTurns, Turn};

const STANDING: &str = "SELECT status, created_at FROM request_record WHERE request_id = ?1";
pub(crate) static INSERT: LazyLock<Insert> = LazyLock::new(|| {
    let into = "INSERT OR FAIL INTO request_record
        (request_id, tenant_id, request_type, status, payload, payload_key_id, callback_url, created_at, updated_at,
         downstream, claimable_at)";
    Insert::new(into, 11)
});
const WINDOW: &str = "SELECT current_count, last_refresh_time FROM request_tenant WHERE tenant_id = ?1";
const SAVE_WINDOW: &str = "
    INSERT OR REPLACE INTO request_tenant (tenant_id, current_count, last_refresh_time) VALUES (?1, ?2, ?3)";
const COUNT: &str = "UPDATE request_ledger SET accepted = accepted + ?1 WHERE id = 1";

pub(super) fn submit(
    connection: &Connection,
    keys: &mut Keys,
    batch: &mut BatchInTurns<Submit, SubmitOutcome>,
    limits: Option<Limits>,
    now: Timestamp,
    turn: &Turn,
) -> rusqlite::Result<()> {
    if batch.is_done() {
        return Ok(());
    }
    let mut accepted = 0_i64;
    let mut tenants = Tenants::new(limits);
    let mut keys = keys.batch(connection, batch.left())?;
    let mut desk = Desk::prepare(connection)?;
    while let Some(submit) = batch.next(turn) {
        let kept = match keys.find(&submit.tenant, &submit.key)? {
            Some(record) => desk.receipt(record.request_id, now)?.map(|receipt| (record, receipt)),
            None => None,
        };
        let submission = decide(kept.as_ref().map(|(record, _)| record), &submit.fingerprint, now);
        batch.outcomes.push(match (submission, kept) {
            (Submission::Replay(_), Some((_, receipt))) => SubmitOutcome::Replayed(receipt),
            (Submission::Conflict, _) => SubmitOutcome::Conflict,
            _ => match tenants.admit(connection, &submit.tenant, now)? {
                Some(limited) => limited,
                None => {
                    accepted += 1;
                    let record = Record::new(submit.fingerprint, submit.id, now);
                    keys.remember(&submit.tenant, &submit.key, record)?;
                    SubmitOutcome::Accepted(desk.accept(submit, now)?)
                }
            },
        });
    }
    desk.write(now)?;
    keys.finish(connection)?;
    if accepted > 0 {
        connection.prepare_cached(COUNT)?.execute([accepted])?;
    }
    tenants.save(connection)
}

/// The windows of tenants, as far as a batch has needed them.
struct Tenants {
    limits: Option<Limits>,
    windows: HashMap<TenantId, Quota>,
}

impl Tenants {
    fn new(limits: Option<Limits>) -> Self {
        Self { limits, windows: HashMap::new() }
    }

    /// Counts a new request of a tenant; says no when it has sent enough.
    fn admit(
        &mut self,
        connection: &Connection,
        tenant: &TenantId,
        now: Timestamp,
    ) -> rusqlite::Result<Option<SubmitOutcome>> {
        let Some(limits) = self.limits else { return Ok(None) };
        if !self.windows.contains_key(tenant) {
            let read = |row: &rusqlite::Row<'_>| {
                let last_refresh = Timestamp::from_micros(row.get(1)?);
                Ok(Quota { limits, current_count: row.get(0)?, last_refresh })
            };
            let kept = connection.prepare_cached(WINDOW)?.query_row([tenant.as_str()], read).optional()?;
            self.windows.insert(tenant.clone(), kept.unwrap_or_else(|| Quota::configured(limits, now)));
        }
        let window = self.windows.get_mut(tenant);
        Ok(match window.map(|window| window.send(now)) {
            Some(Verdict::Denied(denial)) => {
                Some(SubmitOutcome::Limited { limits, retry_after: denial.retry_after })
            }
            _ => None,
        })
    }

    fn save(self, connection: &Connection) -> rusqlite::Result<()> {
        let mut save = connection.prepare_cached(SAVE_WINDOW)?;
        for (tenant, window) in self.windows {
            save.execute(params![tenant.as_str(), window.current_count, window.last_refresh.as_micros()])?;
        }
        Ok(())
    }
}

/// Where requests are written down.
struct Desk<'c> {
    standing: CachedStatement<'c>,
    insert: Inserting<'c>,
    /// Accepted, and not written down yet.
    accepted: Vec<(Submit, Progress)>,
}

impl<'c> Desk<'c> {
    fn prepare(connection: &'c Connection) -> rusqlite::Result<Self> {
        Ok(Self {
            standing: connection.prepare_cached(STANDING)?,
            insert: INSERT.prepare(connection)?,
            accepted: Vec::new(),
        })
    }

    /// How the request that a key stands for stands; if it was purged, the key stands for nothing.
    fn receipt(&mut self, id: RequestId, now: Timestamp) -> rusqlite::Result<Option<Receipt>> {
        // It may be of the same batch.
        self.write(now)?;
        let read = |row: &rusqlite::Row<'_>| {
            Ok(Receipt { id, status: read_status(row, 0)?, accepted_at: Timestamp::from_micros(row.get(1)?) })
        };
        self.standing.query_row([id.to_string()], read).optional()
    }

    fn accept(&mut self, submit: Submit, now: Timestamp) -> rusqlite::Result<Receipt> {
        let mut progress = Progress::accepted(now);
        if submit.needs_broker {
            progress.enqueue_pending().map_err(fault)?;
        }
        let receipt = Receipt { id: submit.id, status: progress.status, accepted_at: now };
        self.accepted.push((submit, progress));
        Ok(receipt)
    }

    /// Writes down what was accepted.
    fn write(&mut self, now: Timestamp) -> rusqlite::Result<()> {
        self.insert.insert(&self.accepted, |(submit, progress), values| {
            values.bind(params![
                submit.id.to_string(),
                submit.tenant.as_str(),
                submit.request_type.as_str(),
                progress.status.as_str(),
                submit.payload.bytes,
                submit.payload.key_id,
                submit.callback_url,
                now.as_micros(),
                now.as_micros(),
                submit.downstream,
                progress.due.as_micros(),
            ])
        })?;
        self.accepted.clear();
        Ok(())
    }
}
