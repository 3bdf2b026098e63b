//! The rows of concurrency policies and their permits.

use rusqlite::{Connection, OptionalExtension, Row, params};
use weir_core::tier::{OpenPermit, Permit, PermitRelease};
use weir_core::{PermitId, PolicyName, Timestamp};
use weir_store::tier::{
    ConcurrencyPolicy, ConcurrencySpec, NewPermit, OnOutage, Origin, PermitsOutcome, ReleasedPermit,
    TakePermits, permit_keys, plan_permits,
};

use super::policy::{delete_replaced, has_room, is_of_operator};
use crate::error::fault;

const ALL: &str = "
    SELECT scope, name, max_in_use, ttl_ms, shadow, on_outage FROM tier_concurrency ORDER BY name";
const ONE: &str = "
    SELECT scope, name, max_in_use, ttl_ms, shadow, on_outage FROM tier_concurrency WHERE name = ?1";
const PUT: &str = "
    INSERT INTO tier_concurrency (name, max_in_use, ttl_ms, shadow, on_outage, origin)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6)
    ON CONFLICT (name) DO UPDATE SET max_in_use = excluded.max_in_use, ttl_ms = excluded.ttl_ms,
        shadow = excluded.shadow, on_outage = excluded.on_outage, origin = excluded.origin
    WHERE excluded.origin = 'operator' OR tier_concurrency.origin = 'file'";
const DELETE: &str = "DELETE FROM tier_concurrency WHERE name = ?1 RETURNING scope";
const OPEN: &str = "
    SELECT expires_at, cost FROM tier_permit
    WHERE scope = ?1 AND key = ?2 AND is_released = 0 AND expires_at > ?3";
const TAKE: &str = "
    INSERT INTO tier_permit (permit_id, scope, policy, key, cost, expires_at, is_released)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, 0)";
const FIND: &str = "
    SELECT policy, key, cost, expires_at, is_released FROM tier_permit WHERE permit_id = ?1";
const RELEASE: &str = "UPDATE tier_permit SET is_released = 1 WHERE permit_id = ?1";
const VOID: &str = "DELETE FROM tier_permit WHERE permit_id = ?1";
const RESET: &str = "DELETE FROM tier_permit WHERE scope = ?1 AND key = ?2 AND is_released = 0";
const PURGE: &str = "
    DELETE FROM tier_permit WHERE permit_id IN (
        SELECT permit_id FROM tier_permit WHERE expires_at < ?1 ORDER BY expires_at LIMIT ?2)";

pub(super) fn all(connection: &Connection) -> rusqlite::Result<Vec<ConcurrencyPolicy>> {
    connection.prepare_cached(ALL)?.query_map([], read)?.collect()
}

/// In place of a policy of another kind, unless an operator has put that and this one is of the file.
pub(super) fn put(
    connection: &Connection,
    name: &PolicyName,
    spec: &ConcurrencySpec,
    origin: Origin,
) -> rusqlite::Result<Option<ConcurrencyPolicy>> {
    if !has_room(connection, name)? || (origin == Origin::File && is_of_operator(connection, name)?) {
        return Ok(None);
    }
    delete_replaced(connection, name)?;
    let values = params![
        name.as_str(),
        spec.rule.limit(),
        spec.ttl_ms(),
        spec.shadow,
        spec.on_outage.as_str(),
        origin.as_str()
    ];
    connection.prepare_cached(PUT)?.execute(values)?;
    connection.prepare_cached(ONE)?.query_row([name.as_str()], read).optional()
}

/// Deletes a policy. Its permits are purged when their time is over: nobody looks for them by a scope that is never used again.
pub(super) fn delete(connection: &Connection, name: &PolicyName) -> rusqlite::Result<bool> {
    let scope: Option<u32> =
        connection.prepare_cached(DELETE)?.query_row([name.as_str()], |row| row.get(0)).optional()?;
    Ok(scope.is_some())
}

pub(super) fn take(
    connection: &Connection,
    batch: &[TakePermits],
    now: Timestamp,
) -> rusqlite::Result<Vec<PermitsOutcome>> {
    let mut open = permit_keys(batch);
    for ((scope, key), permits) in &mut open {
        let mut find = connection.prepare_cached(OPEN)?;
        let rows = find.query_map(params![scope, key, now.as_micros()], |row| {
            Ok(OpenPermit { expires_at: Timestamp::from_micros(row.get(0)?), cost: row.get(1)? })
        })?;
        *permits = rows.collect::<rusqlite::Result<_>>()?;
    }
    let (outcomes, new) = plan_permits(open, batch, now);
    let mut insert = connection.prepare_cached(TAKE)?;
    for NewPermit { id, policy, scope, key, cost, expires_at } in new {
        let values = params![id.to_string(), scope, policy.as_str(), key, cost, expires_at.as_micros()];
        insert.execute(values)?;
    }
    Ok(outcomes)
}

pub(super) fn release(
    connection: &Connection,
    id: PermitId,
    now: Timestamp,
) -> rusqlite::Result<Option<ReleasedPermit>> {
    let text = id.to_string();
    let found = connection.prepare_cached(FIND)?.query_row([&text], read_permit).optional()?;
    let Some((policy, key, mut permit)) = found else { return Ok(None) };
    let release = permit.release(now);
    if release == PermitRelease::Released {
        connection.prepare_cached(RELEASE)?.execute([&text])?;
    }
    Ok(Some(ReleasedPermit { policy, key, permit, release }))
}

pub(super) fn void(connection: &Connection, ids: &[PermitId]) -> rusqlite::Result<()> {
    let mut delete = connection.prepare_cached(VOID)?;
    ids.iter().try_for_each(|id| delete.execute([id.to_string()]).map(drop))
}

pub(super) fn reset(connection: &Connection, scope: u32, key: &str) -> rusqlite::Result<()> {
    connection.prepare_cached(RESET)?.execute(params![scope, key]).map(drop)
}

pub(super) fn purge(connection: &Connection, before: Timestamp, limit: usize) -> rusqlite::Result<usize> {
    connection.prepare_cached(PURGE)?.execute(params![before.as_micros(), limit])
}

fn read(row: &Row<'_>) -> rusqlite::Result<ConcurrencyPolicy> {
    let on_outage = OnOutage::parse(row.get_ref(5)?.as_str()?);
    let spec = ConcurrencySpec {
        rule: ConcurrencySpec::rule_from_columns(row.get(2)?, row.get(3)?).map_err(fault)?,
        shadow: row.get(4)?,
        on_outage: on_outage.ok_or_else(|| fault("a policy has an unknown on_outage"))?,
    };
    let name = PolicyName::parse(row.get_ref(1)?.as_str()?).map_err(fault)?;
    Ok(ConcurrencyPolicy { name, scope: row.get(0)?, spec })
}

fn read_permit(row: &Row<'_>) -> rusqlite::Result<(PolicyName, String, Permit)> {
    let permit = Permit {
        cost: row.get(2)?,
        expires_at: Timestamp::from_micros(row.get(3)?),
        is_released: row.get(4)?,
    };
    Ok((PolicyName::parse(row.get_ref(0)?.as_str()?).map_err(fault)?, row.get(1)?, permit))
}
