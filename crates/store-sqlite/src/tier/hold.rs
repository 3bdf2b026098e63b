//! The rows of tier holds.

use rusqlite::{Connection, OptionalExtension, Row, params};
use weir_core::tier::{Hold, HoldSettlement};
use weir_core::{HoldId, PolicyName, Timestamp};
use weir_store::tier::{HoldAudit, NewHold, SettledHold};

use crate::error::fault;

/// Holds purged between two checks of the turn.
pub(super) const PURGE_CHUNK: usize = 128;

const PUT: &str = "
    INSERT INTO tier_hold (hold_id, scope, policy, key, cost, taken_at, expires_at)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)";
const FIND: &str = "
    SELECT scope, policy, key, cost, taken_at, expires_at, settled FROM tier_hold WHERE hold_id = ?1";
const SETTLE: &str = "UPDATE tier_hold SET settled = ?2 WHERE hold_id = ?1";
const PURGE: &str = "
    DELETE FROM tier_hold WHERE hold_id IN (
        SELECT hold_id FROM tier_hold WHERE expires_at < ?1 ORDER BY expires_at LIMIT ?2)";
const AUDIT: &str = "
    SELECT count(*), count(*) FILTER (WHERE settled IS NULL AND expires_at > ?1),
        coalesce(sum(cost) FILTER (WHERE settled IS NULL AND expires_at > ?1), 0), count(settled),
        count(*) FILTER (WHERE settled IS NULL AND expires_at <= ?1)
    FROM tier_hold";

pub(super) fn put(connection: &Connection, hold: &NewHold, expires_at: Timestamp) -> rusqlite::Result<()> {
    let values = params![
        hold.id.to_string(),
        hold.scope,
        hold.policy.as_str(),
        hold.key,
        hold.cost,
        hold.taken_at.as_micros(),
        expires_at.as_micros()
    ];
    connection.prepare_cached(PUT)?.execute(values).map(|_| ())
}

pub(super) fn settle(
    connection: &Connection,
    id: HoldId,
    cost: u32,
    now: Timestamp,
) -> rusqlite::Result<Option<SettledHold>> {
    let text = id.to_string();
    let found = connection.prepare_cached(FIND)?.query_row([&text], read).optional()?;
    let Some((scope, policy, key, mut hold)) = found else { return Ok(None) };
    let settlement = hold.settle(cost, now);
    if matches!(settlement, HoldSettlement::Settled(_)) {
        connection.prepare_cached(SETTLE)?.execute(params![text, cost])?;
    }
    Ok(Some(SettledHold { policy, scope, key, hold, settlement }))
}

pub(super) fn purge(connection: &Connection, before: Timestamp, limit: usize) -> rusqlite::Result<usize> {
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    connection.prepare_cached(PURGE)?.execute(params![before.as_micros(), limit])
}

pub(super) fn audit(connection: &Connection, now: Timestamp) -> rusqlite::Result<HoldAudit> {
    connection.prepare_cached(AUDIT)?.query_row([now.as_micros()], |row| {
        Ok(HoldAudit {
            holds: row.get(0)?,
            open: row.get(1)?,
            open_cost: row.get(2)?,
            settled: row.get(3)?,
            expired: row.get(4)?,
        })
    })
}

fn read(row: &Row<'_>) -> rusqlite::Result<(u32, PolicyName, String, Hold)> {
    let hold = Hold {
        cost: row.get(3)?,
        taken_at: Timestamp::from_micros(row.get(4)?),
        expires_at: Timestamp::from_micros(row.get(5)?),
        settled: row.get(6)?,
    };
    let policy = PolicyName::parse(row.get_ref(1)?.as_str()?).map_err(fault)?;
    Ok((row.get(0)?, policy, row.get(2)?, hold))
}
