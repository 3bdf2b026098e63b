//! Taking submissions.

use std::collections::HashMap;

use rusqlite::{CachedStatement, Connection, OptionalExtension, params};
use weir_core::quota::{Limits, Quota};
use weir_core::request::canonical::Fingerprint;
use weir_core::request::idempotency::{Record, Submission, decide};
use weir_core::request::state::Progress;
use weir_core::{TenantId, Timestamp, Verdict};
use weir_store::request::{Receipt, Submit, SubmitOutcome};

use super::{read_id, read_status};
use crate::error::fault;

/// A key whose request was purged stands for nothing.
const KEPT: &str = "
    SELECT kept.request_id, kept.payload_hash, kept.expires_at, record.status, record.created_at
    FROM idempotency_record AS kept JOIN request_record AS record USING (request_id)
    WHERE kept.tenant_id = ?1 AND kept.idempotency_key = ?2";
/// A key that is free again gets a row behind all others, so that rows stay in the order in which they expire.
const REMEMBER: &str = "
    INSERT OR REPLACE INTO idempotency_record (tenant_id, idempotency_key, payload_hash, request_id, expires_at)
    VALUES (?1, ?2, ?3, ?4, ?5)";
const INSERT: &str = "
    INSERT INTO request_record
        (request_id, tenant_id, request_type, status, payload, payload_key_id, callback_url, created_at, updated_at,
         downstream, claimable_at)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?8, ?9, ?10)";
const WINDOW: &str = "SELECT current_count, last_refresh_time FROM request_tenant WHERE tenant_id = ?1";
const SAVE_WINDOW: &str = "
    INSERT OR REPLACE INTO request_tenant (tenant_id, current_count, last_refresh_time) VALUES (?1, ?2, ?3)";
const COUNT: &str = "UPDATE request_ledger SET accepted = accepted + ?1";

pub(super) fn submit(
    connection: &Connection,
    batch: Vec<Submit>,
    limits: Option<Limits>,
    now: Timestamp,
) -> rusqlite::Result<Vec<SubmitOutcome>> {
    let mut accepted = 0_i64;
    let mut tenants = Tenants::new(limits);
    let mut outcomes = Vec::with_capacity(batch.len());
    let mut desk = Desk::prepare(connection)?;
    for submit in batch {
        let kept = desk.kept(&submit)?;
        let submission = decide(kept.as_ref().map(|(record, _)| record), &submit.fingerprint, now);
        outcomes.push(match (submission, kept) {
            (Submission::Replay(_), Some((_, receipt))) => SubmitOutcome::Replayed(receipt),
            (Submission::Conflict, _) => SubmitOutcome::Conflict,
            _ => match tenants.admit(connection, &submit.tenant, now)? {
                Some(limited) => limited,
                None => {
                    accepted += 1;
                    SubmitOutcome::Accepted(desk.accept(&submit, now)?)
                }
            },
        });
    }
    if accepted > 0 {
        connection.prepare_cached(COUNT)?.execute([accepted])?;
    }
    tenants.save(connection)?;
    Ok(outcomes)
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

/// The statements that every submission needs, looked up once a batch.
struct Desk<'c> {
    kept: CachedStatement<'c>,
    remember: CachedStatement<'c>,
    insert: CachedStatement<'c>,
}

impl<'c> Desk<'c> {
    fn prepare(connection: &'c Connection) -> rusqlite::Result<Self> {
        Ok(Self {
            kept: connection.prepare_cached(KEPT)?,
            remember: connection.prepare_cached(REMEMBER)?,
            insert: connection.prepare_cached(INSERT)?,
        })
    }

    /// What a submission's key stands for, and how that request stands.
    fn kept(&mut self, submit: &Submit) -> rusqlite::Result<Option<(Record, Receipt)>> {
        let read = |row: &rusqlite::Row<'_>| {
            let record = Record {
                request_id: read_id(row, 0)?,
                fingerprint: Fingerprint::from_bytes(row.get(1)?),
                expires: Timestamp::from_micros(row.get(2)?),
            };
            let accepted_at = Timestamp::from_micros(row.get(4)?);
            let receipt = Receipt { id: record.request_id, status: read_status(row, 3)?, accepted_at };
            Ok((record, receipt))
        };
        self.kept.query_row(params![submit.tenant.as_str(), submit.key.as_str()], read).optional()
    }

    fn accept(&mut self, submit: &Submit, now: Timestamp) -> rusqlite::Result<Receipt> {
        let mut progress = Progress::accepted(now);
        if submit.needs_broker {
            progress.enqueue_pending().map_err(fault)?;
        }
        let record = Record::new(submit.fingerprint, submit.id, now);
        let id = submit.id.to_string();
        self.remember.execute(params![
            submit.tenant.as_str(),
            submit.key.as_str(),
            record.fingerprint.as_bytes(),
            id,
            record.expires.as_micros(),
        ])?;
        self.insert.execute(params![
            id,
            submit.tenant.as_str(),
            submit.request_type.as_str(),
            progress.status.as_str(),
            submit.payload.bytes,
            submit.payload.key_id,
            submit.callback_url,
            now.as_micros(),
            submit.downstream,
            progress.due.as_micros(),
        ])?;
        Ok(Receipt { id: submit.id, status: progress.status, accepted_at: now })
    }
}
