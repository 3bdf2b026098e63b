//! The rows of subscriptions.

use rusqlite::{Connection, OptionalExtension, Row, params};
use weir_core::tier::Anchor;
use weir_core::{Timestamp, UserId};
use weir_store::tier::{Subscription, SubscriptionTerms};

use crate::error::fault;

const FIND: &str = "
    SELECT user_id, plan, updated_at, expires_at, anchor FROM tier_subscription
    WHERE user_id = ?1 AND (expires_at IS NULL OR expires_at > ?2)";
const LIST: &str = "
    SELECT user_id, plan, updated_at, expires_at, anchor FROM tier_subscription
    WHERE user_id > ?1 AND (expires_at IS NULL OR expires_at > ?2) ORDER BY user_id LIMIT ?3";
const SUBSCRIBE: &str = "
    INSERT OR REPLACE INTO tier_subscription (user_id, plan, updated_at, expires_at, anchor)
    VALUES (?1, ?2, ?3, ?4, ?5)";
const UNSUBSCRIBE: &str = "
    DELETE FROM tier_subscription WHERE user_id = ?1 RETURNING expires_at IS NOT NULL AND expires_at <= ?2";
const DELETE_EXPIRED: &str = "
    DELETE FROM tier_subscription WHERE user_id IN (
        SELECT user_id FROM tier_subscription WHERE expires_at IS NOT NULL AND expires_at <= ?1
        ORDER BY expires_at LIMIT ?2)";

pub(super) fn find(
    connection: &Connection,
    user: &UserId,
    now: Timestamp,
) -> rusqlite::Result<Option<Subscription>> {
    let values = params![user.as_str(), now.as_micros()];
    connection.prepare_cached(FIND)?.query_row(values, |row| read(row, now)).optional()
}

pub(super) fn list(
    connection: &Connection,
    after: Option<&UserId>,
    limit: usize,
    now: Timestamp,
) -> rusqlite::Result<Vec<Subscription>> {
    // No user has an empty name, so all are after it.
    let values = params![after.map_or("", UserId::as_str), now.as_micros(), limit];
    connection.prepare_cached(LIST)?.query_map(values, |row| read(row, now))?.collect()
}

pub(super) fn put(connection: &Connection, subscription: &Subscription) -> rusqlite::Result<()> {
    let SubscriptionTerms { plan, expires_at, anchor } = &subscription.terms;
    let values = params![
        subscription.user.as_str(),
        plan.as_str(),
        subscription.updated_at.as_micros(),
        expires_at.map(Timestamp::as_micros),
        anchor.as_ref().map(Anchor::to_string)
    ];
    connection.prepare_cached(SUBSCRIBE)?.execute(values).map(drop)
}

/// Returns `false` if there is no subscription or it had expired.
pub(super) fn delete(connection: &Connection, user: &UserId, now: Timestamp) -> rusqlite::Result<bool> {
    let values = params![user.as_str(), now.as_micros()];
    let had_expired: Option<bool> =
        connection.prepare_cached(UNSUBSCRIBE)?.query_row(values, |row| row.get(0)).optional()?;
    Ok(had_expired == Some(false))
}

pub(super) fn purge(connection: &Connection, limit: usize, now: Timestamp) -> rusqlite::Result<usize> {
    connection.prepare_cached(DELETE_EXPIRED)?.execute(params![now.as_micros(), limit])
}

fn read(row: &Row<'_>, now: Timestamp) -> rusqlite::Result<Subscription> {
    let expires_at: Option<i64> = row.get(3)?;
    let anchor: Option<String> = row.get(4)?;
    let terms = SubscriptionTerms {
        plan: row.get_ref(1)?.as_str()?.parse().map_err(fault)?,
        expires_at: expires_at.map(Timestamp::from_micros),
        anchor: anchor.map(|text| text.parse()).transpose().map_err(fault)?,
    };
    let user = UserId::parse(row.get_ref(0)?.as_str()?).map_err(fault)?;
    Ok(Subscription::new(user, terms, Timestamp::from_micros(row.get(2)?), now))
}
