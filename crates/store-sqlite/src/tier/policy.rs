//! Policies in SQLite.

use rusqlite::{Connection, OptionalExtension, Row, params};
use weir_core::PolicyName;
use weir_store::tier::{Match, OnOutage, Origin, POLICIES_MAX, Policy, PolicySpec};

use crate::error::fault;

const ALL: &str = "
    SELECT scope, name, kind, amount, refill, period_ms, shadow, on_outage, match_domain, match_entries
    FROM tier_policy ORDER BY name";
const ONE: &str = "
    SELECT scope, name, kind, amount, refill, period_ms, shadow, on_outage, match_domain, match_entries
    FROM tier_policy WHERE name = ?1";
const COUNT_OTHERS: &str = "SELECT count(*) FROM tier_policy WHERE name <> ?1";
const PUT: &str = "
    INSERT INTO tier_policy
        (name, kind, amount, refill, period_ms, shadow, on_outage, match_domain, match_entries, origin)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)
    ON CONFLICT (name) DO UPDATE SET
        kind = excluded.kind, amount = excluded.amount, refill = excluded.refill, period_ms = excluded.period_ms,
        shadow = excluded.shadow, on_outage = excluded.on_outage, match_domain = excluded.match_domain,
        match_entries = excluded.match_entries, origin = excluded.origin
    WHERE excluded.origin = 'operator' OR tier_policy.origin = 'file'";
const DELETE: &str = "DELETE FROM tier_policy WHERE name = ?1 RETURNING scope";
const FORGET: &str = "DELETE FROM tier_spent WHERE scope = ?1";

pub(super) fn all(connection: &Connection) -> rusqlite::Result<Vec<Policy>> {
    connection.prepare_cached(ALL)?.query_map([], read)?.collect()
}

pub(super) fn put(
    connection: &Connection,
    name: &PolicyName,
    spec: &PolicySpec,
    origin: Origin,
) -> rusqlite::Result<Option<Policy>> {
    let others: usize =
        connection.prepare_cached(COUNT_OTHERS)?.query_row([name.as_str()], |row| row.get(0))?;
    if others >= POLICIES_MAX {
        return Ok(None);
    }
    let (kind, amount, refill, ms) = spec.numbers();
    let origin = match origin {
        Origin::File => "file",
        Origin::Operator => "operator",
    };
    let (domain, entries) =
        (spec.matches.as_ref().map(|m| m.domain.as_str()), spec.matches.as_ref().map(Match::entries_text));
    let values = params![
        name.as_str(),
        kind,
        amount,
        refill,
        ms,
        spec.shadow,
        spec.on_outage.as_str(),
        domain,
        entries,
        origin
    ];
    connection.prepare_cached(PUT)?.execute(values)?;
    connection.prepare_cached(ONE)?.query_row([name.as_str()], read).optional()
}

pub(super) fn delete(connection: &Connection, name: &PolicyName) -> rusqlite::Result<bool> {
    let scope: Option<u32> =
        connection.prepare_cached(DELETE)?.query_row([name.as_str()], |row| row.get(0)).optional()?;
    let Some(scope) = scope else { return Ok(false) };
    connection.prepare_cached(FORGET)?.execute([scope])?;
    Ok(true)
}

fn read(row: &Row<'_>) -> rusqlite::Result<Policy> {
    let limit = PolicySpec::limit_of(row.get_ref(2)?.as_str()?, row.get(3)?, row.get(4)?, row.get(5)?);
    let on_outage = OnOutage::parse(row.get_ref(7)?.as_str()?);
    let (domain, entries): (Option<String>, Option<String>) = (row.get(8)?, row.get(9)?);
    let spec = PolicySpec {
        limit: limit.map_err(fault)?,
        shadow: row.get(6)?,
        on_outage: on_outage.ok_or_else(|| fault("a policy has an unknown on_outage"))?,
        matches: domain.map(|domain| Match::parse(&domain, entries.as_deref().unwrap_or_default())),
    };
    let name = PolicyName::parse(row.get_ref(1)?.as_str()?).map_err(fault)?;
    Ok(Policy::new(name, row.get(0)?, spec))
}
