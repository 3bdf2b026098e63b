//! The database's clock: what time it is there, whether it has stepped, and what is done when it was set back.

use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::try_join4;
use weir_core::Timestamp;
use weir_store::clock::{StepDetector, uptime};
use weir_store::{Result, StoreClock};

use crate::Postgres;

/// Messages that were put off while the clock was ahead.
const BRING_BACK_MESSAGES: &str = "
    WITH clock AS MATERIALIZED (SELECT coalesce($1, clock_timestamp()) AS now)
    UPDATE queue_message AS message
    SET delayed_until = greatest(message.delayed_until - (message.delayed_at - clock.now), clock.now),
        delayed_at = clock.now
    FROM clock
    WHERE message.delayed_until IS NOT NULL AND message.delayed_at > clock.now + interval '1 second'";
/// Requests that were accepted, leased or put off then. Jobs are locked in the order in which workers lock them.
const BRING_BACK_REQUESTS: &str = "
    WITH clock AS MATERIALIZED (SELECT coalesce($1, clock_timestamp()) AS now),
    ahead AS MATERIALIZED (
        SELECT job.request_id, record.updated_at - clock.now AS span, clock.now
        FROM clock CROSS JOIN request_job AS job JOIN request_record AS record USING (request_id)
        WHERE job.claimable_at > clock.now AND record.updated_at > clock.now + interval '1 second'
        ORDER BY job.request_id FOR UPDATE OF job),
    brought_back AS (
        UPDATE request_job AS job SET claimable_at = greatest(job.claimable_at - ahead.span, ahead.now)
        FROM ahead WHERE job.request_id = ahead.request_id)
    UPDATE request_record AS record SET updated_at = ahead.now FROM ahead WHERE record.request_id = ahead.request_id";

#[async_trait]
impl StoreClock for Postgres {
    async fn time(&self) -> Result<Timestamp> {
        let session = self.inner.pool.session().await?;
        let asked = uptime();
        let row = session.bounded(session.client.query_one(&session.statements.clock, &[])).await?;
        let now = self.read_time(&row, asked)?;
        session.keep();
        Ok(now)
    }

    async fn bring_back_waiting(&self) -> Result<u64> {
        let session = self.inner.pool.session().await?;
        let (client, now) = (&session.client, self.clock_override());
        let (_, messages, requests, ()) = session
            .bounded(try_join4(
                client.batch_execute("BEGIN"),
                client.execute(BRING_BACK_MESSAGES, &[&now]),
                client.execute(BRING_BACK_REQUESTS, &[&now]),
                client.batch_execute("COMMIT"),
            ))
            .await?;
        session.keep();
        Ok(messages.saturating_add(requests))
    }

    fn steps(&self) -> Option<&StepDetector> {
        Some(&self.inner.clock_steps)
    }
}

impl Postgres {
    /// The time, given the row of a statement that asked the database for it after `asked`.
    fn read_time(&self, row: &tokio_postgres::Row, asked: Duration) -> Result<Timestamp> {
        if let Some(clock) = &self.inner.clock {
            return Ok(clock.now());
        }
        let now = crate::time::from_system(crate::quota::column(row, 0)?);
        self.inner.clock_steps.observe(now, asked, uptime());
        Ok(now)
    }

    /// The same where it is not known when it was asked: within the time that a call may take.
    pub(crate) fn now(&self, row: &tokio_postgres::Row) -> Result<Timestamp> {
        self.read_time(row, uptime().saturating_sub(self.inner.pool.call_timeout()))
    }
}
