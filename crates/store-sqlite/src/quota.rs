//! Quota in SQLite.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use async_trait::async_trait;
use rusqlite::{Connection, params};
use tokio::runtime::Handle;
use weir_core::quota::{Quota, QuotaLimits};
use weir_core::{Timestamp, UserId};
use weir_queue::publish::{Publisher, publish_accepted};
use weir_queue::sms;
use weir_store::quota::{
    QuotaAudit, QuotaStore, SendMessage, SendOutcome, SendPlan, TOPIC, plan_sends, random_bytes,
};
use weir_store::{Batch, Result, StoreHealth};

use crate::quota_journal::QuotaJournal;
use crate::writer::{BatchInTurns, Order};
use crate::{Sqlite, queue};

/// Sends that are decided together, the most between two looks at how long that takes.
const DECIDED_AT_ONCE: usize = 512;

const CONFIGURE: &str = "
    INSERT INTO rate_limit_store (user_id, rate_limit, time_window, current_count, last_refresh_time)
    VALUES (?1, ?2, ?3, 0, ?4)
    ON CONFLICT (user_id) DO UPDATE SET
        rate_limit = excluded.rate_limit, time_window = excluded.time_window,
        current_count = 0, last_refresh_time = excluded.last_refresh_time";
const REMOVE: &str = "DELETE FROM rate_limit_store WHERE user_id = ?1";
const COUNT: &str = "SELECT count(*) FROM rate_limit_store";
const OVER_LIMIT: &str = "SELECT user_id FROM rate_limit_store WHERE current_count > rate_limit LIMIT 10";

#[async_trait]
impl QuotaStore for Sqlite {
    async fn configure(&self, user: &UserId, limits: QuotaLimits) -> Result<Quota> {
        let (user, clock) = (user.clone(), self.inner.clock.clone());
        let configure = move |connection: &Connection, counts: &mut QuotaJournal| {
            counts.refresh(connection)?;
            let row = Quota::new(limits, clock.now());
            connection.prepare_cached(CONFIGURE)?.execute(params![
                user.as_str(),
                limits.rate_limit(),
                limits.time_window_minutes(),
                row.last_refresh.as_micros(),
            ])?;
            counts.replace(connection, &user, row)?;
            Ok(row)
        };
        self.inner.writer.count(configure).await
    }

    async fn find(&self, user: &UserId) -> Result<Option<Quota>> {
        let user = user.clone();
        // The writer knows counts that are not in the table yet; like any of its answers, this one comes when what it
        // tells of is on disk.
        let find = move |connection: &Connection, counts: &mut QuotaJournal| {
            counts.refresh(connection)?;
            counts.find(connection, &user)
        };
        let row = self.inner.writer.count(find).await?;
        Ok(row.map(|row| row.as_of(self.inner.clock.now())))
    }

    async fn remove(&self, user: &UserId) -> Result<bool> {
        let user = user.clone();
        let remove = move |connection: &Connection, counts: &mut QuotaJournal| {
            counts.remove(&user);
            connection.prepare_cached(REMOVE)?.execute([user.as_str()]).map(|removed| removed > 0)
        };
        self.inner.writer.count(remove).await
    }

    async fn send_batch(&self, batch: Batch<SendMessage>) -> Result<Vec<SendOutcome>> {
        let clock = self.inner.clock.clone();
        if self.publisher.is_some() && self.inner.is_uncommitted.load(Ordering::Relaxed) {
            // A disk that takes no writes must not let messages through uncounted.
            self.ping().await?;
        }
        let broker = self.publisher.clone().map(|publisher| (publisher, Handle::current()));
        let mut batch = BatchInTurns::new(batch);
        let send = self.inner.writer.in_turns(Order::Arrival, move |connection, unflushed, turn| {
            loop {
                let commands = batch.next_chunk(DECIDED_AT_ONCE, turn);
                if commands.is_empty() {
                    return Ok(batch.finish());
                }
                let broker = broker.as_ref();
                let outcomes = send_batch(connection, &mut unflushed.counts, &commands, clock.now(), broker)?;
                batch.outcomes.extend(outcomes);
            }
        });
        let outcomes = send.await;
        self.inner.is_uncommitted.store(self.publisher.is_some() && outcomes.is_err(), Ordering::Relaxed);
        let is_accepted = |outcome: &SendOutcome| matches!(outcome, SendOutcome::Accepted { .. });
        // Of a batch that failed, the turns before may have left messages.
        if outcomes.as_ref().map_or(true, |outcomes| outcomes.iter().any(is_accepted)) {
            self.inner.topic_notify.notify(TOPIC);
        }
        outcomes
    }

    async fn audit(&self) -> Result<QuotaAudit> {
        let mut target = None;
        let fold = self.inner.writer.in_turns(Order::Any, move |connection, unflushed, turn| {
            unflushed.counts.refresh(connection)?;
            unflushed.counts.fold_for_a_turn(connection, &mut target, turn)
        });
        fold.await?;
        let audit = |connection: &Connection| {
            let moment = connection.unchecked_transaction()?;
            let connection = &*moment;
            let users = connection.query_row(COUNT, [], |row| row.get(0))?;
            let mut over_limit = connection.prepare(OVER_LIMIT)?;
            let over_limit = over_limit.query_map([], |row| row.get(0))?.collect::<Result<_, _>>()?;
            Ok(QuotaAudit { users, over_limit })
        };
        self.read(audit).await
    }
}

fn send_batch(
    connection: &Connection,
    counts: &mut QuotaJournal,
    batch: &[SendMessage],
    now: Timestamp,
    broker: Option<&(Arc<dyn Publisher>, Handle)>,
) -> rusqlite::Result<Vec<SendOutcome>> {
    counts.refresh(connection)?;
    let mut rows: HashMap<&str, Quota> = HashMap::with_capacity(batch.len());
    for SendMessage { user, .. } in batch {
        // Loading again what is loaded already is avoided; a user without a row is asked for again, which is rare.
        if !rows.contains_key(user.as_str())
            && let Some(row) = counts.find(connection, user)?
        {
            rows.insert(user.as_str(), row);
        }
    }
    let before = broker.is_some().then(|| rows.clone());
    let mut plan = plan_sends(batch, &mut rows, now, random_bytes);
    if let (Some((publisher, runtime)), Some(mut before)) = (broker, before) {
        if !plan.accepted.is_empty() {
            let queued = runtime.block_on(publish_accepted(&**publisher, &plan.accepted));
            plan = plan.retain_confirmed(&mut before, &queued);
        }
        counts.save(connection, &plan.changed)?;
        return Ok(plan.outcomes);
    }
    let SendPlan { outcomes, changed, accepted, .. } = plan;
    counts.save(connection, &changed)?;
    let messages = accepted.iter().map(|message| (message.user.as_str(), sms::encode(message)));
    queue::enqueue(connection, TOPIC, messages)?;
    Ok(outcomes)
}
