//! Quota in SQLite: the send path, limits, and the rows as the writer thread caches them.
//!
//! The counts of a batch of sends to many users go through `quota_journal` (see `journal.rs`), in the same commit as the
//! messages. Only the writer thread uses [`QuotaRows`], in the order of its transactions.

mod send_keys;

use std::collections::{HashMap, HashSet};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_trait::async_trait;
use rusqlite::{Connection, OptionalExtension, Row, params};
use tokio::runtime::Handle;
use weir_core::quota::{Quota, QuotaLimits};
use weir_core::{Timestamp, UserId};
use weir_queue::publish::{Publisher, publish_accepted};
use weir_queue::sms;
use weir_store::quota::send_keys::hashes;
use weir_store::quota::{
    QuotaAudit, QuotaStore, SendKeyHash, SendMessage, SendOutcome, SendPlan, TOPIC, plan_sends, random_bytes,
};
use weir_store::{Batch, Result, StoreHealth};

use crate::error::fault;
use crate::journal::{IN_PLACE_MAX, Journal, JournaledTable, put_text, take_bytes, take_text};
use crate::request::limited;
use crate::writer::{BatchInTurns, Scheduling};
use crate::{Sqlite, queue};

/// Sends decided between two checks of the turn.
const CHUNK_MAX: usize = 512;

const CONFIGURE: &str = "
    INSERT INTO rate_limit_store (user_id, rate_limit, time_window, current_count, last_refresh_time, kept_count)
    VALUES (?1, ?2, ?3, ?4, ?5, ?4)
    ON CONFLICT (user_id) DO UPDATE SET
        rate_limit = excluded.rate_limit, time_window = excluded.time_window, current_count = excluded.current_count,
        last_refresh_time = excluded.last_refresh_time, kept_count = excluded.kept_count";
const LIST: &str = "SELECT user_id FROM rate_limit_store WHERE user_id > ?1 ORDER BY user_id LIMIT ?2";
const REMOVE: &str = "DELETE FROM rate_limit_store WHERE user_id = ?1";
const COUNT: &str = "SELECT count(*) FROM rate_limit_store";
const OVER_LIMIT: &str =
    "SELECT user_id FROM rate_limit_store WHERE current_count > max(rate_limit, kept_count) LIMIT 10";
const FIND: &str = "
    SELECT rate_limit, time_window, current_count, last_refresh_time
    FROM rate_limit_store WHERE user_id = ?1";
/// A count that was kept above the limit ends with its window. Only a new window moves the time forward: a clock that is set back
/// moves it back, with the count.
const SAVE: &str = "
    UPDATE rate_limit_store
    SET current_count = ?2, last_refresh_time = ?3,
        kept_count = CASE WHEN ?3 > last_refresh_time THEN 0 ELSE kept_count END
    WHERE user_id = ?1";
/// Changes when another connection, such as an operator's shell, has written.
const DATA_VERSION: &str = "PRAGMA data_version";

#[async_trait]
impl QuotaStore for Sqlite {
    async fn configure(&self, user: &UserId, limits: QuotaLimits) -> Result<Quota> {
        self.save_limits(user, move |_, now| Quota::new(limits, now)).await
    }

    async fn change_limits(&self, user: &UserId, limits: QuotaLimits) -> Result<Quota> {
        let change = move |row: Option<Quota>, now| {
            let mut row = row.unwrap_or(Quota::new(limits, now));
            row.change_limits(limits, now);
            row
        };
        self.save_limits(user, change).await
    }

    async fn list(&self, after: Option<&UserId>, limit: usize) -> Result<Vec<(UserId, Quota)>> {
        let (after, clock) = (after.cloned(), self.inner.clock.clone());
        // On the writer thread, which has counts that are not in the table yet.
        let list = move |connection: &Connection, rows: &mut QuotaRows| {
            rows.refresh(connection)?;
            let mut statement = connection.prepare_cached(LIST)?;
            let after = after.as_ref().map_or("", UserId::as_str);
            let users = statement.query_map(params![after, limited(limit)], |row| row.get::<_, String>(0))?;
            let (mut listed, now) = (Vec::new(), clock.now());
            for user in users {
                let user = UserId::parse(user?).map_err(fault)?;
                if let Some(row) = rows.find(connection, &user)? {
                    listed.push((user, row.as_of(now)));
                }
            }
            Ok(listed)
        };
        self.inner.writer.run_with_quota(list).await
    }

    async fn find(&self, user: &UserId) -> Result<Option<Quota>> {
        let user = user.clone();
        // The writer thread has counts that are not in the table yet. As with any job, it answers when the counts that
        // it returns are on disk.
        let find = move |connection: &Connection, rows: &mut QuotaRows| {
            rows.refresh(connection)?;
            rows.find(connection, &user)
        };
        let row = self.inner.writer.run_with_quota(find).await?;
        Ok(row.map(|row| row.as_of(self.inner.clock.now())))
    }

    async fn remove(&self, user: &UserId) -> Result<bool> {
        let user = user.clone();
        let remove = move |connection: &Connection, rows: &mut QuotaRows| {
            rows.forget(&user);
            connection.prepare_cached(REMOVE)?.execute([user.as_str()]).map(|removed| removed > 0)
        };
        self.inner.writer.run_with_quota(remove).await
    }

    async fn send_batch(&self, batch: Batch<SendMessage>) -> Result<Vec<SendOutcome>> {
        let clock = self.inner.clock.clone();
        if self.publisher.is_some() && self.inner.has_uncounted_messages.load(Ordering::Relaxed) {
            // While the disk rejects writes, no further messages may be published without being counted.
            self.ping().await?;
        }
        let broker = self.publisher.clone().map(|publisher| (publisher, Handle::current()));
        let (mut batch, mut reserved, mut has_reserved_ids) =
            (BatchInTurns::new(batch), HashSet::new(), false);
        let send = self.inner.writer.run_in_turns(Scheduling::Fifo, move |connection, state, turn| {
            loop {
                if broker.is_some() && !has_reserved_ids {
                    has_reserved_ids = true;
                    reserved = send_keys::reserve_message_ids(connection, batch.waiting(), clock.now())?;
                    if !reserved.is_empty() {
                        // The next turn begins when the ids are on disk.
                        return Ok(ControlFlow::Continue(()));
                    }
                }
                let commands = batch.next_chunk(CHUNK_MAX, turn);
                if commands.is_empty() {
                    return Ok(batch.finish());
                }
                let broker = broker.as_ref();
                let keys = hashes(&commands).into_iter().filter(|hash| reserved.remove(hash)).collect();
                let outcomes =
                    send_chunk(connection, &mut state.quota, &commands, &keys, clock.now(), broker)?;
                batch.outcomes.extend(outcomes);
            }
        });
        let outcomes = send.await;
        let may_be_uncounted = self.publisher.is_some() && outcomes.is_err();
        self.inner.has_uncounted_messages.store(may_be_uncounted, Ordering::Relaxed);
        let is_accepted = |outcome: &SendOutcome| matches!(outcome, SendOutcome::Accepted { .. });
        // A batch that failed in a later turn may have enqueued messages in earlier ones.
        if outcomes.as_ref().map_or(true, |outcomes| outcomes.iter().any(is_accepted)) {
            self.inner.topic_notify.notify(TOPIC);
        }
        outcomes
    }

    async fn purge_keys(&self, limit: usize) -> Result<usize> {
        let now = self.inner.clock.now();
        self.inner.writer.run(move |connection| send_keys::purge(connection, now, limit)).await
    }

    async fn audit(&self) -> Result<QuotaAudit> {
        let mut fold_target = None;
        let fold = self.inner.writer.run_in_turns(Scheduling::Interleaved, move |connection, state, turn| {
            state.quota.refresh(connection)?;
            state.quota.journal.fold_for_one_turn(connection, &mut fold_target, turn)
        });
        fold.await?;
        let audit = |connection: &Connection| {
            let transaction = connection.unchecked_transaction()?;
            let connection = &*transaction;
            let users = connection.query_row(COUNT, [], |row| row.get(0))?;
            Ok(QuotaAudit { users, over_limit: users_over_limit(connection)? })
        };
        self.read(audit).await
    }
}

/// Some of the users whose count is above their limit.
pub(crate) fn users_over_limit(connection: &Connection) -> rusqlite::Result<Vec<String>> {
    connection.prepare(OVER_LIMIT)?.query_map([], |row| row.get(0))?.collect()
}

impl Sqlite {
    /// Replaces a user's limits, and the window and its count, by what `change` makes of them.
    async fn save_limits(
        &self,
        user: &UserId,
        change: impl FnOnce(Option<Quota>, Timestamp) -> Quota + Send + 'static,
    ) -> Result<Quota> {
        let (user, clock) = (user.clone(), self.inner.clock.clone());
        let save = move |connection: &Connection, rows: &mut QuotaRows| {
            rows.refresh(connection)?;
            let row = change(rows.find(connection, &user)?, clock.now());
            connection.prepare_cached(CONFIGURE)?.execute(params![
                user.as_str(),
                row.limits.rate_limit(),
                row.limits.time_window_minutes(),
                row.current_count,
                row.last_refresh.as_micros(),
            ])?;
            rows.put_configured(connection, &user, row)?;
            Ok(row)
        };
        self.inner.writer.run_with_quota(save).await
    }
}

/// Decides a chunk of sends, saves counts and keys, and enqueues or publishes the accepted messages. `reserved` are the keys
/// whose records were created for this batch.
fn send_chunk(
    connection: &Connection,
    quota: &mut QuotaRows,
    chunk: &[SendMessage],
    reserved: &HashSet<SendKeyHash>,
    now: Timestamp,
    broker: Option<&(Arc<dyn Publisher>, Handle)>,
) -> rusqlite::Result<Vec<SendOutcome>> {
    quota.refresh(connection)?;
    let mut rows: HashMap<&str, Quota> = HashMap::with_capacity(chunk.len());
    for SendMessage { user, .. } in chunk {
        // A user without a row is looked up once per send, which is rare.
        if !rows.contains_key(user.as_str())
            && let Some(row) = quota.find(connection, user)?
        {
            rows.insert(user.as_str(), row);
        }
    }
    let before = broker.is_some().then(|| rows.clone());
    let mut records = send_keys::find(connection, chunk)?;
    let mut plan = plan_sends(chunk, &mut rows, &mut records, broker.is_some(), now, random_bytes);
    if let (Some((publisher, runtime)), Some(mut before)) = (broker, before) {
        if !plan.accepted.is_empty() {
            let queued = runtime.block_on(publish_accepted(&**publisher, &plan.accepted));
            plan = plan.retain_confirmed(&mut before, &queued);
        }
        send_keys::apply(connection, &plan.key_changes(reserved))?;
        quota.save(connection, &plan.changed)?;
        return Ok(plan.outcomes);
    }
    send_keys::apply(connection, &plan.key_changes(reserved))?;
    let SendPlan { outcomes, changed, accepted, .. } = plan;
    quota.save(connection, &changed)?;
    let messages = accepted.iter().map(|message| (message.user.as_str(), sms::encode(message)));
    queue::enqueue(connection, TOPIC, messages)?;
    Ok(outcomes)
}

/// Rows in the cache. When it is full, it is cleared: the table has them.
const CACHED_ROWS_MAX: usize = 32_768;

/// The writer thread's cache of `rate_limit_store`, and the journal of counts that are not in the table yet. When a
/// transaction is rolled back, the rows that it changed leave the cache and are read again.
#[derive(Debug, Default)]
pub(crate) struct QuotaRows {
    cache: HashMap<UserId, Quota>,
    journal: Journal<QuotaCounts>,
    /// The [`DATA_VERSION`] at which the cached rows were read, or `None` before the first read.
    data_version: Option<i64>,
    /// Users whose rows the current transaction has changed.
    changed: Vec<UserId>,
}

/// A point within a transaction: the savepoint of the journal, and the length of `changed`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct QuotaSavepoint(usize, usize);

/// The counts in `rate_limit_store`. A journal entry of a deleted user has no effect.
#[derive(Debug)]
struct QuotaCounts;

/// The columns that a send changes: the count and the last refresh.
type Count = (u32, Timestamp);

impl JournaledTable for QuotaCounts {
    type Key = UserId;
    type Value = Count;

    const NAME: &'static str = "quota_journal";
    const APPEND: &'static str = "INSERT INTO quota_journal (entries) VALUES (?1)";
    const READ: &'static str = "SELECT id, entries FROM quota_journal ORDER BY id";
    const CLEAR: &'static str = "DELETE FROM quota_journal WHERE id <= ?1";
    const FOLD_AT: usize = 16_384;
    const FOLD_AFTER: Duration = Duration::from_secs(1);

    fn encode(user: &UserId, (count, last_refresh): &Count, entries: &mut Vec<u8>) {
        put_text(entries, user.as_str());
        entries.extend_from_slice(&count.to_le_bytes());
        entries.extend_from_slice(&last_refresh.as_micros().to_le_bytes());
    }

    fn decode(entries: &mut &[u8]) -> Option<(UserId, Count)> {
        let user = UserId::parse(take_text(entries)?).ok()?;
        let count = u32::from_le_bytes(take_bytes(entries)?);
        let last_refresh = Timestamp::from_micros(i64::from_le_bytes(take_bytes(entries)?));
        Some((user, (count, last_refresh)))
    }

    fn save(connection: &Connection, rows: &[(UserId, Count)]) -> rusqlite::Result<()> {
        let mut save = connection.prepare_cached(SAVE)?;
        rows.iter().try_for_each(|(user, (count, last_refresh))| {
            save.execute(params![user.as_str(), count, last_refresh.as_micros()]).map(drop)
        })
    }
}

impl QuotaRows {
    /// Loads the journal, unless it is loaded, and clears the cache if another connection has written.
    pub(crate) fn refresh(&mut self, connection: &Connection) -> rusqlite::Result<()> {
        let version = connection.prepare_cached(DATA_VERSION)?.query_row([], |row| row.get(0))?;
        if self.data_version.replace(version) != Some(version) {
            self.cache.clear();
        }
        self.journal.load(connection)
    }

    /// Forgets how to roll back: the transaction was committed.
    pub(crate) fn commit(&mut self) {
        self.journal.commit();
        self.changed.clear();
    }

    pub(crate) fn savepoint(&self) -> QuotaSavepoint {
        QuotaSavepoint(self.journal.savepoint(), self.changed.len())
    }

    pub(crate) fn roll_back_to(&mut self, QuotaSavepoint(journal, changed): QuotaSavepoint) {
        self.journal.roll_back_to(journal);
        for user in self.changed.drain(changed..) {
            self.cache.remove(&user);
        }
    }

    pub(crate) fn find(&mut self, connection: &Connection, user: &UserId) -> rusqlite::Result<Option<Quota>> {
        if let Some(row) = self.cache.get(user) {
            return Ok(Some(*row));
        }
        let found = connection.prepare_cached(FIND)?.query_row([user.as_str()], read_row).optional()?;
        let found = found.map(|row| match self.journal.get(user) {
            Some(&(current_count, last_refresh)) => Quota { current_count, last_refresh, ..row },
            None => row,
        });
        if let Some(row) = found {
            self.cache(user, row);
        }
        Ok(found)
    }

    /// Replaces cached and journaled counts of a user whose row was just written with new limits.
    fn put_configured(&mut self, connection: &Connection, user: &UserId, row: Quota) -> rusqlite::Result<()> {
        self.changed.push(user.clone());
        self.cache(user, row);
        // Checked before the row is dropped: even if it was the last one, the journal table still has it, and a restart
        // would bring it back.
        let has_unfolded_rows = self.journal.has_unfolded_rows();
        // A count under the old limits must not be folded any more, since it may be above the new ones.
        self.journal.drop_folding(user);
        if has_unfolded_rows {
            self.append(connection, &[(user, row)])?;
        }
        self.journal.fold_if_due(connection, 1)
    }

    /// Removes a deleted user from the cache.
    fn forget(&mut self, user: &UserId) {
        self.cache.remove(user);
    }

    /// Saves changed rows, in place or in the journal, within the current transaction.
    pub(crate) fn save(
        &mut self,
        connection: &Connection,
        changed: &[(&UserId, Quota)],
    ) -> rusqlite::Result<()> {
        for (user, row) in changed {
            self.changed.push((*user).clone());
            match self.cache.get_mut(*user) {
                Some(cached) => *cached = *row,
                None => self.cache(user, *row),
            }
        }
        if changed.len() > IN_PLACE_MAX || self.journal.has_unfolded_rows() {
            self.append(connection, changed)?;
        } else {
            let mut save = connection.prepare_cached(SAVE)?;
            for (user, row) in changed {
                save.execute(params![user.as_str(), row.current_count, row.last_refresh.as_micros()])?;
            }
        }
        self.journal.fold_if_due(connection, changed.len())
    }

    pub(crate) fn fold(&mut self, connection: &Connection, max: usize) -> rusqlite::Result<()> {
        self.journal.fold(connection, max)
    }

    pub(crate) fn has_unfolded_rows(&self) -> bool {
        self.journal.has_unfolded_rows()
    }

    fn cache(&mut self, user: &UserId, row: Quota) {
        if self.cache.len() >= CACHED_ROWS_MAX && !self.cache.contains_key(user) {
            self.cache.clear();
        }
        self.cache.insert(user.clone(), row);
    }

    fn append(&mut self, connection: &Connection, changed: &[(&UserId, Quota)]) -> rusqlite::Result<()> {
        let mut entries = Vec::with_capacity(changed.len() * 32);
        for (user, row) in changed {
            self.journal.add_row((*user).clone(), (row.current_count, row.last_refresh), &mut entries);
        }
        self.journal.append(connection, &entries)
    }
}

fn read_row(row: &Row<'_>) -> rusqlite::Result<Quota> {
    let limits = QuotaLimits::new(row.get(0)?, row.get(1)?).map_err(fault)?;
    let last_refresh = Timestamp::from_micros(row.get(3)?);
    Ok(Quota { current_count: row.get(2)?, ..Quota::new(limits, last_refresh) })
}

#[cfg(test)]
mod tests;
