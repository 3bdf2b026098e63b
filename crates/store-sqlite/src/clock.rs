//! Repairs waiting times after the clock of this machine was set back.

use async_trait::async_trait;
use rusqlite::{Connection, params};
use weir_core::Timestamp;
use weir_store::clock::StepDetector;
use weir_store::{Result, StoreClock};

use crate::Sqlite;

/// Rows that one job of the writer corrects.
const PAGE: usize = 200;

/// Messages that were delayed while the clock was ahead of `?1`. Few messages are ever delayed.
const MESSAGES_AHEAD: &str = "SELECT topic, id FROM queue_message WHERE delayed_at > ?1";
const RESCHEDULE_MESSAGE: &str = "
    UPDATE queue_message SET delayed_until = max(delayed_until - (delayed_at - ?3), ?3), delayed_at = ?3
    WHERE topic = ?1 AND id = ?2 AND delayed_at > ?3";
/// Requests that were accepted, leased or deferred while the clock was ahead of `?1`.
const REQUESTS_AHEAD: &str = "SELECT id FROM request_record WHERE claimable_at > ?1 AND updated_at > ?1";
const RESCHEDULE_REQUEST: &str = "
    UPDATE request_record SET claimable_at = max(claimable_at - (updated_at - ?2), ?2), updated_at = ?2
    WHERE id = ?1 AND claimable_at > ?2 AND updated_at > ?2";

#[async_trait]
impl StoreClock for Sqlite {
    async fn time(&self) -> Result<Timestamp> {
        Ok(self.inner.clock.now())
    }

    /// Finds the rows with a read connection and corrects a page of them per job. A row that is changed meanwhile has got
    /// the present time, so the update skips it.
    async fn reschedule_deferred(&self) -> Result<u64> {
        let now = self.inner.clock.now().as_micros();
        let messages: Vec<(String, i64)> = self
            .read(move |connection| {
                let mut ahead = connection.prepare(MESSAGES_AHEAD)?;
                ahead.query_map([now], |row| Ok((row.get(0)?, row.get(1)?)))?.collect()
            })
            .await?;
        let requests: Vec<i64> = self
            .read(move |connection| {
                let mut ahead = connection.prepare(REQUESTS_AHEAD)?;
                ahead.query_map([now], |row| row.get(0))?.collect()
            })
            .await?;
        let mut count = 0;
        for page in messages.chunks(PAGE).map(<[_]>::to_vec) {
            let move_back = move |connection: &Connection| {
                let mut statement = connection.prepare_cached(RESCHEDULE_MESSAGE)?;
                page.iter().map(|(topic, id)| statement.execute(params![topic, id, now])).sum()
            };
            count += self.inner.writer.run::<usize>(move_back).await?;
        }
        for page in requests.chunks(PAGE).map(<[_]>::to_vec) {
            let move_back = move |connection: &Connection| {
                let mut statement = connection.prepare_cached(RESCHEDULE_REQUEST)?;
                page.iter().map(|id| statement.execute(params![id, now])).sum()
            };
            count += self.inner.writer.run::<usize>(move_back).await?;
        }
        Ok(count as u64)
    }

    fn steps(&self) -> Option<&StepDetector> {
        None
    }
}
