//! Assigning a batch: one transaction in a fixed number of round trips, however many events it has and however many full
//! windows lie before them.
//!
//! 1. which events have slots already, and the paces, each under a shared lock;
//! 2. where the first open window after each wanted one is;
//! 3. the counters from there on, made where they are missing, and locked. What another server holds is passed over, as
//!    far as the headroom: rows by `SKIP LOCKED`, rows about to be made by a lock that is only tried;
//! 4. slots and counters, written together.
//!
//! Steps 2 and 3 are done again when a search found some of the room, and further on when others held too much. When
//! others hold all that the headroom has, the transaction is given up and begun again with the configs locked for it
//! alone: Postgres grants that in the order of asking, once the batches under way have ended. Events are inserted in order of id, so two
//! servers given the same events cannot wait for each other in a circle.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::SystemTime;

use futures_util::FutureExt;
use futures_util::future::{try_join3, try_join4};
use tokio::time::Instant;
use tokio_postgres::Statement;
use tokio_postgres::types::ToSql;
use weir_core::slot::{Pace, WindowStatus, Windows};
use weir_core::{ConfigName, EventId, Timestamp};
use weir_store::slot::{Assign, AssignOutcome, Slot};
use weir_store::{Batch, Error, Result};

use super::gate::{Access, Pass};
use super::{config, read_slot, read_status};
use crate::pool::Session;
use crate::quota::{column, unsigned};
use crate::{ENGINE, Postgres, time};

const SHARE_CONFIGS: &str = "
    SELECT pg_advisory_xact_lock_shared(hashtextextended('weir slot ' || name, 0))
    FROM unnest($1::text[]) AS wanted (name) ORDER BY name";
const LOCK_CONFIGS: &str = "
    SELECT pg_advisory_xact_lock(hashtextextended('weir slot ' || name, 0))
    FROM unnest($1::text[]) AS wanted (name) ORDER BY name";
const CONFIGS: &str = "
    SELECT config_name, version, max_per_window, window_size_ms, created_at FROM rate_limit_config
    WHERE config_name = ANY($1) AND is_active";
/// The next window when it has no counter, else the first open one that this batch does not hold already; past everything
/// when there is none. Not `NOT EXISTS`:
/// that may become a hash of the whole table, made anew for every batch.
const FIRST_OPEN: &str = "
    SELECT CASE
        WHEN (SELECT true FROM rate_limit_window_counter c
              WHERE c.config_name = w.config_name AND c.window_start = w.from_start) IS NULL THEN w.from_start
        ELSE coalesce(
            (SELECT c.window_start FROM rate_limit_window_counter c
             WHERE c.config_name = w.config_name AND c.status = 'OPEN' AND c.window_start >= w.from_start
               AND (c.config_name, c.window_start) NOT IN (SELECT * FROM unnest($3::text[], $4::timestamptz[]))
             ORDER BY c.window_start LIMIT 1),
            (SELECT c.window_start FROM rate_limit_window_counter c WHERE c.config_name = w.config_name
             ORDER BY c.window_start DESC LIMIT 1))
        END
    FROM unnest($1::text[], $2::timestamptz[]) WITH ORDINALITY AS w (config_name, from_start, place)
    ORDER BY w.place";
/// The inner query is kept apart (`OFFSET 0`), so that locks are tried only for what is missing, and in order.
const MAKE: &str = "
    WITH free AS MATERIALIZED (
        SELECT missing.config_name, missing.start FROM (
            SELECT w.config_name, w.start
            FROM unnest($1::text[], $2::timestamptz[]) WITH ORDINALITY AS w (config_name, start, place)
            WHERE (SELECT true FROM rate_limit_window_counter c
                   WHERE c.config_name = w.config_name AND c.window_start = w.start) IS NULL
            ORDER BY w.place OFFSET 0) AS missing
        WHERE pg_try_advisory_xact_lock(
            hashtextextended('weir window ' || missing.config_name || ' ' || missing.start, 1))
        LIMIT $3)
    INSERT INTO rate_limit_window_counter (config_name, window_start, slot_count, status)
    SELECT config_name, start, 0, 'OPEN' FROM free
    ON CONFLICT DO NOTHING";
/// Names both states, so that whichever index is used is used whole.
const STATES: &str = "
    SELECT c.config_name, c.window_start, c.status
    FROM unnest($1::text[], $2::timestamptz[]) AS w (config_name, start)
    CROSS JOIN LATERAL (
        SELECT * FROM rate_limit_window_counter
        WHERE config_name = w.config_name AND window_start = w.start AND status IN ('OPEN', 'CLOSED') OFFSET 0) AS c";
const LOCK: &str = "
    SELECT c.config_name, c.window_start, c.slot_count
    FROM (SELECT * FROM unnest($1::text[], $2::timestamptz[]) AS w (config_name, start) ORDER BY config_name, start OFFSET 0) AS w
    CROSS JOIN LATERAL (
        SELECT * FROM rate_limit_window_counter
        WHERE config_name = w.config_name AND window_start = w.start AND status = 'OPEN' FOR UPDATE SKIP LOCKED) AS c
    LIMIT $3";
/// The same for a batch that is alone with its configs. Nobody of ours holds a row then; an operator may.
const LOCK_ALONE: &str = "
    SELECT c.config_name, c.window_start, c.slot_count
    FROM (SELECT * FROM unnest($1::text[], $2::timestamptz[]) AS w (config_name, start) ORDER BY config_name, start OFFSET 0) AS w
    CROSS JOIN LATERAL (
        SELECT * FROM rate_limit_window_counter
        WHERE config_name = w.config_name AND window_start = w.start AND status = 'OPEN' FOR UPDATE) AS c
    LIMIT $3";
/// A slot that another server has just given to the same event is left alone, and not counted. `IS TRUE` keeps the test of
/// `inserted` from becoming a join, which without a hash would compare every event with every other.
const SAVE: &str = "
    WITH new AS (
        SELECT * FROM unnest($1::text[], $2::text[], $3::timestamptz[], $4::timestamptz[], $5::timestamptz[], $6::integer[])
            AS new (event_id, config_name, requested, start, scheduled, max)),
    inserted AS (
        INSERT INTO rate_limit_event_slot (event_id, config_name, requested_time, window_start, scheduled_time)
        SELECT event_id, config_name, requested, start, scheduled FROM new ORDER BY event_id
        ON CONFLICT (event_id) DO NOTHING
        RETURNING event_id, scheduled_time),
    noted AS (
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
            SELECT ctid AS place FROM rate_limit_window_counter
            WHERE config_name = counted.config_name AND window_start = counted.start OFFSET 0) AS found
        WHERE c.ctid = found.place)
    SELECT count(*) FROM inserted";

/// In the order of [`Statements::from_prepared`].
pub(super) const SQL: [&str; 9] =
    [SHARE_CONFIGS, LOCK_CONFIGS, CONFIGS, FIRST_OPEN, MAKE, STATES, LOCK, LOCK_ALONE, SAVE];

#[derive(Debug)]
pub(super) struct Statements {
    share_configs: Statement,
    lock_configs: Statement,
    configs: Statement,
    first_open: Statement,
    make: Statement,
    states: Statement,
    lock: Statement,
    lock_alone: Statement,
    save: Statement,
}

impl Statements {
    pub(super) fn from_prepared(next: &mut impl FnMut() -> Statement) -> Self {
        Self {
            share_configs: next(),
            lock_configs: next(),
            configs: next(),
            first_open: next(),
            make: next(),
            states: next(),
            lock: next(),
            lock_alone: next(),
            save: next(),
        }
    }
}

/// Beside other batches first. When they hold the windows that are left, the batch gives up what it has locked, waits for
/// them and begins again with its configs to itself; nobody waits with a window locked.
pub(super) async fn assign(engine: &Postgres, batch: Batch<Assign>) -> Result<Vec<AssignOutcome>> {
    let session = engine.inner.pool.slot_session().await?;
    let batch = batch.take();
    if batch.is_empty() {
        session.keep();
        return Ok(Vec::new());
    }
    let deadline = Instant::now() + engine.inner.pool.call_timeout();
    let beside_others = attempt(engine, &batch, Access::Shared, Some(session), deadline).await?;
    match beside_others {
        Some(outcomes) => Ok(outcomes),
        None => attempt(engine, &batch, Access::Alone, None, deadline).await.map(Option::unwrap_or_default),
    }
}

/// None when others hold windows that the batch needs; nothing was assigned then.
async fn attempt(
    engine: &Postgres,
    batch: &[Assign],
    access: Access,
    session: Option<Session>,
    deadline: Instant,
) -> Result<Option<Vec<AssignOutcome>>> {
    let begun = tokio::time::timeout_at(deadline, begin(engine, batch, access, session)).await;
    let Begun { session, existing, paces, _passes } =
        begun.map_err(|elapsed| Error::unavailable(ENGINE, elapsed))??;
    let mut work = Work::new(batch, existing, &paces, access, engine.slots.headroom);
    work.search(&session).await?;
    let is_held_up = access == Access::Shared && !work.open.is_empty();
    if work.placed.is_empty() || is_held_up {
        session.bounded(session.client.batch_execute("ROLLBACK")).await?;
    } else {
        work.save(&session, &paces, engine.slots.is_dispatching).await?;
    }
    session.keep();
    Ok((!is_held_up).then(|| work.outcomes()))
}

/// Keeps the paces of these configs from changing until the transaction ends.
pub(super) async fn share(session: &Session, names: &[&str]) -> Result<()> {
    let statement = &session.statements.slot.assign.share_configs;
    session.bounded(session.client.query(statement, &[&names])).await.map(drop)
}

/// A transaction that has its configs.
struct Begun<'a> {
    session: Session,
    existing: HashMap<EventId, Slot>,
    paces: HashMap<ConfigName, Pace>,
    _passes: Vec<Pass<'a>>,
}

/// Passes the gate and has a connection. One that is at hand is given to others when the batch has to wait.
async fn enter<'a>(
    engine: &'a Postgres,
    configs: &[&ConfigName],
    access: Access,
    session: Option<Session>,
) -> Result<(Vec<Pass<'a>>, Session)> {
    let gate = &engine.inner.slot_gate;
    match (gate.pass(configs, access).now_or_never(), session) {
        (Some(passes), Some(session)) => return Ok((passes, session)),
        (_, Some(session)) => session.keep(),
        (_, None) => {}
    }
    Ok((gate.pass(configs, access).await, engine.inner.pool.slot_session().await?))
}

/// Step 1.
async fn begin<'a>(
    engine: &'a Postgres,
    batch: &[Assign],
    access: Access,
    session: Option<Session>,
) -> Result<Begun<'a>> {
    let events: Vec<&str> = batch.iter().map(|assign| assign.event.as_str()).collect();
    let mut configs: Vec<&ConfigName> = batch.iter().map(|assign| &assign.config).collect();
    configs.sort_unstable();
    configs.dedup();
    let (passes, session) = enter(engine, &configs, access, session).await?;
    let names: Vec<&str> = configs.into_iter().map(ConfigName::as_str).collect();
    let (client, statements) = (&session.client, &session.statements.slot);
    let lock = match access {
        Access::Shared => &statements.assign.share_configs,
        Access::Alone => &statements.assign.lock_configs,
    };
    let (_, _, existing, configs) = session
        .bounded(try_join4(
            client.batch_execute("BEGIN"),
            client.query(lock, &[&names]),
            client.query(&statements.find, &[&events]),
            client.query(&statements.assign.configs, &[&names]),
        ))
        .await?;
    let existing = existing.iter().map(read_slot).map(|slot| slot.map(|slot| (slot.event.clone(), slot)));
    let existing = existing.collect::<Result<_>>()?;
    let paces =
        configs.iter().map(config::read).map(|config| config.map(|config| (config.name, config.pace)));
    let paces = paces.collect::<Result<_>>()?;
    Ok(Begun { session, existing, paces, _passes: passes })
}

/// A batch on its way.
struct Work<'a> {
    batch: &'a [Assign],
    access: Access,
    existing: HashMap<EventId, Slot>,
    /// How many windows past the first one with room are searched.
    headroom: u32,
    views: HashMap<&'a ConfigName, Windows>,
    /// Places in the batch that still need a slot.
    open: Vec<usize>,
    placed: BTreeMap<usize, Slot>,
    /// Windows locked so far.
    ours: HashSet<(String, Timestamp)>,
}

impl<'a> Work<'a> {
    fn new(
        batch: &'a [Assign],
        existing: HashMap<EventId, Slot>,
        paces: &HashMap<ConfigName, Pace>,
        access: Access,
        headroom: u32,
    ) -> Self {
        let mut views = HashMap::new();
        let mut seen = HashSet::new();
        let mut open = Vec::new();
        for (place, assign) in batch.iter().enumerate() {
            if let Some(pace) = paces.get(&assign.config)
                && !existing.contains_key(&assign.event)
                && seen.insert(&assign.event)
            {
                views.entry(&assign.config).or_insert_with(|| Windows::new(*pace, headroom));
                open.push(place);
            }
        }
        Self { batch, access, existing, headroom, views, open, placed: BTreeMap::new(), ours: HashSet::new() }
    }

    /// Steps 2 and 3, and the placing, for as long as they get on: first as near as can be, then as far as the headroom.
    async fn search(&mut self, session: &Session) -> Result<()> {
        let mut further = 0;
        while !self.open.is_empty() {
            let before = (self.open.len(), self.ours.len());
            self.look(session, further).await?;
            if (self.open.len(), self.ours.len()) == before {
                if further == self.headroom {
                    break;
                }
                further = self.headroom;
            }
        }
        Ok(())
    }

    /// One search, so many windows further than the batch needs.
    async fn look(&mut self, session: &Session, further: u32) -> Result<()> {
        let wanted = self.wanted();
        let next = |(name, first): &(&'a ConfigName, Timestamp)| {
            (*name, self.views.get(name).map_or(*first, |view| view.pace().later(*first, 1)))
        };
        let from: Vec<_> = wanted.keys().map(next).collect();
        let starts = first_open(session, &from, &self.ours).await?;
        let (mut candidates, mut enough) = (Vec::new(), 0);
        for (((name, first), demand), start) in wanted.iter().zip(starts) {
            let Some(view) = self.views.get(name) else { continue };
            let pace = *view.pace();
            let needed = u64::from(*demand).div_ceil(u64::from(pace.max_per_window())) + 1;
            let span = needed + u64::from(further);
            candidates.push((*name, *first));
            candidates.extend((0..span).map(|n| (*name, pace.later(start, n))));
            // No more is locked than is needed: others want some, too.
            enough += needed + 1;
        }
        candidates.retain(|(name, start)| !self.ours.contains(&(name.to_string(), *start)));
        candidates.sort_unstable();
        candidates.dedup();
        self.lock(session, &candidates, i64::try_from(enough).unwrap_or(i64::MAX)).await?;
        self.place();
        Ok(())
    }

    /// How many events want which window.
    fn wanted(&self) -> BTreeMap<(&'a ConfigName, Timestamp), u32> {
        let mut wanted = BTreeMap::new();
        for &place in &self.open {
            let Assign { config, requested, .. } = &self.batch[place];
            if let Some(view) = self.views.get(config) {
                *wanted.entry((config, view.pace().window_of(*requested))).or_default() += 1;
            }
        }
        wanted
    }

    async fn lock(
        &mut self,
        session: &Session,
        candidates: &[(&'a ConfigName, Timestamp)],
        enough: i64,
    ) -> Result<()> {
        let names: Vec<&str> = candidates.iter().map(|(name, _)| name.as_str()).collect();
        let starts: Vec<SystemTime> = candidates.iter().map(|(_, start)| time::to_system(*start)).collect();
        let (client, statements) = (&session.client, &session.statements.slot.assign);
        let values: [&(dyn ToSql + Sync); 3] = [&names, &starts, &enough];
        let lock = match self.access {
            Access::Shared => &statements.lock,
            Access::Alone => &statements.lock_alone,
        };
        let (_, states, locked) = session
            .bounded(try_join3(
                client.execute(&statements.make, &values),
                client.query(&statements.states, &values[..2]),
                client.query(lock, &values),
            ))
            .await?;
        self.views.values_mut().for_each(Windows::forget_held);
        for row in &locked {
            let (name, start): (&str, _) = (column(row, 0)?, time::from_system(column(row, 1)?));
            self.ours.insert((name.to_owned(), start));
            if let Some(view) = self.view(name) {
                view.add(start, unsigned(column(row, 2)?));
            }
        }
        let mut known: HashSet<(&str, SystemTime)> = HashSet::new();
        for row in &states {
            let (name, start): (&str, SystemTime) = (column(row, 0)?, column(row, 1)?);
            known.insert((name, start));
            let is_open = read_status(column(row, 2)?) == WindowStatus::Open;
            if is_open && let Some(view) = self.view(name) {
                let start = time::from_system(start);
                if view.count(start).is_none() {
                    view.pass_over(start);
                }
            }
        }
        // What is not there although it was to be made is being made by somebody else.
        for (name, start) in candidates {
            if !known.contains(&(name.as_str(), time::to_system(*start)))
                && let Some(view) = self.views.get_mut(name)
            {
                view.pass_over(*start);
            }
        }
        Ok(())
    }

    fn view(&mut self, name: &str) -> Option<&mut Windows> {
        self.views.iter_mut().find(|(known, _)| known.as_str() == name).map(|(_, view)| view)
    }

    fn place(&mut self) {
        let open = std::mem::take(&mut self.open);
        for place in open {
            let Assign { event, config, requested } = &self.batch[place];
            let found = self.views.get_mut(config).and_then(|view| view.place(*requested, fastrand::u64(..)));
            match found {
                Some(found) => {
                    let slot = Slot {
                        event: event.clone(),
                        config: config.clone(),
                        requested: *requested,
                        window_start: found.window_start,
                        scheduled: found.scheduled,
                    };
                    self.placed.insert(place, slot);
                }
                None => self.open.push(place),
            }
        }
    }

    /// Step 4. When another server was faster with some of the events, theirs are the slots.
    async fn save(
        &mut self,
        session: &Session,
        paces: &HashMap<ConfigName, Pace>,
        is_dispatching: bool,
    ) -> Result<()> {
        let slots: Vec<&Slot> = self.placed.values().collect();
        let events: Vec<&str> = slots.iter().map(|slot| slot.event.as_str()).collect();
        let configs: Vec<&str> = slots.iter().map(|slot| slot.config.as_str()).collect();
        let times = |of: fn(&Slot) -> Timestamp| -> Vec<SystemTime> {
            slots.iter().map(|slot| time::to_system(of(slot))).collect()
        };
        let requested = times(|slot| slot.requested);
        let starts = times(|slot| slot.window_start);
        let scheduled = times(|slot| slot.scheduled);
        let max = |slot: &&Slot| paces.get(&slot.config).map_or(u32::MAX, Pace::max_per_window);
        let maxima: Vec<i32> =
            slots.iter().map(|slot| i32::try_from(max(slot)).unwrap_or(i32::MAX)).collect();
        let (follow_names, follow_starts) = self.follow_ups();
        let (client, statements) = (&session.client, &session.statements.slot);
        let values: [&(dyn ToSql + Sync); 7] =
            [&events, &configs, &requested, &starts, &scheduled, &maxima, &is_dispatching];
        let (saved, _, ()) = session
            .bounded(try_join3(
                client.query_one(&statements.assign.save, &values),
                client.execute(&statements.assign.make, &[&follow_names, &follow_starts, &i64::MAX]),
                client.batch_execute("COMMIT"),
            ))
            .await?;
        if column::<i64>(&saved, 0)?.unsigned_abs() == slots.len() as u64 {
            return Ok(());
        }
        let found = session.bounded(client.query(&statements.find, &[&events])).await?;
        for slot in found.iter().map(read_slot) {
            let slot = slot?;
            self.existing.insert(slot.event.clone(), slot);
        }
        let existing = &self.existing;
        self.placed.retain(|_, slot| existing.get(&slot.event) == Some(slot));
        Ok(())
    }

    /// The windows behind those that are full now.
    fn follow_ups(&self) -> (Vec<&'a str>, Vec<SystemTime>) {
        let full = self.views.iter().flat_map(|(name, view)| {
            let full = view.changed().filter(|(_, _, status)| *status == WindowStatus::Closed);
            full.map(|(start, _, _)| (name.as_str(), time::to_system(view.pace().later(start, 1))))
        });
        full.unzip()
    }

    fn outcomes(self) -> Vec<AssignOutcome> {
        let Self { batch, existing, views, mut placed, .. } = self;
        let mut given: HashMap<&EventId, Slot> = HashMap::new();
        let mut outcomes = Vec::with_capacity(batch.len());
        for (place, assign) in batch.iter().enumerate() {
            outcomes.push(match placed.remove(&place) {
                Some(slot) => {
                    given.insert(&assign.event, slot.clone());
                    AssignOutcome::New(slot)
                }
                None => match existing.get(&assign.event).or_else(|| given.get(&assign.event)) {
                    Some(slot) => AssignOutcome::Existing(slot.clone()),
                    None if views.contains_key(&assign.config) => AssignOutcome::Exhausted,
                    None => AssignOutcome::UnknownConfig,
                },
            });
        }
        outcomes
    }
}

/// Step 2.
async fn first_open(
    session: &Session,
    from: &[(&ConfigName, Timestamp)],
    ours: &HashSet<(String, Timestamp)>,
) -> Result<Vec<Timestamp>> {
    let names: Vec<&str> = from.iter().map(|(name, _)| name.as_str()).collect();
    let starts: Vec<SystemTime> = from.iter().map(|(_, start)| time::to_system(*start)).collect();
    let statement = &session.statements.slot.assign.first_open;
    let (our_names, our_starts): (Vec<&str>, Vec<SystemTime>) =
        ours.iter().map(|(name, start)| (name.as_str(), time::to_system(*start))).unzip();
    let values: [&(dyn ToSql + Sync); 4] = [&names, &starts, &our_names, &our_starts];
    let rows = session.bounded(session.client.query(statement, &values)).await?;
    rows.iter().map(|row| Ok(time::from_system(column(row, 0)?))).collect()
}
