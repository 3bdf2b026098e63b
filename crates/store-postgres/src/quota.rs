//! Quota in Postgres. A batch is one transaction in two round trips: lock the rows in key order and read the clock;
//! then write back counts, messages and ledger, and commit. Keys of sends take a third, between the two, and a fourth if
//! messages are published.

mod send_keys;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime};

use async_trait::async_trait;
use futures_util::future::{try_join, try_join3, try_join4};
use tokio_postgres::Row;
use weir_core::quota::{Quota, QuotaLimits};
use weir_core::{Timestamp, UserId};
use weir_queue::publish::publish_accepted;
use weir_queue::sms;
use weir_store::quota::{
    AcceptedMessage, EnqueueOutcome, LimitChangeFeed, QuotaAudit, QuotaStore, ReservableStore, Reservation,
    ReservationRequest, ReservedUnits, SendMessage, SendOutcome, SendPlan, TOPIC, plan_reservations,
    plan_sends, random_bytes,
};
use weir_store::{Batch, Error, Result, shard};

use crate::clock::CLOCK;
use crate::connection::Values;
use crate::migrate::{REFUSE_OLDER_SERVERS, RESERVED_COUNT_VERSION};
use crate::pool::Session;
use crate::queue::{SHARDS, pack};
use crate::quota::send_keys::{ReservedKeys, SaveKeys};
use crate::row::{bigint, column, count, int, timestamp, unreadable, unsigned};
use crate::{ENGINE, Postgres, time};

const FIND: &str = "
    SELECT user_id, rate_limit, time_window, current_count, last_refresh_time, reserved_count,
           coalesce($2, clock_timestamp()) AS now
    FROM rate_limit_store WHERE user_id = $1";
/// Notifies every server with the commit, since any may cache something of the user.
const CONFIGURE: &str = "
    WITH saved AS (
        INSERT INTO rate_limit_store (user_id, rate_limit, time_window, current_count, last_refresh_time)
        VALUES ($1, $2, $3, 0, coalesce($4, clock_timestamp()))
        ON CONFLICT (user_id) DO UPDATE SET
            rate_limit = excluded.rate_limit, time_window = excluded.time_window,
            current_count = 0, reserved_count = 0, kept_count = 0,
            last_refresh_time = coalesce($4, clock_timestamp())
        RETURNING user_id, rate_limit, time_window, current_count, last_refresh_time, reserved_count),
    invalidated AS (
        INSERT INTO quota_cache_forget (user_id) SELECT user_id FROM saved WHERE $5::boolean ON CONFLICT DO NOTHING)
    SELECT saved.*, pg_notify('weir_quota', saved.user_id) FROM saved";
/// Leaves a row that is there as it is.
const CREATE: &str = "
    INSERT INTO rate_limit_store (user_id, rate_limit, time_window, current_count, last_refresh_time)
    VALUES ($1, $2, $3, 0, coalesce($4, clock_timestamp())) ON CONFLICT (user_id) DO NOTHING";
/// Notifies every server, like [`CONFIGURE`].
const CHANGE_LIMITS: &str = "
    WITH saved AS (
        UPDATE rate_limit_store
        SET rate_limit = $2, time_window = $3, current_count = $4, kept_count = $4, reserved_count = $5,
            last_refresh_time = $6
        WHERE user_id = $1 RETURNING user_id),
    invalidated AS (
        INSERT INTO quota_cache_forget (user_id) SELECT user_id FROM saved WHERE $7::boolean ON CONFLICT DO NOTHING)
    SELECT pg_notify('weir_quota', saved.user_id) FROM saved";
const LIST: &str = "
    SELECT user_id, rate_limit, time_window, current_count, last_refresh_time, reserved_count,
           coalesce($3, clock_timestamp()) AS now
    FROM rate_limit_store WHERE user_id > $1 ORDER BY user_id LIMIT $2";
const REMOVE: &str = "
    WITH deleted AS (DELETE FROM rate_limit_store WHERE user_id = $1 RETURNING user_id),
    invalidated AS (
        INSERT INTO quota_cache_forget (user_id) SELECT user_id FROM deleted WHERE $2::boolean ON CONFLICT DO NOTHING)
    SELECT pg_notify('weir_quota', deleted.user_id) FROM deleted";
const CONFIRM_INVALIDATED: &str = "DELETE FROM quota_cache_forget WHERE user_id = ANY($1)";
const RAISE_EPOCH: &str = "UPDATE quota_cache SET epoch = epoch + 1 RETURNING epoch";
/// Changes nothing, but its commit proves that the database takes writes.
const PROBE: &str = "UPDATE quota_cache SET epoch = epoch";
const LOCK: &str = "
    SELECT user_id, rate_limit, time_window, current_count, last_refresh_time, reserved_count
    FROM rate_limit_store WHERE user_id = ANY($1) ORDER BY user_id FOR UPDATE";
/// A count that was kept above the limit ends with its window. Only a new window moves the time forward: a clock that is set back
/// moves it back, with the count.
const SAVE: &str = "
    UPDATE rate_limit_store AS row
    SET current_count = new.current_count, reserved_count = new.reserved_count,
        last_refresh_time = new.last_refresh_time,
        kept_count = CASE WHEN new.last_refresh_time > row.last_refresh_time THEN 0 ELSE row.kept_count END
    FROM unnest($1::text[], $2::integer[], $3::integer[], $4::timestamptz[])
        AS new (user_id, current_count, reserved_count, last_refresh_time)
    WHERE row.user_id = ANY(ARRAY[new.user_id])"; // see `query_plan_tests.rs`
/// `Quota::record_sent` for many rows, in one statement that needs no lock before: it decides nothing, and is repeated as long
/// as users send. Rows are locked in the order of the array.
const RECORD_SENT: &str = "
    UPDATE rate_limit_store AS row
    SET current_count = row.current_count + least(row.reserved_count, new.units),
        reserved_count = row.reserved_count - least(row.reserved_count, new.units)
    FROM unnest($1::text[], $2::integer[], $3::timestamptz[]) AS new (user_id, units, window_start)
    WHERE row.user_id = ANY(ARRAY[new.user_id]) AND row.last_refresh_time <= new.window_start
        AND row.reserved_count > 0";
/// Whether reservations stand in `reserved_count`: no server may use the database that does not know it.
const SEPARATES_RESERVED: &str = "
    SELECT created_version >= $1 OR oldest_version >= $1 FROM weir_schema_state WHERE id = 1";
pub(crate) const ENQUEUE: &str = "
    INSERT INTO queue_message (topic, shard, key, payload)
    SELECT $1, new.shard, new.key, new.payload
    FROM unnest($2::smallint[], $3::text[], $4::bytea[]) WITH ORDINALITY AS new (shard, key, payload, position)
    ORDER BY new.position";
pub(crate) const COUNT_ACCEPTED: &str = "
    INSERT INTO queue_ledger (topic, slot, accepted) VALUES ($1, $2, $3)
    ON CONFLICT (topic, slot) DO UPDATE SET accepted = queue_ledger.accepted + excluded.accepted";
pub(crate) const AUDIT: &str = "
    SELECT (SELECT count(*) FROM rate_limit_store),
           ARRAY(SELECT user_id FROM rate_limit_store
                 WHERE current_count > greatest(rate_limit, kept_count) - reserved_count LIMIT 10)";

/// What the engine knows of the cache in front of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CacheInFront {
    /// Whether what it holds in advance stands in `reserved_count`.
    separates_reserved: bool,
}

/// Tracks batches that were published but whose counts could not be saved. A commit proves that the database takes writes
/// again. Batches run concurrently, so it ends only the failures that were recorded before it was sent.
#[derive(Debug, Default)]
pub(crate) struct SaveFailures {
    failures: AtomicU64,
    /// The number of failures that are followed by a successful commit.
    followed_by_commit: AtomicU64,
}

impl SaveFailures {
    /// Returns the number of failures. Must be read before a commit is sent.
    fn count(&self) -> u64 {
        self.failures.load(Ordering::Acquire)
    }

    fn record_failure(&self) {
        self.failures.fetch_add(1, Ordering::AcqRel);
    }

    /// Records the success of a commit that was sent after `failures` failures.
    fn record_commit(&self, failures: u64) {
        self.followed_by_commit.fetch_max(failures, Ordering::AcqRel);
    }

    /// Returns whether no commit has followed the last failure.
    fn is_pending(&self) -> bool {
        self.followed_by_commit.load(Ordering::Acquire) < self.count()
    }
}

#[async_trait]
impl QuotaStore for Postgres {
    async fn configure(&self, user: &UserId, limits: QuotaLimits) -> Result<Quota> {
        let (limit, window) = (int(limits.rate_limit()), int(limits.time_window_minutes()));
        let now = self.clock_override();
        let values: Values<'_> = &[&user.as_str(), &limit, &window, &now, &self.cache.is_some()];
        read_row(&self.inner.pool.query_one(CONFIGURE, values).await?)
    }

    async fn change_limits(&self, user: &UserId, limits: QuotaLimits) -> Result<Quota> {
        let (limit, window) = (int(limits.rate_limit()), int(limits.time_window_minutes()));
        let session = self.inner.pool.session().await?;
        session.execute(CREATE, &[&user.as_str(), &limit, &window, &self.clock_override()]).await?;
        loop {
            let (mut rows, now) = self.lock_rows(&session, vec![user.as_str()]).await?;
            // Another call may have removed the row again.
            let Some(row) = rows.get_mut(user.as_str()) else {
                session.execute(CREATE, &[&user.as_str(), &limit, &window, &self.clock_override()]).await?;
                session.run("COMMIT").await?;
                continue;
            };
            row.change_limits(limits, now);
            let (count, reserved) = (int(row.current_count), int(row.reserved_count));
            let (refresh, has_cache) = (time::to_system(row.last_refresh), self.cache.is_some());
            let values: Values<'_> =
                &[&user.as_str(), &limit, &window, &count, &reserved, &refresh, &has_cache];
            session.query(CHANGE_LIMITS, values).await?;
            session.run("COMMIT").await?;
            session.keep();
            return Ok(*row);
        }
    }

    async fn list(&self, after: Option<&UserId>, limit: usize) -> Result<Vec<(UserId, Quota)>> {
        let after = after.map_or("", UserId::as_str);
        let values: Values<'_> = &[&after, &bigint(limit), &self.clock_override()];
        let rows = self.inner.pool.query(LIST, values).await?;
        let read = |row| {
            let user = UserId::parse(column::<&str>(row, 0)?).map_err(unreadable)?;
            Ok((user, read_row(row)?.as_of(timestamp(row, 6)?)))
        };
        rows.iter().map(read).collect()
    }

    async fn find(&self, user: &UserId) -> Result<Option<Quota>> {
        let values: Values<'_> = &[&user.as_str(), &self.clock_override()];
        let row = self.inner.pool.query_opt(FIND, values).await?;
        row.map(|row| Ok(read_row(&row)?.as_of(timestamp(&row, 6)?))).transpose()
    }

    async fn remove(&self, user: &UserId) -> Result<bool> {
        let removed = self.inner.pool.query_opt(REMOVE, &[&user.as_str(), &self.cache.is_some()]).await?;
        Ok(removed.is_some())
    }

    async fn send_batch(&self, batch: Batch<SendMessage>) -> Result<Vec<SendOutcome>> {
        let session = self.inner.pool.session().await.map_err(Error::before_commit)?;
        let batch = batch.take();
        if batch.is_empty() {
            session.keep();
            return Ok(Vec::new());
        }
        let prepare = async {
            self.probe_after_save_failure(&session).await?;
            self.reserve_message_ids(&session, &batch).await
        };
        let reserved = prepare.await.map_err(Error::before_commit)?;
        let sent = self.send_reserved(&session, &batch, &reserved).await;
        match &sent {
            Ok(_) => session.keep(),
            Err(Error::NotDone { .. }) => {
                drop(session);
                self.forget(reserved).await;
            }
            Err(_) => {}
        }
        sent
    }

    async fn purge_keys(&self, limit: usize) -> Result<usize> {
        self.purge_expired_keys(limit).await
    }

    async fn audit(&self) -> Result<QuotaAudit> {
        let row = self.inner.pool.query_one(AUDIT, &[]).await?;
        Ok(QuotaAudit { users: count(&row, 0)?, over_limit: column(&row, 1)? })
    }
}

impl Postgres {
    /// Puts a cache in front: changed limits are recorded until it confirms that the old ones are invalidated.
    ///
    /// What the cache holds in advance stands in `reserved_count`, which servers of before do not know. In a database that may
    /// have such servers it is shown as sent instead, until `has_only_new_servers` says that there are none; then they do not
    /// start any more.
    pub async fn behind_cache(mut self, has_only_new_servers: bool) -> Result<Self> {
        let row = self.inner.pool.query_one(SEPARATES_RESERVED, &[&RESERVED_COUNT_VERSION]).await?;
        let mut separates_reserved: bool = column(&row, 0)?;
        if has_only_new_servers && !separates_reserved {
            self.inner.pool.execute(REFUSE_OLDER_SERVERS, &[&RESERVED_COUNT_VERSION]).await?;
            separates_reserved = true;
        }
        self.cache = Some(CacheInFront { separates_reserved });
        Ok(self)
    }

    fn separates_reserved(&self) -> bool {
        self.cache.is_some_and(|cache| cache.separates_reserved)
    }

    /// After a batch was published and could not be counted, nothing is published before another commit succeeds: while the
    /// database takes no writes, no message may be sent. Uses the connection that the batch has already: if every batch waited
    /// for a second one, none might be free.
    async fn probe_after_save_failure(&self, session: &Session) -> Result<()> {
        let failures = self.inner.save_failures.count();
        if self.inner.save_failures.is_pending() {
            session.execute(PROBE, &[]).await?;
            self.inner.save_failures.record_commit(failures);
        }
        Ok(())
    }

    /// Decides a batch whose message ids are reserved, publishes or enqueues what is accepted, and commits. An
    /// [`Error::NotDone`] means that nothing was published.
    async fn send_reserved(
        &self,
        session: &Session,
        batch: &[SendMessage],
        reserved: &ReservedKeys,
    ) -> Result<Vec<SendOutcome>> {
        let load = async {
            let users = batch.iter().map(|send| send.user.as_str()).collect();
            let (rows, now) = self.lock_rows(session, users).await?;
            let records = send_keys::find(session, batch).await?;
            Ok((rows, records, now))
        };
        let (mut rows, mut records, now) = load.await.map_err(Error::before_commit)?;
        let before = self.publisher.is_some().then(|| rows.clone());
        let mut plan = plan_sends(batch, &mut rows, &mut records, before.is_some(), now, random_bytes);
        if let (Some(publisher), Some(mut before)) = (&self.publisher, before)
            && !plan.accepted.is_empty()
        {
            self.refuse_after_save_failure()?;
            // The rows stay locked meanwhile, so that exactly the confirmed messages are counted.
            let queued = publish_accepted(&**publisher, &plan.accepted).await;
            plan = plan.retain_confirmed(&mut before, &queued);
        }
        let key_changes = plan.key_changes(&reserved.hashes);
        let SendPlan { outcomes, changed, accepted, .. } = plan;
        if accepted.is_empty() && changed.is_empty() && key_changes.is_empty() {
            session.run("COMMIT").await.map_err(Error::before_commit)?;
            return Ok(outcomes);
        }
        let failures = self.inner.save_failures.count();
        let saves = async {
            let save_keys = SaveKeys::prepare(session, &key_changes, reserved).await?;
            // Polled in this order, so that the keys are sent before the `COMMIT`.
            try_join(save_keys.run(session), save(session, &changed, self.for_table(&accepted))).await
        };
        match saves.await {
            Ok(_) => self.inner.save_failures.record_commit(failures),
            Err(error) => {
                if self.publisher.is_some() {
                    self.inner.save_failures.record_failure();
                }
                return Err(error);
            }
        }
        self.inner.topic_notify.notify(TOPIC);
        Ok(outcomes)
    }

    /// Fails if another batch could not be counted since this one began.
    fn refuse_after_save_failure(&self) -> Result<()> {
        if self.inner.save_failures.is_pending() {
            let cause =
                "cannot save the counts of a published batch; nothing is published until a commit succeeds";
            return Err(Error::unavailable(ENGINE, cause).before_commit());
        }
        Ok(())
    }

    /// Returns the accepted messages that go to the table queue: none with a broker.
    fn for_table<'a, 'b>(&self, accepted: &'a [AcceptedMessage<'b>]) -> &'a [AcceptedMessage<'b>] {
        if self.publisher.is_some() { &[] } else { accepted }
    }

    /// The first round trip. The clock is read by a statement of its own after the lock, so that windows are decided by the time
    /// when the lock was granted, and not by the time before a wait for another server's batch.
    async fn lock_rows<'a>(
        &self,
        session: &Session,
        mut users: Vec<&'a str>,
    ) -> Result<(HashMap<&'a str, Quota>, Timestamp)> {
        users.sort_unstable();
        users.dedup();
        let [lock, clock] = session.prepare([LOCK, CLOCK]).await?;
        let (_, locked, clock) = session
            .bounded(try_join3(session.batch_execute("BEGIN"), lock.query(&[&users]), clock.query_one(&[])))
            .await?;
        let now = self.now(&clock)?;
        // Rows come in the order of `users`, without those that do not exist.
        let mut users = users.into_iter();
        let mut rows = HashMap::with_capacity(locked.len());
        for row in &locked {
            let user: &str = column(row, 0)?;
            if let Some(user) = users.find(|candidate| *candidate == user) {
                rows.insert(user, read_row(row)?);
            }
        }
        Ok((rows, now))
    }
}

#[async_trait]
impl ReservableStore for Postgres {
    async fn reserve(&self, requests: Vec<ReservationRequest>) -> Result<Vec<Option<Reservation>>> {
        let session = self.inner.pool.session().await?;
        let users = requests.iter().map(|request| request.user.as_str()).collect();
        let (mut rows, at) = self.lock_rows(&session, users).await?;
        let reserved = plan_reservations(&requests, &mut rows, at, !self.separates_reserved());
        let changed: Vec<_> = requests
            .iter()
            .filter_map(|request| Some((&request.user, *rows.get(request.user.as_str())?)))
            .collect();
        save(&session, &changed, &[]).await?;
        session.keep();
        Ok(reserved)
    }

    async fn record_sent(&self, mut sent: Vec<ReservedUnits>) -> Result<()> {
        if !self.separates_reserved() {
            return Ok(());
        }
        sent.sort_unstable_by(|a, b| a.user.cmp(&b.user));
        let users: Vec<&str> = sent.iter().map(|sent| sent.user.as_str()).collect();
        let units: Vec<i32> = sent.iter().map(|sent| int(sent.units)).collect();
        let windows: Vec<SystemTime> = sent.iter().map(|sent| time::to_system(sent.window)).collect();
        self.inner.pool.execute(RECORD_SENT, &[&users, &units, &windows]).await.map(drop)
    }

    async fn return_unused(&self, unused: Vec<ReservedUnits>) -> Result<()> {
        let session = self.inner.pool.session().await?;
        let users = unused.iter().map(|unused| unused.user.as_str()).collect();
        let (mut rows, _now) = self.lock_rows(&session, users).await?;
        for ReservedUnits { user, window, units } in &unused {
            if let Some(row) = rows.get_mut(user.as_str()) {
                row.release(*window, *units);
            }
        }
        let changed: Vec<_> = unused
            .iter()
            .filter_map(|unused| Some((&unused.user, *rows.get(unused.user.as_str())?)))
            .collect();
        save(&session, &changed, &[]).await?;
        session.keep();
        Ok(())
    }

    async fn enqueue(&self, accepted: &[AcceptedMessage<'_>]) -> Result<Vec<EnqueueOutcome>> {
        if let Some(publisher) = &self.publisher {
            return Ok(publish_accepted(&**publisher, accepted).await);
        }
        if !accepted.is_empty() {
            let session = self.inner.pool.session().await.map_err(Error::before_commit)?;
            // Pipelined: `BEGIN` is sent first and does not cost a round trip of its own.
            let begin = session.bounded(session.batch_execute("BEGIN"));
            try_join(begin, save(&session, &[], accepted)).await?;
            session.keep();
            self.inner.topic_notify.notify(TOPIC);
        }
        Ok(vec![EnqueueOutcome::Enqueued; accepted.len()])
    }

    async fn raise_cache_epoch(&self) -> Result<()> {
        let session = self.inner.pool.session().await?;
        let queried_at = Instant::now();
        let row = session.query_one(RAISE_EPOCH, &[]).await?;
        session.keep();
        self.inner.limit_changes.mark_current(queried_at, count(&row, 0)?);
        Ok(())
    }

    async fn confirm_invalidated(&self, users: &[UserId]) -> Result<()> {
        let users: Vec<&str> = users.iter().map(UserId::as_str).collect();
        self.inner.pool.execute(CONFIRM_INVALIDATED, &[&users]).await.map(drop)
    }

    fn limit_changes(&self) -> Arc<LimitChangeFeed> {
        Arc::clone(&self.inner.limit_changes)
    }
}

/// The second round trip. The ledger row is locked last: after it only the commit follows, so two batches that count on the same
/// row cannot deadlock.
async fn save(
    session: &Session,
    changed: &[(&UserId, Quota)],
    accepted: &[AcceptedMessage<'_>],
) -> Result<()> {
    let users: Vec<&str> = changed.iter().map(|(user, _)| user.as_str()).collect();
    let counts: Vec<i32> = changed.iter().map(|(_, row)| int(row.current_count)).collect();
    let reserved: Vec<i32> = changed.iter().map(|(_, row)| int(row.reserved_count)).collect();
    let refreshes: Vec<SystemTime> =
        changed.iter().map(|(_, row)| time::to_system(row.last_refresh)).collect();
    let messages: Vec<(&str, Vec<u8>)> =
        accepted.iter().map(|message| (message.user.as_str(), sms::encode(message))).collect();
    let [save, enqueue_one, enqueue_packs, count_accepted] =
        session.prepare([SAVE, ENQUEUE, pack::ENQUEUE, COUNT_ACCEPTED]).await?;
    let save_rows = async {
        if changed.is_empty() {
            return Ok(0);
        }
        save.execute(&[&users, &counts, &reserved, &refreshes]).await
    };
    let enqueue = async {
        match messages.as_slice() {
            [] => Ok(()),
            // A single message is not packed, so that a person can read its row.
            [(key, payload)] => {
                let (shards, keys) = (vec![shard::of(key, SHARDS).cast_signed()], vec![*key]);
                let payloads = vec![payload.as_slice()];
                enqueue_one.execute(&[&TOPIC, &shards, &keys, &payloads]).await.map(drop)
            }
            messages => pack::enqueue(&enqueue_packs, TOPIC, messages).await,
        }
    };
    let count = async {
        if accepted.is_empty() {
            return Ok(0);
        }
        count_accepted.execute(&[&TOPIC, &session.ledger_row, &bigint(accepted.len())]).await
    };
    session.bounded(try_join4(save_rows, enqueue, count, session.batch_execute("COMMIT"))).await.map(drop)
}

fn read_row(row: &Row) -> Result<Quota> {
    let (limit, window, count): (i32, i32, i32) = (column(row, 1)?, column(row, 2)?, column(row, 3)?);
    let limits = QuotaLimits::new(unsigned(limit), unsigned(window)).map_err(unreadable)?;
    let reserved_count = unsigned(column(row, 5)?);
    Ok(Quota { limits, current_count: unsigned(count), reserved_count, last_refresh: timestamp(row, 4)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_commit_ends_the_failures_before_it_and_no_later_one() {
        let failures = SaveFailures::default();
        assert!(!failures.is_pending());
        failures.record_failure();
        let before = failures.count();
        // While this commit is in flight another batch fails.
        failures.record_failure();
        failures.record_commit(before);
        assert!(failures.is_pending(), "the second failure is not followed by a commit");
        failures.record_commit(failures.count());
        assert!(!failures.is_pending());
        failures.record_commit(before);
        assert!(!failures.is_pending(), "an older commit that is recorded late changes nothing");
    }
}
