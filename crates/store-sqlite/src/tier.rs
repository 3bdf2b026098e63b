//! Tier in SQLite: plans, tiers, policies, holds, and what keys have spent, which the limiter in memory saves and loads. No
//! other process changes them.

mod hold;
mod permit;
mod policy;
mod spent;
mod subscription;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rusqlite::{Connection, OptionalExtension, Row, params};
use weir_core::tier::{Tier, TierLimits};
use weir_core::{HoldId, PermitId, PolicyName, Timestamp, UserId};
use weir_store::Result;
use weir_store::tier::{
    ConcurrencyPolicy, ConcurrencySpec, DefinitionChanges, HoldAudit, NewHold, Origin, PermitsOutcome,
    Policy, PolicySpec, ReleasedPermit, SettledHold, SpentRow, Subscription, SubscriptionTerms, TakePermits,
    TierStore,
};

pub(crate) use self::spent::SpentJournal;
use crate::Sqlite;
use crate::error::fault;
use crate::writer::{BatchInTurns, Scheduling};

const TIERS: &str = "SELECT tier, requests_per_minute, burst_capacity, daily_limit FROM tier_setting";
const SET_TIER: &str = "
    INSERT OR REPLACE INTO tier_setting (tier, requests_per_minute, burst_capacity, daily_limit)
    VALUES (?1, ?2, ?3, ?4)";
const RESET_TIER: &str = "DELETE FROM tier_setting WHERE tier = ?1";
const LIMITS_ENABLED: &str = "SELECT is_enabled FROM tier_switch WHERE id = 1";
const SWITCH_LIMITS: &str = "INSERT OR REPLACE INTO tier_switch (id, is_enabled) VALUES (1, ?1)";
/// Rows of [`TierStore::save_spent`] saved between two checks of the turn.
const SAVE_CHUNK: usize = 2_048;

#[async_trait]
impl TierStore for Sqlite {
    fn is_shared(&self) -> bool {
        false
    }

    async fn subscription(&self, user: &UserId) -> Result<Option<Subscription>> {
        let (user, now) = (user.clone(), self.inner.clock.now());
        self.read(move |connection| subscription::find(connection, &user, now)).await
    }

    async fn subscriptions(&self, after: Option<&UserId>, limit: usize) -> Result<Vec<Subscription>> {
        let (after, now) = (after.cloned(), self.inner.clock.now());
        self.read(move |connection| subscription::list(connection, after.as_ref(), limit, now)).await
    }

    async fn put_subscription(&self, user: &UserId, terms: SubscriptionTerms) -> Result<Subscription> {
        let now = self.inner.clock.now();
        let subscription = Subscription::new(user.clone(), terms, now, now);
        let put = move |connection: &Connection| {
            subscription::put(connection, &subscription)?;
            Ok(subscription)
        };
        self.inner.writer.run(put).await
    }

    async fn delete_subscription(&self, user: &UserId) -> Result<bool> {
        let (user, now) = (user.clone(), self.inner.clock.now());
        self.inner.writer.run(move |connection| subscription::delete(connection, &user, now)).await
    }

    async fn purge_subscriptions(&self, limit: usize) -> Result<u64> {
        let now = self.inner.clock.now();
        let purge = self.inner.writer.run(move |connection| subscription::purge(connection, limit, now));
        purge.await.map(|purged| purged as u64)
    }

    async fn limits_enabled(&self) -> Result<Option<bool>> {
        self.read(|connection| {
            connection.prepare_cached(LIMITS_ENABLED)?.query_row([], |row| row.get(0)).optional()
        })
        .await
    }

    async fn put_limits_enabled(&self, is_enabled: bool) -> Result<()> {
        let put = move |connection: &Connection| {
            connection.prepare_cached(SWITCH_LIMITS)?.execute([is_enabled]).map(drop)
        };
        self.inner.writer.run(put).await
    }

    async fn tiers(&self) -> Result<Vec<(Tier, TierLimits)>> {
        self.read(|connection| connection.prepare_cached(TIERS)?.query_map([], read_tier)?.collect()).await
    }

    async fn put_tier(&self, tier: Tier, limits: TierLimits) -> Result<()> {
        let put = move |connection: &Connection| {
            let (rpm, burst, daily) =
                (limits.requests_per_minute(), limits.burst_capacity(), limits.daily_limit());
            connection.prepare_cached(SET_TIER)?.execute(params![tier.as_str(), rpm, burst, daily])?;
            Ok(())
        };
        self.inner.writer.run(put).await
    }

    async fn delete_tier(&self, tier: Tier) -> Result<()> {
        let delete = move |connection: &Connection| {
            connection.prepare_cached(RESET_TIER)?.execute([tier.as_str()]).map(drop)
        };
        self.inner.writer.run(delete).await
    }

    async fn policies(&self) -> Result<Vec<Policy>> {
        self.read(policy::all).await
    }

    async fn put_policy(
        &self,
        name: &PolicyName,
        spec: &PolicySpec,
        origin: Origin,
    ) -> Result<Option<Policy>> {
        let (name, spec) = (name.clone(), spec.clone());
        self.inner.writer.run(move |connection| policy::put(connection, &name, &spec, origin)).await
    }

    async fn delete_policy(&self, name: &PolicyName) -> Result<bool> {
        let of_concurrency = name.clone();
        if self.inner.writer.run(move |connection| permit::delete(connection, &of_concurrency)).await? {
            return Ok(true);
        }
        let mut job = policy::DeleteJob::new(name.clone());
        let delete =
            self.inner.writer.run_in_turns(Scheduling::Interleaved, move |connection, state, turn| {
                job.run_turn(connection, &mut state.spent, turn)
            });
        delete.await
    }

    async fn concurrency_policies(&self) -> Result<Vec<ConcurrencyPolicy>> {
        self.read(permit::all).await
    }

    async fn put_concurrency(
        &self,
        name: &PolicyName,
        spec: &ConcurrencySpec,
        origin: Origin,
    ) -> Result<Option<ConcurrencyPolicy>> {
        let (name, spec) = (name.clone(), *spec);
        self.inner.writer.run(move |connection| permit::put(connection, &name, &spec, origin)).await
    }

    async fn take_permits(&self, batch: Vec<TakePermits>) -> Result<Vec<PermitsOutcome>> {
        // The clock is read when the job runs: what an earlier job has taken has not ended earlier.
        let clock = Arc::clone(&self.inner.clock);
        self.inner.writer.run(move |connection| permit::take(connection, &batch, clock.now())).await
    }

    async fn release_permit(&self, id: PermitId) -> Result<Option<ReleasedPermit>> {
        let clock = Arc::clone(&self.inner.clock);
        self.inner.writer.run(move |connection| permit::release(connection, id, clock.now())).await
    }

    async fn void_permits(&self, ids: Vec<PermitId>) -> Result<()> {
        self.inner.writer.run(move |connection| permit::void(connection, &ids)).await
    }

    async fn reset_permits(&self, scope: u32, key: &str) -> Result<()> {
        let key = key.to_owned();
        self.inner.writer.run(move |connection| permit::reset(connection, scope, &key)).await
    }

    async fn purge_permits(&self, keep: Duration, limit: usize) -> Result<u64> {
        let before = self.inner.clock.now().minus(keep);
        let purge = self.inner.writer.run(move |connection| permit::purge(connection, before, limit));
        purge.await.map(|purged| purged as u64)
    }

    async fn put_hold(&self, hold: NewHold) -> Result<Timestamp> {
        let expires_at = self.inner.clock.now().plus(hold.ttl);
        self.inner.writer.run(move |connection| hold::put(connection, &hold, expires_at)).await?;
        Ok(expires_at)
    }

    async fn settle_hold(&self, id: HoldId, cost: u32) -> Result<Option<SettledHold>> {
        // The clock is read when the job runs: if one settlement of a hold is too late, so is every one after it.
        let clock = Arc::clone(&self.inner.clock);
        self.inner.writer.run(move |connection| hold::settle(connection, id, cost, clock.now())).await
    }

    async fn purge_holds(&self, keep: Duration, limit: usize) -> Result<u64> {
        let now = self.inner.clock.now();
        let keep = i64::try_from(keep.as_micros()).unwrap_or(i64::MAX);
        let before = Timestamp::from_micros(now.as_micros().saturating_sub(keep));
        let (mut remaining, mut purged) = (limit, 0);
        let purge = self.inner.writer.run_in_turns(Scheduling::Interleaved, move |connection, _, turn| {
            while remaining > 0 && turn.has_time() {
                let chunk = remaining.min(hold::PURGE_CHUNK);
                let deleted = hold::purge(connection, before, chunk)?;
                purged += deleted as u64;
                remaining = if deleted < chunk { 0 } else { remaining - deleted };
            }
            Ok(if remaining == 0 { ControlFlow::Break(purged) } else { ControlFlow::Continue(()) })
        });
        purge.await
    }

    async fn audit_holds(&self) -> Result<HoldAudit> {
        let now = self.inner.clock.now();
        self.read(move |connection| hold::audit(connection, now)).await
    }

    async fn save_spent(&self, rows: Vec<SpentRow>) -> Result<()> {
        let mut batch = BatchInTurns::<_, ()>::new(rows);
        let save = self.inner.writer.run_in_turns(Scheduling::Interleaved, move |connection, state, turn| {
            loop {
                let rows = batch.next_chunk(SAVE_CHUNK, turn);
                if rows.is_empty() {
                    return Ok(batch.finish());
                }
                state.spent.save(connection, rows)?;
            }
        });
        save.await.map(drop)
    }

    async fn load_spent(&self, after: Option<(u32, String)>, limit: usize) -> Result<Vec<SpentRow>> {
        let mut fold_target = None;
        let fold = self.inner.writer.run_in_turns(Scheduling::Interleaved, move |connection, state, turn| {
            state.spent.fold_for_one_turn(connection, &mut fold_target, turn)
        });
        fold.await?;
        self.read(move |connection| spent::load(connection, after, limit)).await
    }

    async fn changes_since(&self, _since: Option<i64>) -> Result<DefinitionChanges> {
        Ok(DefinitionChanges { version: 0, changed: Some(Vec::new()) })
    }
}

fn read_tier(row: &Row<'_>) -> rusqlite::Result<(Tier, TierLimits)> {
    let tier = row.get_ref(0)?.as_str()?.parse().map_err(fault)?;
    let limits = TierLimits::new(row.get(1)?, row.get(2)?, row.get(3)?).map_err(fault)?;
    Ok((tier, limits))
}
