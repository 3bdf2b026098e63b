//! Deletes old slots with their counters, and old versions of configs. A chunk locks its config exclusively, as a new version
//! does: no batch is under way on any server, so counters stay equal to slots and behind each full window stands a counter. The
//! oldest go first and a chunk is small, so batches wait for some milliseconds.

use std::time::{Duration, Instant, SystemTime};

use weir_core::{ConfigName, Timestamp};
use weir_store::Result;

use super::config;
use super::config_locks::ConfigAccess;
use crate::clock::CLOCK;
use crate::connection::Values;
use crate::pool::Session;
use crate::purge_size::PurgeSize;
use crate::row::{self, bigint, column, int, unreadable};
use crate::{Postgres, time};

/// Configs of which one call deletes something.
const CONFIGS_MAX: i64 = 100;

/// Configs with windows that ended before `$1`, or with versions that were replaced before it.
const OLD: &str = "
    SELECT config_name FROM (
        SELECT DISTINCT ON (config_name) config_name,
               date_bin(window_size_ms * interval '1 ms', $1, 'epoch'::timestamptz) AS boundary
        FROM rate_limit_config ORDER BY config_name, version DESC) AS latest
    WHERE EXISTS (SELECT FROM rate_limit_event_slot s
                  WHERE s.config_name = latest.config_name AND s.scheduled_time < boundary)
       OR EXISTS (SELECT FROM rate_limit_window_counter c
                  WHERE c.config_name = latest.config_name AND c.window_start < boundary AND c.slot_count = 0)
       OR EXISTS (SELECT FROM rate_limit_config old CROSS JOIN LATERAL (
                      SELECT created_at FROM rate_limit_config
                      WHERE config_name = old.config_name AND version = old.version + 1 OFFSET 0) AS next
                  WHERE old.config_name = latest.config_name AND next.created_at < $1 OFFSET 0)
    LIMIT $2";
const FIRST_DUE: &str = "SELECT scheduled_time FROM rate_limit_event_due ORDER BY scheduled_time LIMIT 1";
const DELETE_SLOTS: &str = "
    WITH old AS MATERIALIZED (
        SELECT event_id FROM rate_limit_event_slot
        WHERE config_name = $1 AND scheduled_time < $2 ORDER BY scheduled_time, event_id LIMIT $3),
    deleted AS (
        DELETE FROM rate_limit_event_slot WHERE event_id = ANY(ARRAY(SELECT event_id FROM old))
        RETURNING event_id, scheduled_time),
    due_deleted AS (
        DELETE FROM rate_limit_event_due WHERE ctid = ANY(ARRAY(
            SELECT row_id FROM deleted CROSS JOIN LATERAL (
                SELECT ctid AS row_id FROM rate_limit_event_due
                WHERE scheduled_time = deleted.scheduled_time AND event_id = deleted.event_id OFFSET 0) AS found))),
    counted AS (
        SELECT date_bin($4 * interval '1 ms', scheduled_time, 'epoch'::timestamptz) AS start, count(*)::integer AS slots
        FROM deleted GROUP BY 1),
    updated AS (
        UPDATE rate_limit_window_counter c
        SET slot_count = c.slot_count - counted.slots,
            status = CASE WHEN c.slot_count - counted.slots < $5 THEN 'OPEN' ELSE 'CLOSED' END
        FROM counted CROSS JOIN LATERAL (
            SELECT ctid AS row_id FROM rate_limit_window_counter
            WHERE config_name = $1 AND window_start = counted.start OFFSET 0) AS found
        WHERE c.ctid = found.row_id)
    SELECT count(*) FROM deleted";
const FIRST_LEFT: &str = "
    SELECT scheduled_time FROM rate_limit_event_slot WHERE config_name = $1 ORDER BY scheduled_time LIMIT 1";
/// Only empty ones: a counter without the slots that it counts is for the audit to find.
const DELETE_COUNTERS: &str = "
    DELETE FROM rate_limit_window_counter WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM rate_limit_window_counter
        WHERE config_name = $1 AND window_start < $2 AND slot_count = 0 ORDER BY window_start LIMIT $3))";
/// The newest version has no next one, so it stays, active or not.
const DELETE_VERSIONS: &str = "
    DELETE FROM rate_limit_config WHERE ctid = ANY(ARRAY(
        SELECT old.ctid FROM rate_limit_config old CROSS JOIN LATERAL (
            SELECT created_at FROM rate_limit_config
            WHERE config_name = old.config_name AND version = old.version + 1 OFFSET 0) AS next
        WHERE old.config_name = $1 AND NOT old.is_active AND next.created_at < $2
        ORDER BY old.version LIMIT $3))";

pub(super) async fn purge(engine: &Postgres, keep: Duration, limit: usize) -> Result<u64> {
    let session = engine.inner.pool.session().await?;
    let now = engine.now(&session.query_one(CLOCK, &[]).await?)?;
    let before = Timestamp::from_micros(now.as_micros().saturating_sub(time::micros(keep)));
    let names = session.query(OLD, &[&time::to_system(before), &CONFIGS_MAX]).await?;
    session.keep();
    let mut purged = 0;
    for row in &names {
        let name = ConfigName::parse(column::<&str>(row, 0)?).map_err(unreadable)?;
        let mut size = PurgeSize::FIRST;
        loop {
            let rows = size.rows().min(limit.saturating_sub(usize::try_from(purged).unwrap_or(usize::MAX)));
            if rows == 0 {
                return Ok(purged);
            }
            let (deleted, held_for) = purge_chunk(engine, &name, before, rows).await?;
            if deleted == 0 {
                break;
            }
            purged += deleted;
            size = size.after(held_for);
        }
    }
    Ok(purged)
}

/// Deletes up to `rows` rows of each kind that are older than `before`, in one transaction. Returns how many, and for how long
/// the config was locked.
async fn purge_chunk(
    engine: &Postgres,
    name: &ConfigName,
    before: Timestamp,
    rows: usize,
) -> Result<(u64, Duration)> {
    let (_guards, session) =
        super::assign::lock_configs(engine, &[name], ConfigAccess::Exclusive, None).await?;
    session.run("BEGIN").await?;
    session.query(super::assign::LOCK_CONFIGS, &[&[name.as_str()].as_slice()]).await?;
    let locked_at = Instant::now();
    let Some(latest) = config::latest(&session, name).await? else {
        session.run("ROLLBACK").await?;
        session.keep();
        return Ok((0, Duration::ZERO));
    };
    let dispatched = first_due(engine, &session).await?.map_or(before, |first| first.min(before));
    let boundary = latest.pace.window_of(dispatched);
    let limit = bigint(rows);
    let values: Values<'_> = &[
        &name.as_str(),
        &time::to_system(boundary),
        &limit,
        &(config::window_ms(&latest.pace) as f64),
        &int(latest.pace.max_per_window()),
    ];
    let slots = row::count(&session.query_one(DELETE_SLOTS, values).await?, 0)?;
    let first_left = session.query_opt(FIRST_LEFT, &[&name.as_str()]).await?;
    let first_left = first_left.as_ref().map(|row| column::<SystemTime>(row, 0)).transpose()?;
    let first_window = first_left.map(|first| latest.pace.window_of(time::from_system(first)));
    let counters_before = time::to_system(first_window.map_or(boundary, |first| first.min(boundary)));
    let counters = session.execute(DELETE_COUNTERS, &[&name.as_str(), &counters_before, &limit]).await?;
    let versions =
        session.execute(DELETE_VERSIONS, &[&name.as_str(), &time::to_system(before), &limit]).await?;
    session.run("COMMIT").await?;
    session.keep();
    Ok((slots + counters + versions, locked_at.elapsed()))
}

/// When the first slot is due that waits to be dispatched. While nothing is dispatched, what was recorded before does not count.
async fn first_due(engine: &Postgres, session: &Session) -> Result<Option<Timestamp>> {
    if !engine.slots.is_dispatching {
        return Ok(None);
    }
    let first = session.query_opt(FIRST_DUE, &[]).await?;
    first.as_ref().map(|row| crate::row::timestamp(row, 0)).transpose()
}
