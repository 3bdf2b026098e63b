//! Tier in Postgres: definitions, holds, and what in-memory limits have spent.
//!
//! Every change has a version. It holds the row of the version until its commit, so versions are committed in order, and a server
//! that has read one has read all before it.

mod hold;
mod permit;
mod policy;
mod subscription;

use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use tokio_postgres::Row;
use weir_core::tier::{Tier, TierLimits};
use weir_core::{HoldId, PermitId, PolicyName, Timestamp, UserId};
use weir_store::Result;
use weir_store::tier::{
    ChangedDefinition, ConcurrencyPolicy, ConcurrencySpec, DefinitionChanges, HoldAudit, NewHold, Origin,
    PermitsOutcome, Policy, PolicySpec, ReleasedPermit, SettledHold, SpentRecord, SpentRow, Subscription,
    SubscriptionTerms, TakePermits, TierStore,
};

use crate::row::{self, column, int, unreadable, unsigned};
use crate::{Postgres, time};

/// How many changes are stored. A server that has missed more reads all definitions again.
const CHANGES_STORED: i64 = 10_000;
/// The most changes that one call returns.
const CHANGES_PAGE: i64 = 1_000;

const TIERS: &str = "SELECT tier, requests_per_minute, burst_capacity, daily_limit FROM tier_setting";
const SET_TIER: &str = "
    WITH next AS (UPDATE tier_version SET version = version + 1 WHERE id = 1 RETURNING version),
    logged AS (INSERT INTO tier_change (version) SELECT version FROM next)
    INSERT INTO tier_setting (tier, requests_per_minute, burst_capacity, daily_limit) VALUES ($1, $2, $3, $4)
    ON CONFLICT (tier) DO UPDATE SET requests_per_minute = excluded.requests_per_minute,
        burst_capacity = excluded.burst_capacity, daily_limit = excluded.daily_limit";
const RESET_TIER: &str = "
    WITH next AS (UPDATE tier_version SET version = version + 1 WHERE id = 1 RETURNING version),
    logged AS (INSERT INTO tier_change (version) SELECT version FROM next)
    DELETE FROM tier_setting WHERE tier = $1";
const LIMITS_ENABLED: &str = "SELECT is_enabled FROM tier_switch WHERE id = 1";
const SWITCH_LIMITS: &str = "
    WITH next AS (UPDATE tier_version SET version = version + 1 WHERE id = 1 RETURNING version),
    logged AS (INSERT INTO tier_change (version) SELECT version FROM next)
    INSERT INTO tier_switch (id, is_enabled) VALUES (1, $1)
    ON CONFLICT (id) DO UPDATE SET is_enabled = excluded.is_enabled";
/// In the order of keys, so that two servers cannot deadlock.
const SAVE_SPENT: &str = "
    INSERT INTO tier_spent (scope, key, spent, saved_at)
    SELECT scope, key, spent, saved_at
    FROM unnest($1::integer[], $2::text[], $3::text[], $4::timestamptz[]) AS input (scope, key, spent, saved_at)
    ORDER BY scope, key COLLATE \"C\"
    ON CONFLICT (scope, key) DO UPDATE SET spent = excluded.spent, saved_at = excluded.saved_at";
const DELETE_SPENT: &str = "
    DELETE FROM tier_spent WHERE ctid = ANY(ARRAY(
        SELECT row_id FROM unnest($1::integer[], $2::text[]) AS deleted (scope, key)
        CROSS JOIN LATERAL (
            SELECT ctid AS row_id FROM tier_spent WHERE scope = deleted.scope AND key = deleted.key OFFSET 0) AS found))";
const LOAD_SPENT: &str = "
    SELECT scope, key, spent, saved_at FROM tier_spent WHERE (scope, key) > ($1, $2) ORDER BY scope, key LIMIT $3";
const VERSION: &str = "SELECT version FROM tier_version WHERE id = 1";
const CHANGES: &str = "
    SELECT version, user_id FROM tier_change WHERE version > $1 ORDER BY version LIMIT $2";

#[async_trait]
impl TierStore for Postgres {
    fn is_shared(&self) -> bool {
        true
    }

    async fn subscription(&self, user: &UserId) -> Result<Option<Subscription>> {
        subscription::find(self, user).await
    }

    async fn subscriptions(&self, after: Option<&UserId>, limit: usize) -> Result<Vec<Subscription>> {
        subscription::list(self, after, limit).await
    }

    async fn put_subscription(&self, user: &UserId, terms: SubscriptionTerms) -> Result<Subscription> {
        subscription::put(self, user, terms).await
    }

    async fn delete_subscription(&self, user: &UserId) -> Result<bool> {
        subscription::delete(self, user).await
    }

    async fn purge_subscriptions(&self, limit: usize) -> Result<u64> {
        subscription::purge(self, limit).await
    }

    async fn limits_enabled(&self) -> Result<Option<bool>> {
        let row = self.inner.pool.query_opt(LIMITS_ENABLED, &[]).await?;
        row.map(|row| column(&row, 0)).transpose()
    }

    async fn put_limits_enabled(&self, is_enabled: bool) -> Result<()> {
        self.inner.pool.execute(SWITCH_LIMITS, &[&is_enabled]).await.map(drop)
    }

    async fn tiers(&self) -> Result<Vec<(Tier, TierLimits)>> {
        self.inner.pool.query(TIERS, &[]).await?.iter().map(read_tier).collect()
    }

    async fn put_tier(&self, tier: Tier, limits: TierLimits) -> Result<()> {
        let (rpm, burst, daily) =
            (int(limits.requests_per_minute()), int(limits.burst_capacity()), int(limits.daily_limit()));
        self.inner.pool.execute(SET_TIER, &[&tier.as_str(), &rpm, &burst, &daily]).await.map(drop)
    }

    async fn delete_tier(&self, tier: Tier) -> Result<()> {
        self.inner.pool.execute(RESET_TIER, &[&tier.as_str()]).await.map(drop)
    }

    async fn policies(&self) -> Result<Vec<Policy>> {
        policy::all(self).await
    }

    async fn put_policy(
        &self,
        name: &PolicyName,
        spec: &PolicySpec,
        origin: Origin,
    ) -> Result<Option<Policy>> {
        policy::put(self, name, spec, origin).await
    }

    async fn delete_policy(&self, name: &PolicyName) -> Result<bool> {
        let (limit, concurrency) = (policy::delete(self, name).await?, permit::delete(self, name).await?);
        Ok(limit || concurrency)
    }

    async fn concurrency_policies(&self) -> Result<Vec<ConcurrencyPolicy>> {
        permit::all(self).await
    }

    async fn put_concurrency(
        &self,
        name: &PolicyName,
        spec: &ConcurrencySpec,
        origin: Origin,
    ) -> Result<Option<ConcurrencyPolicy>> {
        permit::put(self, name, spec, origin).await
    }

    async fn take_permits(&self, batch: Vec<TakePermits>) -> Result<Vec<PermitsOutcome>> {
        permit::take(self, &batch).await
    }

    async fn release_permit(&self, id: PermitId) -> Result<Option<ReleasedPermit>> {
        permit::release(self, id).await
    }

    async fn void_permits(&self, ids: Vec<PermitId>) -> Result<()> {
        permit::void(self, &ids).await
    }

    async fn reset_permits(&self, scope: u32, key: &str) -> Result<()> {
        permit::reset(self, scope, key).await
    }

    async fn purge_permits(&self, keep: Duration, limit: usize) -> Result<u64> {
        permit::purge(self, keep, limit).await
    }

    async fn put_hold(&self, hold: NewHold) -> Result<Timestamp> {
        hold::put(self, &hold).await
    }

    async fn settle_hold(&self, id: HoldId, cost: u32) -> Result<Option<SettledHold>> {
        hold::settle(self, id, cost).await
    }

    async fn purge_holds(&self, keep: Duration, limit: usize) -> Result<u64> {
        hold::purge(self, keep, limit).await
    }

    async fn audit_holds(&self) -> Result<HoldAudit> {
        hold::audit(self).await
    }

    async fn save_spent(&self, rows: Vec<SpentRow>) -> Result<()> {
        let (saved, deleted): (Vec<_>, Vec<_>) = rows.iter().partition(|row| row.record.is_some());
        let scopes = |rows: &[&SpentRow]| rows.iter().map(|row| int(row.scope)).collect::<Vec<i32>>();
        let keys = |rows: &[&SpentRow]| rows.iter().map(|row| row.key.clone()).collect::<Vec<String>>();
        if !saved.is_empty() {
            let texts: Vec<String> = saved.iter().filter_map(|row| Some(row.record?.to_text())).collect();
            let times: Vec<Option<SystemTime>> =
                saved.iter().map(|row| row.saved_at.map(time::to_system)).collect();
            self.inner.pool.execute(SAVE_SPENT, &[&scopes(&saved), &keys(&saved), &texts, &times]).await?;
        }
        if !deleted.is_empty() {
            self.inner.pool.execute(DELETE_SPENT, &[&scopes(&deleted), &keys(&deleted)]).await?;
        }
        Ok(())
    }

    async fn load_spent(&self, after: Option<(u32, String)>, limit: usize) -> Result<Vec<SpentRow>> {
        let (scope, key) = after.map_or((-1, String::new()), |(scope, key)| (int(scope), key));
        let rows = self.inner.pool.query(LOAD_SPENT, &[&scope, &key, &row::bigint(limit)]).await?;
        rows.iter().map(read_spent).collect()
    }

    async fn changes_since(&self, since: Option<i64>) -> Result<DefinitionChanges> {
        let Some(since) = since else {
            let row = self.inner.pool.query_opt(VERSION, &[]).await?;
            let version = row.map_or(Ok(0), |row| column(&row, 0))?;
            return Ok(DefinitionChanges { version, changed: None });
        };
        let rows = self.inner.pool.query(CHANGES, &[&since, &CHANGES_PAGE]).await?;
        let versions = rows.iter().map(|row| column(row, 0)).collect::<Result<Vec<i64>>>()?;
        let version = versions.last().copied().unwrap_or(since);
        // The next version is missing: there were more changes than are stored.
        if versions.first().is_some_and(|first| *first > since.saturating_add(1)) {
            return Ok(DefinitionChanges { version, changed: None });
        }
        let changed = rows.iter().map(read_change).collect::<Result<_>>()?;
        Ok(DefinitionChanges { version, changed: Some(changed) })
    }
}

fn read_tier(row: &Row) -> Result<(Tier, TierLimits)> {
    let number = |index| column::<i32>(row, index).map(unsigned);
    let limits = TierLimits::new(number(1)?, number(2)?, number(3)?).map_err(unreadable)?;
    Ok((column::<&str>(row, 0)?.parse().map_err(unreadable)?, limits))
}

fn read_spent(row: &Row) -> Result<SpentRow> {
    let record = SpentRecord::parse(column::<&str>(row, 2)?).map_err(unreadable)?;
    let saved_at: Option<SystemTime> = column(row, 3)?;
    Ok(SpentRow {
        scope: unsigned(column(row, 0)?),
        key: column(row, 1)?,
        record: Some(record),
        saved_at: saved_at.map(time::from_system),
    })
}

fn read_change(row: &Row) -> Result<ChangedDefinition> {
    let user: Option<&str> = column(row, 1)?;
    user.map_or(Ok(ChangedDefinition::Definitions), |user| {
        UserId::parse(user).map(ChangedDefinition::Subscription).map_err(unreadable)
    })
}
