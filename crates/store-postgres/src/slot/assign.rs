//! Assigns a batch: one transaction in four round trips, however many events it has and however many full windows are before them;
//! more if others hold windows.
//!
//! 1. Read the existing slots of the events and the paces, with a shared lock on each config.
//! 2. Find the first open window from each requested one on.
//! 3. Create missing counters from there on, and lock them. Windows that another server holds are skipped, up to the headroom:
//!    rows by `SKIP LOCKED`, rows that are being created by a lock that is only tried.
//! 4. Write slots and counters together.
//!
//! Steps 2 and 3 are repeated when the plan needs more windows. When other servers hold all windows within the headroom, the
//! transaction is rolled back and begun again with exclusive locks on the configs, which Postgres grants in order once the batches
//! in flight have ended. Events are inserted in order of id, so two servers with the same events cannot deadlock.

use std::collections::{HashMap, HashSet};
use std::time::SystemTime;

use futures_util::FutureExt;
use futures_util::future::{try_join3, try_join4};
use tokio::time::Instant;
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;
use weir_core::slot::{Pace, WindowStatus};
use weir_core::{ConfigName, EventId, Timestamp};
use weir_store::slot::{
    Assign, AssignOutcome, AssignPlan, MoveOutcome, PlanStep, Slot, SlotStore, WindowQuery,
};
use weir_store::{Batch, Error, Result};

use super::config_locks::{ConfigAccess, ConfigGuard};
use super::{FIND, config, free, read_slot, read_status};
use crate::pool::Session;
use crate::row::{column, unsigned};
use crate::{ENGINE, Postgres, time};

const LOCK_CONFIGS_SHARED: &str = "
    SELECT pg_advisory_xact_lock_shared(hashtextextended('weir slot ' || name, 0))
    FROM unnest($1::text[]) AS requested (name) ORDER BY name";
pub(super) const LOCK_CONFIGS: &str = "
    SELECT pg_advisory_xact_lock(hashtextextended('weir slot ' || name, 0))
    FROM unnest($1::text[]) AS requested (name) ORDER BY name";
const CONFIGS: &str = "
    SELECT config_name, version, max_per_window, window_size_ms, created_at FROM rate_limit_config
    WHERE config_name = ANY($1) AND is_active";
/// The window itself if it has no counter, else the first open one from there on, else the config's last window. Not `NOT EXISTS`:
/// Postgres may execute that as a hash of the whole table, for every batch.
const FIRST_OPEN: &str = "
    SELECT CASE
        WHEN (SELECT true FROM rate_limit_window_counter c
              WHERE c.config_name = query.config_name AND c.window_start = query.from_start) IS NULL THEN query.from_start
        ELSE coalesce(
            (SELECT c.window_start FROM rate_limit_window_counter c
             WHERE c.config_name = query.config_name AND c.status = 'OPEN' AND c.window_start >= query.from_start
             ORDER BY c.window_start LIMIT 1),
            (SELECT c.window_start FROM rate_limit_window_counter c WHERE c.config_name = query.config_name
             ORDER BY c.window_start DESC LIMIT 1))
        END
    FROM unnest($1::text[], $2::timestamptz[]) WITH ORDINALITY AS query (config_name, from_start, position)
    ORDER BY query.position";
/// `OFFSET 0` keeps the inner query separate, so that locks are tried only for missing windows, and in order.
const CREATE_MISSING: &str = "
    WITH free AS MATERIALIZED (
        SELECT missing.config_name, missing.start FROM (
            SELECT query.config_name, query.start
            FROM unnest($1::text[], $2::timestamptz[]) WITH ORDINALITY AS query (config_name, start, position)
            WHERE (SELECT true FROM rate_limit_window_counter c
                   WHERE c.config_name = query.config_name AND c.window_start = query.start) IS NULL
            ORDER BY query.position OFFSET 0) AS missing
        WHERE pg_try_advisory_xact_lock(
            hashtextextended('weir window ' || missing.config_name || ' ' || missing.start, 1))
        LIMIT $3)
    INSERT INTO rate_limit_window_counter (config_name, window_start, slot_count, status)
    SELECT config_name, start, 0, 'OPEN' FROM free
    ON CONFLICT DO NOTHING";
/// The condition on the status excludes nothing; it lets the planner use every column of either index.
const STATES: &str = "
    SELECT c.config_name, c.window_start, c.status
    FROM unnest($1::text[], $2::timestamptz[]) AS query (config_name, start)
    CROSS JOIN LATERAL (
        SELECT * FROM rate_limit_window_counter
        WHERE config_name = query.config_name AND window_start = query.start AND status IN ('OPEN', 'CLOSED') OFFSET 0) AS c";
const LOCK: &str = "
    SELECT c.config_name, c.window_start, c.slot_count
    FROM (SELECT * FROM unnest($1::text[], $2::timestamptz[]) AS query (config_name, start)
          ORDER BY config_name, start OFFSET 0) AS query
    CROSS JOIN LATERAL (
        SELECT * FROM rate_limit_window_counter
        WHERE config_name = query.config_name AND window_start = query.start AND status = 'OPEN' FOR UPDATE SKIP LOCKED) AS c
    LIMIT $3";
/// Like [`LOCK`], for a batch with exclusive locks. No server holds a row then, but an operator may, so it waits.
const LOCK_EXCLUSIVE: &str = "
    SELECT c.config_name, c.window_start, c.slot_count
    FROM (SELECT * FROM unnest($1::text[], $2::timestamptz[]) AS query (config_name, start)
          ORDER BY config_name, start OFFSET 0) AS query
    CROSS JOIN LATERAL (
        SELECT * FROM rate_limit_window_counter
        WHERE config_name = query.config_name AND window_start = query.start AND status = 'OPEN' FOR UPDATE) AS c
    LIMIT $3";
/// If another server has just assigned the same event, its slot stays, is not counted again, and the event is returned. `IS TRUE`
/// keeps the test of `inserted` from becoming a join, which without a hash would compare every event with every other.
const SAVE: &str = "
    WITH new AS (
        SELECT * FROM unnest($1::text[], $2::text[], $3::timestamptz[], $4::timestamptz[], $5::timestamptz[], $6::integer[])
            AS new (event_id, config_name, requested, start, scheduled, max)),
    inserted AS (
        INSERT INTO rate_limit_event_slot (event_id, config_name, requested_time, window_start, scheduled_time)
        SELECT event_id, config_name, requested, start, scheduled FROM new ORDER BY event_id
        ON CONFLICT (event_id) DO NOTHING
        RETURNING event_id, scheduled_time),
    due AS (
        INSERT INTO rate_limit_event_due (scheduled_time, event_id)
        SELECT scheduled_time, event_id FROM inserted WHERE $7::boolean
        ON CONFLICT DO NOTHING),
    counted AS (
        SELECT config_name, start, count(*)::integer AS added, max(max) AS max FROM new
        WHERE (event_id IN (SELECT event_id FROM inserted)) IS TRUE GROUP BY 1, 2),
    updated AS (
        UPDATE rate_limit_window_counter c
        SET slot_count = c.slot_count + counted.added,
            status = CASE WHEN c.slot_count + counted.added < counted.max THEN 'OPEN' ELSE 'CLOSED' END
        FROM counted CROSS JOIN LATERAL (
            SELECT ctid AS row_id FROM rate_limit_window_counter
            WHERE config_name = counted.config_name AND window_start = counted.start OFFSET 0) AS found
        WHERE c.ctid = found.row_id)
    SELECT ARRAY(SELECT event_id FROM new WHERE (event_id IN (SELECT event_id FROM inserted)) IS NOT TRUE)";

/// Tries concurrently with other batches first. When they hold the remaining windows, the batch releases its locks, waits for them
/// and begins again with exclusive locks on its configs. No batch waits while it holds a window.
pub(super) async fn assign(engine: &Postgres, batch: Batch<Assign>) -> Result<Vec<AssignOutcome>> {
    let session = engine.inner.pool.session().await?;
    let batch = batch.take();
    if batch.is_empty() {
        session.keep();
        return Ok(Vec::new());
    }
    let deadline = Instant::now() + engine.inner.pool.call_timeout();
    let outcomes = attempt(engine, &batch, ConfigAccess::Shared, Some(session), deadline).await?;
    match outcomes {
        Some(outcomes) => Ok(outcomes),
        None => {
            let outcomes = attempt(engine, &batch, ConfigAccess::Exclusive, None, deadline).await?;
            let held =
                || Error::unavailable(ENGINE, "another session holds rows of rate_limit_window_counter");
            outcomes.ok_or_else(|| held().before_commit())
        }
    }
}

/// Returns `None`, with nothing assigned, when others hold windows that the batch needs.
async fn attempt(
    engine: &Postgres,
    batch: &[Assign],
    access: ConfigAccess,
    session: Option<Session>,
    deadline: Instant,
) -> Result<Option<Vec<AssignOutcome>>> {
    let begun = tokio::time::timeout_at(deadline, begin(engine, batch, access, session)).await;
    let Transaction { session, existing, paces, _guards } = begun
        .unwrap_or_else(|elapsed| Err(Error::unavailable(ENGINE, elapsed)))
        .map_err(Error::before_commit)?;
    let mut plan = AssignPlan::new(batch, existing, &paces, engine.slots.headroom);
    if !place(&session, &mut plan, access, engine.slots.headroom).await.map_err(Error::before_commit)? {
        session.run("ROLLBACK").await?;
        session.keep();
        return Ok(None);
    }
    if plan.slots().len() == 0 {
        session.run("ROLLBACK").await?;
    } else {
        save(&session, &mut plan, &paces, engine.slots.is_dispatching).await?;
    }
    session.keep();
    Ok(Some(plan.outcomes()))
}

/// Places all events of a plan. Returns `false` when others hold windows that it needs.
async fn place(
    session: &Session,
    plan: &mut AssignPlan<'_>,
    access: ConfigAccess,
    headroom: u32,
) -> Result<bool> {
    // How many windows more than needed are tried.
    let mut extra = 0;
    loop {
        match plan.place(|| fastrand::u64(..)) {
            PlanStep::Load(needs) => {
                if load(session, plan, &needs, access, extra).await? {
                    extra = headroom;
                }
            }
            PlanStep::WindowsLocked => return Ok(false),
            PlanStep::Done => return Ok(true),
        }
    }
}

/// The outcome of one transaction that was to move a slot.
enum MoveAttempt {
    Done(MoveOutcome),
    /// Others hold windows that the event needs. Nothing was moved.
    WindowsLocked,
    /// Another call has moved the slot, or assigned it again, meanwhile. Nothing was moved.
    Changed,
}

/// Frees the slot of an event and assigns another one of the same config, in one transaction. Like a batch, it tries concurrently
/// with others first.
pub(super) async fn move_slot(
    engine: &Postgres,
    event: &EventId,
    requested: Timestamp,
) -> Result<MoveOutcome> {
    let deadline = Instant::now() + engine.inner.pool.call_timeout();
    let mut access = ConfigAccess::Shared;
    loop {
        let attempt = tokio::time::timeout_at(deadline, attempt_move(engine, event, requested, access)).await;
        match attempt.unwrap_or_else(|elapsed| Err(Error::unavailable(ENGINE, elapsed)))? {
            MoveAttempt::Done(outcome) => return Ok(outcome),
            MoveAttempt::WindowsLocked => access = ConfigAccess::Exclusive,
            MoveAttempt::Changed => {}
        }
    }
}

async fn attempt_move(
    engine: &Postgres,
    event: &EventId,
    requested: Timestamp,
    access: ConfigAccess,
) -> Result<MoveAttempt> {
    let Some(slot) = engine.find_slot(event).await? else {
        return Ok(MoveAttempt::Done(MoveOutcome::UnknownEvent));
    };
    let batch = [Assign { event: event.clone(), config: slot.config.clone(), requested }];
    let Transaction { session, existing: _, paces, _guards } = begin(engine, &batch, access, None).await?;
    let attempt = match paces.get(&slot.config) {
        None => MoveAttempt::Done(MoveOutcome::UnknownConfig(slot.config)),
        Some(pace) if !free(&session, &slot, pace).await? => MoveAttempt::Changed,
        Some(_) => {
            let headroom = engine.slots.headroom;
            let mut plan = AssignPlan::new(&batch, [], &paces, headroom);
            let is_placed = place(&session, &mut plan, access, headroom).await?;
            if plan.slots().len() > 0 {
                save(&session, &mut plan, &paces, engine.slots.is_dispatching).await?;
                session.keep();
                return match plan.outcomes().pop() {
                    Some(AssignOutcome::New(slot)) => Ok(MoveAttempt::Done(MoveOutcome::Moved(slot))),
                    _ => {
                        Err(Error::unavailable(ENGINE, "another server assigned the event meanwhile; retry"))
                    }
                };
            }
            if is_placed { MoveAttempt::Done(MoveOutcome::Exhausted) } else { MoveAttempt::WindowsLocked }
        }
    };
    session.run("ROLLBACK").await?;
    session.keep();
    Ok(attempt)
}

/// Keeps the paces of these configs from changing until the transaction ends.
pub(super) async fn lock_configs_shared(session: &Session, names: &[&str]) -> Result<()> {
    session.query(LOCK_CONFIGS_SHARED, &[&names]).await.map(drop)
}

/// An open transaction that holds the locks of its configs.
struct Transaction<'a> {
    session: Session,
    existing: Vec<Slot>,
    paces: HashMap<ConfigName, Pace>,
    _guards: Vec<ConfigGuard<'a>>,
}

/// Locks the configs in this process and takes a connection. A given session is returned to the pool if the batch has to wait.
pub(super) async fn lock_configs<'a>(
    engine: &'a Postgres,
    configs: &[&ConfigName],
    access: ConfigAccess,
    session: Option<Session>,
) -> Result<(Vec<ConfigGuard<'a>>, Session)> {
    let locks = &engine.inner.config_locks;
    match (locks.lock(configs, access).now_or_never(), session) {
        (Some(guards), Some(session)) => return Ok((guards, session)),
        (_, Some(session)) => session.keep(),
        (_, None) => {}
    }
    Ok((locks.lock(configs, access).await, engine.inner.pool.session().await?))
}

/// Step 1.
async fn begin<'a>(
    engine: &'a Postgres,
    batch: &[Assign],
    access: ConfigAccess,
    session: Option<Session>,
) -> Result<Transaction<'a>> {
    let events: Vec<&str> = batch.iter().map(|assign| assign.event.as_str()).collect();
    let mut configs: Vec<&ConfigName> = batch.iter().map(|assign| &assign.config).collect();
    configs.sort_unstable();
    configs.dedup();
    let (guards, session) = lock_configs(engine, &configs, access, session).await?;
    let names: Vec<&str> = configs.into_iter().map(ConfigName::as_str).collect();
    let lock = match access {
        ConfigAccess::Shared => LOCK_CONFIGS_SHARED,
        ConfigAccess::Exclusive => LOCK_CONFIGS,
    };
    let [lock, find, active] = session.prepare([lock, FIND, CONFIGS]).await?;
    let (_, _, existing, configs) = session
        .bounded(try_join4(
            session.batch_execute("BEGIN"),
            lock.query(&[&names]),
            find.query(&[&events]),
            active.query(&[&names]),
        ))
        .await?;
    let existing = existing.iter().map(read_slot).collect::<Result<_>>()?;
    let paces =
        configs.iter().map(config::read).map(|config| config.map(|config| (config.name, config.pace)));
    let paces = paces.collect::<Result<_>>()?;
    Ok(Transaction { session, existing, paces, _guards: guards })
}

/// Windows of some configs, in order.
type WindowList<'a> = Vec<(&'a ConfigName, Timestamp)>;

/// Steps 2 and 3. Returns whether others hold some of the windows.
async fn load(
    session: &Session,
    plan: &mut AssignPlan<'_>,
    needs: &[WindowQuery<'_>],
    access: ConfigAccess,
    extra: u32,
) -> Result<bool> {
    let (candidates, enough) = find_candidates(session, plan, needs, extra).await?;
    let names: Vec<&str> = candidates.iter().map(|(name, _)| name.as_str()).collect();
    let starts: Vec<SystemTime> = candidates.iter().map(|(_, start)| time::to_system(*start)).collect();
    let limit = i64::try_from(enough).unwrap_or(i64::MAX);
    let values: [&(dyn ToSql + Sync); 3] = [&names, &starts, &limit];
    let lock = match access {
        ConfigAccess::Shared => LOCK,
        ConfigAccess::Exclusive => LOCK_EXCLUSIVE,
    };
    let [create, states, lock] = session.prepare([CREATE_MISSING, STATES, lock]).await?;
    let (_, states, locked) = session
        .bounded(try_join3(create.execute(&values), states.query(&values[..2]), lock.query(&values)))
        .await?;
    let locked = LockedWindows::read(&locked, enough)?;
    let mut full = HashSet::new();
    for row in &states {
        if read_status(column(row, 2)?) == WindowStatus::Closed {
            full.insert((column::<&str>(row, 0)?, time::from_system(column(row, 1)?)));
        }
    }
    let mut any_locked = false;
    for (name, start) in candidates {
        let Some(windows) = plan.windows(name) else { continue };
        if let Some(count) = locked.counts.get(&(name.as_str(), start)) {
            windows.add(start, *count);
        } else if full.contains(&(name.as_str(), start)) {
            windows.add_full(start, windows.pace().window_after(start, 1));
        } else if locked.was_tried(name, start) {
            // It was to be created and is not visible: another server is creating it, or has locked it.
            windows.add_locked(start);
            any_locked = true;
        }
    }
    Ok(any_locked)
}

/// The windows that this transaction has locked.
struct LockedWindows<'a> {
    counts: HashMap<(&'a str, Timestamp), u32>,
    /// The last locked window of each config if there were enough of them. Later windows were not tried.
    last: Option<HashMap<&'a str, Timestamp>>,
}

impl<'a> LockedWindows<'a> {
    fn read(rows: &'a [Row], enough: u64) -> Result<Self> {
        let (mut counts, mut last) = (HashMap::new(), HashMap::new());
        for row in rows {
            let (name, start): (&str, _) = (column(row, 0)?, time::from_system(column(row, 1)?));
            counts.insert((name, start), unsigned(column(row, 2)?));
            last.insert(name, start);
        }
        let is_limited = counts.len() as u64 >= enough;
        Ok(Self { counts, last: is_limited.then_some(last) })
    }

    fn was_tried(&self, name: &ConfigName, start: Timestamp) -> bool {
        self.last.as_ref().is_none_or(|last| last.get(name.as_str()).is_some_and(|last| start < *last))
    }
}

/// Step 2: returns the windows that may be used, and how many of them are enough. No more are locked, so that other servers find
/// some, too.
async fn find_candidates<'a>(
    session: &Session,
    plan: &mut AssignPlan<'_>,
    needs: &[WindowQuery<'a>],
    extra: u32,
) -> Result<(WindowList<'a>, u64)> {
    // The first window may be open and yet have no room for the event, so the one after it is looked up, too.
    let mut from = Vec::with_capacity(2 * needs.len());
    for need in needs {
        let next = plan.windows(need.config).and_then(|windows| windows.next_window(need.from));
        from.push((need.config, need.from));
        from.push((need.config, next.unwrap_or(need.from)));
    }
    let starts = first_open(session, &from).await?;
    let (mut candidates, mut enough) = (Vec::new(), 0);
    for ((need, from), starts) in needs.iter().zip(from.chunks_exact(2)).zip(starts.chunks_exact(2)) {
        let (Some(windows), &[(_, first), (_, second)], &[first_open, second_open]) =
            (plan.windows(need.config), from, starts)
        else {
            continue;
        };
        windows.add_full(first, first_open);
        windows.add_full(second, second_open);
        if first_open == first {
            candidates.push((need.config, first));
        }
        let needed = need.events.div_ceil(windows.pace().max_per_window()).saturating_add(1);
        let following = std::iter::successors(Some(second_open), |start| windows.next_window(*start));
        let span = needed.saturating_add(extra) as usize;
        candidates.extend(following.take(span).map(|start| (need.config, start)));
        enough += u64::from(needed) + 1;
    }
    candidates.sort_unstable();
    candidates.dedup();
    Ok((candidates, enough))
}

async fn first_open(session: &Session, from: &[(&ConfigName, Timestamp)]) -> Result<Vec<Timestamp>> {
    let names: Vec<&str> = from.iter().map(|(name, _)| name.as_str()).collect();
    let starts: Vec<SystemTime> = from.iter().map(|(_, start)| time::to_system(*start)).collect();
    let rows = session.query(FIRST_OPEN, &[&names, &starts]).await?;
    rows.iter().map(|row| Ok(time::from_system(column(row, 0)?))).collect()
}

/// Step 4. Events that another server has assigned meanwhile get the slots of that server.
async fn save(
    session: &Session,
    plan: &mut AssignPlan<'_>,
    paces: &HashMap<ConfigName, Pace>,
    is_dispatching: bool,
) -> Result<()> {
    let events: Vec<&str> = plan.slots().map(|slot| slot.event.as_str()).collect();
    let configs: Vec<&str> = plan.slots().map(|slot| slot.config.as_str()).collect();
    let times = |of: fn(&Slot) -> Timestamp| -> Vec<SystemTime> {
        plan.slots().map(|slot| time::to_system(of(slot))).collect()
    };
    let requested = times(|slot| slot.requested);
    let starts = times(|slot| slot.window_start);
    let scheduled = times(|slot| slot.scheduled);
    let max = |slot: &Slot| paces.get(&slot.config).map_or(u32::MAX, Pace::max_per_window);
    let maxima: Vec<i32> = plan.slots().map(|slot| i32::try_from(max(slot)).unwrap_or(i32::MAX)).collect();
    let (follow_names, follow_starts): (Vec<&str>, Vec<SystemTime>) =
        plan.follow_ups().map(|(name, start)| (name.as_str(), time::to_system(start))).unzip();
    let [save, create] = session.prepare([SAVE, CREATE_MISSING]).await?;
    let values: [&(dyn ToSql + Sync); 7] =
        [&events, &configs, &requested, &starts, &scheduled, &maxima, &is_dispatching];
    let (saved, _, ()) = session
        .bounded(try_join3(
            save.query_one(&values),
            create.execute(&[&follow_names, &follow_starts, &i64::MAX]),
            session.batch_execute("COMMIT"),
        ))
        .await?;
    let lost: Vec<&str> = column(&saved, 0)?;
    if lost.is_empty() {
        return Ok(());
    }
    let found = session.query(FIND, &[&lost]).await?;
    if found.len() < lost.len() {
        return Err(Error::unavailable(
            ENGINE,
            "another server assigned and released an event of this batch meanwhile; retry",
        ));
    }
    plan.use_existing(found.iter().map(read_slot).collect::<Result<Vec<_>>>()?);
    Ok(())
}
