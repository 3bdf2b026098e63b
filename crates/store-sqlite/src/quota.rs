//! Quota in SQLite.

use std::collections::HashMap;

use async_trait::async_trait;
use rusqlite::{Connection, OptionalExtension, Row, params};
use weir_core::quota::{Limits, Quota};
use weir_core::{Timestamp, UserId};
use weir_queue::sms;
use weir_store::quota::{Books, Plan, QuotaStore, SendMessage, SendOutcome, TOPIC, plan};
use weir_store::{Error, Result};

use crate::{ENGINE, Sqlite, queue, random};

const FIND: &str = "
    SELECT rate_limit, time_window, current_count, last_refresh_time
    FROM rate_limit_store WHERE user_id = ?1";
const CONFIGURE: &str = "
    INSERT INTO rate_limit_store (user_id, rate_limit, time_window, current_count, last_refresh_time)
    VALUES (?1, ?2, ?3, 0, ?4)
    ON CONFLICT (user_id) DO UPDATE SET
        rate_limit = excluded.rate_limit, time_window = excluded.time_window,
        current_count = 0, last_refresh_time = excluded.last_refresh_time";
const SAVE: &str = "
    UPDATE rate_limit_store SET current_count = ?2, last_refresh_time = ?3 WHERE user_id = ?1";
const REMOVE: &str = "DELETE FROM rate_limit_store WHERE user_id = ?1";
const COUNT: &str = "SELECT count(*) FROM rate_limit_store";
const OVER_LIMIT: &str = "SELECT user_id FROM rate_limit_store WHERE current_count > rate_limit LIMIT 10";

#[async_trait]
impl QuotaStore for Sqlite {
    async fn configure(&self, user: &UserId, limits: Limits) -> Result<Quota> {
        let (user, clock) = (user.clone(), self.inner.clock.clone());
        let configure = move |connection: &Connection| {
            let row = Quota::configured(limits, clock.now());
            connection.prepare_cached(CONFIGURE)?.execute(params![
                user.as_str(),
                limits.rate_limit(),
                limits.time_window_minutes(),
                row.last_refresh.as_micros(),
            ])?;
            Ok(row)
        };
        self.inner.writer.run(configure).await
    }

    async fn find(&self, user: &UserId) -> Result<Option<Quota>> {
        let user = user.clone();
        let row = self.read(move |connection| find(connection, user.as_str())).await?;
        Ok(row.map(|row| row.as_of(self.inner.clock.now())))
    }

    async fn remove(&self, user: &UserId) -> Result<bool> {
        let user = user.clone();
        let remove = move |connection: &Connection| {
            connection.prepare_cached(REMOVE)?.execute([user.as_str()]).map(|removed| removed > 0)
        };
        self.inner.writer.run(remove).await
    }

    async fn send_batch(&self, batch: Vec<SendMessage>) -> Result<Vec<SendOutcome>> {
        let clock = self.inner.clock.clone();
        let send = move |connection: &Connection| send_batch(connection, &batch, clock.now());
        let outcomes = self.inner.writer.run(send).await?;
        if outcomes.iter().any(|outcome| matches!(outcome, SendOutcome::Accepted { .. })) {
            self.inner.bells.ring(TOPIC);
        }
        Ok(outcomes)
    }

    async fn audit(&self) -> Result<Books> {
        let audit = |connection: &Connection| {
            let moment = connection.unchecked_transaction()?;
            let users = moment.query_row(COUNT, [], |row| row.get(0))?;
            let mut over_limit = moment.prepare(OVER_LIMIT)?;
            let over_limit = over_limit.query_map([], |row| row.get(0))?.collect::<Result<_, _>>()?;
            Ok(Books { users, over_limit })
        };
        self.read(audit).await
    }
}

fn send_batch(
    connection: &Connection,
    batch: &[SendMessage],
    now: Timestamp,
) -> rusqlite::Result<Vec<SendOutcome>> {
    let mut rows: HashMap<&str, Quota> = HashMap::with_capacity(batch.len());
    let mut find = connection.prepare_cached(FIND)?;
    for SendMessage { user, .. } in batch {
        // Loading again what is loaded already is avoided; a user without a row is asked for again, which is rare.
        if !rows.contains_key(user.as_str())
            && let Some(row) = find.query_row([user.as_str()], read_row).optional()?
        {
            rows.insert(user.as_str(), row);
        }
    }
    let Plan { outcomes, changed, accepted } = plan(batch, &mut rows, now, random);
    let mut save = connection.prepare_cached(SAVE)?;
    for (user, row) in changed {
        save.execute(params![user.as_str(), row.current_count, row.last_refresh.as_micros()])?;
    }
    let messages = accepted.iter().map(|message| (message.user.as_str(), sms::encode(message)));
    queue::enqueue(connection, TOPIC, messages)?;
    Ok(outcomes)
}

fn find(connection: &Connection, user: &str) -> rusqlite::Result<Option<Quota>> {
    connection.prepare_cached(FIND)?.query_row([user], read_row).optional()
}

fn read_row(row: &Row<'_>) -> rusqlite::Result<Quota> {
    let limits = Limits::new(row.get(0)?, row.get(1)?).map_err(|out_of_range| {
        rusqlite::Error::FromSqlConversionFailure(
            0,
            rusqlite::types::Type::Integer,
            Box::new(Error::failed(ENGINE, out_of_range)),
        )
    })?;
    Ok(Quota { limits, current_count: row.get(2)?, last_refresh: Timestamp::from_micros(row.get(3)?) })
}
