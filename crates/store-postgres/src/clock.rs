//! The database's clock: reads it, detects steps, and reschedules work after it was set back.

use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::try_join4;
use weir_core::Timestamp;
use weir_store::clock::{StepDetector, uptime};
use weir_store::{Result, StoreClock};

use crate::Postgres;
use crate::row::timestamp;

/// Reads the clock. In a pipeline after a lock it returns the time when the lock was granted.
pub(crate) const CLOCK: &str = "SELECT clock_timestamp()";

/// Rows that one transaction reschedules.
const PAGE: i64 = 500;

/// Keeps the lease holders of the shards from settling messages meanwhile.
const LOCK_SHARDS: &str = "SELECT FROM queue_shard ORDER BY topic, shard FOR UPDATE";
/// Moves messages back that were deferred while the clock was ahead.
const RESCHEDULE_MESSAGES: &str = "
    WITH clock AS MATERIALIZED (SELECT coalesce($1, clock_timestamp()) AS now),
    ahead AS MATERIALIZED (
        SELECT message.ctid AS row_id, clock.now FROM clock CROSS JOIN queue_message AS message
        WHERE message.delayed_until IS NOT NULL AND message.delayed_at > clock.now + interval '1 second' LIMIT $2)
    UPDATE queue_message AS message
    SET delayed_until = greatest(message.delayed_until - (message.delayed_at - ahead.now), ahead.now),
        delayed_at = ahead.now
    FROM ahead WHERE message.ctid = ahead.row_id";
/// Moves requests back that were accepted, leased or deferred while the clock was ahead. Locks jobs in the order of the workers,
/// and records with them, since a concurrent report changes both.
const RESCHEDULE_REQUESTS: &str = "
    WITH clock AS MATERIALIZED (SELECT coalesce($1, clock_timestamp()) AS now),
    ahead AS MATERIALIZED (
        SELECT job.request_id, record.updated_at - clock.now AS span, clock.now
        FROM clock CROSS JOIN request_job AS job JOIN request_record AS record USING (request_id)
        WHERE job.claimable_at > clock.now AND record.updated_at > clock.now + interval '1 second'
        ORDER BY job.request_id LIMIT $2 FOR UPDATE OF job, record),
    rescheduled AS (
        UPDATE request_job AS job SET claimable_at = greatest(job.claimable_at - ahead.span, ahead.now)
        FROM ahead WHERE job.request_id = ANY(ARRAY[ahead.request_id]))
    UPDATE request_record AS record SET updated_at = ahead.now
    FROM ahead WHERE record.request_id = ANY(ARRAY[ahead.request_id])";

#[async_trait]
impl StoreClock for Postgres {
    async fn time(&self) -> Result<Timestamp> {
        let session = self.inner.pool.session().await?;
        let queried_at = uptime();
        let row = session.query_one(CLOCK, &[]).await?;
        let now = self.read_time(&row, queried_at)?;
        session.keep();
        Ok(now)
    }

    async fn reschedule_deferred(&self) -> Result<u64> {
        let mut total = 0;
        for statement in [RESCHEDULE_MESSAGES, RESCHEDULE_REQUESTS] {
            loop {
                let page = self.reschedule_page(statement).await?;
                total += page;
                if page < PAGE.unsigned_abs() {
                    break;
                }
            }
        }
        Ok(total)
    }

    fn steps(&self) -> Option<&StepDetector> {
        Some(&self.inner.clock_steps)
    }
}

impl Postgres {
    async fn reschedule_page(&self, statement: &'static str) -> Result<u64> {
        let session = self.inner.pool.session().await?;
        let [lock_shards, reschedule] = session.prepare([LOCK_SHARDS, statement]).await?;
        let (_, _, count, ()) = session
            .bounded(try_join4(
                session.batch_execute("BEGIN"),
                lock_shards.execute(&[]),
                reschedule.execute(&[&self.clock_override(), &PAGE]),
                session.batch_execute("COMMIT"),
            ))
            .await?;
        session.keep();
        Ok(count)
    }

    /// Reads the time from the row of a statement that was sent after `queried_at`.
    fn read_time(&self, row: &tokio_postgres::Row, queried_at: Duration) -> Result<Timestamp> {
        if let Some(clock) = &self.inner.clock {
            return Ok(clock.now());
        }
        let now = timestamp(row, 0)?;
        self.inner.clock_steps.observe(now, queried_at, uptime());
        Ok(now)
    }

    /// Reads the time from the row of a statement that was sent at most one call timeout ago.
    pub(crate) fn now(&self, row: &tokio_postgres::Row) -> Result<Timestamp> {
        self.read_time(row, uptime().saturating_sub(self.inner.pool.call_timeout()))
    }
}

#[cfg(test)]
mod tests {
    use tokio_postgres::error::SqlState;
    use weir_testkit::postgres::Server;

    use super::*;
    use crate::connection::connect;
    use crate::target::PostgresTarget;

    const WAITING: &str = "
        SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%ahead.now%'";

    #[tokio::test]
    async fn shards_stay_locked_until_their_messages_are_rescheduled() {
        if weir_testkit::skip("postgres") {
            return;
        }
        let database = Server::shared().database("clock").await;
        let target: PostgresTarget = database.url().parse().expect("a Postgres URL");
        let engine = Postgres::open(target.clone(), 1).await.expect("it opens");
        database.execute("INSERT INTO queue_shard (topic, shard) VALUES ('sms', 0)").await;
        database
            .execute(
                "INSERT INTO queue_message (topic, shard, key, payload, delayed_at, delayed_until)
                 VALUES ('sms', 0, 'anna', '', now() + interval '1 hour', now() + interval '2 hours')",
            )
            .await;
        let (holder, _driver) = connect(&target).await.expect("a connection");
        holder.batch_execute("BEGIN; SELECT FROM queue_message FOR UPDATE").await.expect("a lock");
        let reschedule = tokio::spawn(async move { engine.reschedule_deferred().await });
        let (other, _driver) = connect(&target).await.expect("a connection");
        loop {
            let waiting: i64 = other.query_one(WAITING, &[]).await.expect("a count").get(0);
            if waiting > 0 {
                break;
            }
            assert!(!reschedule.is_finished(), "it waits for the lock on the message");
            tokio::task::yield_now().await;
        }
        let locked = other.batch_execute("SELECT FROM queue_shard FOR UPDATE NOWAIT").await;
        let code = locked.expect_err("the shard is locked").code().cloned();
        assert_eq!(code, Some(SqlState::LOCK_NOT_AVAILABLE));
        holder.batch_execute("COMMIT").await.expect("it ends");
        assert_eq!(reschedule.await.expect("no panic").expect("it succeeds"), 1);
    }
}
