//! Policies in Postgres: lists, saves and deletes them.

use tokio_postgres::Row;
use weir_core::PolicyName;
use weir_store::Result;
use weir_store::tier::{Match, OnOutage, Origin, POLICIES_MAX, Policy, PolicySpec};

use crate::Postgres;
use crate::connection::Values;
use crate::row::{self, column, int, unreadable, unsigned};

const ALL: &str = "
    SELECT scope, name, kind, amount, refill, period_ms, shadow, on_outage, match_domain, match_entries
    FROM tier_policy ORDER BY name";
const ONE: &str = "
    SELECT scope, name, kind, amount, refill, period_ms, shadow, on_outage, match_domain, match_entries
    FROM tier_policy WHERE name = $1";
/// Writes nothing if there are too many policies, or if a file's policy would replace an operator's, of any kind. The version's row serializes
/// servers.
const PUT: &str = "
    WITH next AS (UPDATE tier_version SET version = version + 1 WHERE id = 1 RETURNING version),
    logged AS (INSERT INTO tier_change (version) SELECT version FROM next),
    replaced AS (DELETE FROM tier_concurrency WHERE name = $1 AND ($10 = 'operator' OR origin = 'file'))
    INSERT INTO tier_policy
        (name, kind, amount, refill, period_ms, shadow, on_outage, match_domain, match_entries, origin)
    SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, $10 FROM next
    WHERE (SELECT count(*) FROM tier_policy WHERE name <> $1) + (SELECT count(*) FROM tier_concurrency WHERE name <> $1) < $11
        AND ($10 = 'operator' OR NOT EXISTS (SELECT FROM tier_concurrency WHERE name = $1 AND origin = 'operator'))
    ON CONFLICT (name) DO UPDATE SET
        kind = excluded.kind, amount = excluded.amount, refill = excluded.refill, period_ms = excluded.period_ms,
        shadow = excluded.shadow, on_outage = excluded.on_outage, match_domain = excluded.match_domain,
        match_entries = excluded.match_entries, origin = excluded.origin
    WHERE excluded.origin = 'operator' OR tier_policy.origin = 'file'";
const DELETE: &str = "
    WITH next AS (UPDATE tier_version SET version = version + 1 WHERE id = 1 RETURNING version),
    logged AS (INSERT INTO tier_change (version) SELECT version FROM next),
    deleted AS (DELETE FROM tier_policy WHERE name = $1 RETURNING scope),
    spent_deleted AS (DELETE FROM tier_spent WHERE scope = ANY(ARRAY(SELECT scope FROM deleted)))
    SELECT scope FROM deleted";

pub(super) async fn all(engine: &Postgres) -> Result<Vec<Policy>> {
    engine.inner.pool.query(ALL, &[]).await?.iter().map(read).collect()
}

pub(super) async fn put(
    engine: &Postgres,
    name: &PolicyName,
    spec: &PolicySpec,
    origin: Origin,
) -> Result<Option<Policy>> {
    let (kind, amount, refill, ms) = spec.limit_columns();
    let (amount, refill, outage) = (int(amount), int(refill), spec.on_outage.as_str());
    let origin = origin.as_str();
    let (domain, entries) =
        (spec.matches.as_ref().map(|m| m.domain.as_str()), spec.matches.as_ref().map(Match::entries_text));
    let values: Values<'_> = &[
        &name.as_str(),
        &kind,
        &amount,
        &refill,
        &ms,
        &spec.shadow,
        &outage,
        &domain,
        &entries,
        &origin,
        &row::bigint(POLICIES_MAX),
    ];
    engine.inner.pool.execute(PUT, values).await?;
    let row = engine.inner.pool.query_opt(ONE, &[&name.as_str()]).await?;
    row.as_ref().map(read).transpose()
}

pub(super) async fn delete(engine: &Postgres, name: &PolicyName) -> Result<bool> {
    Ok(engine.inner.pool.query_opt(DELETE, &[&name.as_str()]).await?.is_some())
}

fn read(row: &Row) -> Result<Policy> {
    let number = |index| column::<i32>(row, index).map(unsigned);
    let limit =
        PolicySpec::limit_from_columns(column::<&str>(row, 2)?, number(3)?, number(4)?, column(row, 5)?);
    let on_outage = OnOutage::parse(column::<&str>(row, 7)?);
    let (domain, entries): (Option<&str>, Option<&str>) = (column(row, 8)?, column(row, 9)?);
    let spec = PolicySpec {
        limit: limit.map_err(unreadable)?,
        shadow: column(row, 6)?,
        on_outage: on_outage.ok_or_else(|| unreadable("a policy has an unknown on_outage"))?,
        matches: domain.map(|domain| Match::parse(domain, entries.unwrap_or_default())),
    };
    let name = PolicyName::parse(column::<&str>(row, 1)?).map_err(unreadable)?;
    Ok(Policy::new(name, number(0)?, spec))
}
