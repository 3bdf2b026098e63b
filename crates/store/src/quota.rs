//! Quota at the store: its commands and outcomes, the trait an engine implements, and the plan for a batch of sends
//! that both SQL engines carry out.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use async_trait::async_trait;
use prometheus_client::metrics::counter::Counter;
use weir_core::quota::{Grant, Quota, QuotaLimits};
use weir_core::{Denial, MessageId, Timestamp, UserId, Verdict};

pub use crate::limit_changes::LimitChangeFeed;

use crate::{Batch, Result};

/// The topic accepted messages are enqueued on.
pub const TOPIC: &str = "sms-outbound";

/// One caller's wish to send.
#[derive(Clone, Debug)]
pub struct SendMessage {
    /// Whose quota it takes.
    pub user: UserId,
    /// What to deliver.
    pub message: Box<str>,
}

/// What became of a [`SendMessage`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SendOutcome {
    /// Counted, and enqueued in the same commit.
    Accepted {
        /// The message's name from here on.
        message_id: MessageId,
        /// The limits it was counted against.
        limits: QuotaLimits,
        /// What is left.
        grant: Grant,
        /// The store's time of the decision.
        at: Timestamp,
    },
    /// Over the limit; nothing was changed.
    Denied {
        /// The limits that are used up.
        limits: QuotaLimits,
        /// Why, and when to come back.
        denial: Denial,
        /// The store's time of the decision.
        at: Timestamp,
    },
    /// Nobody configured this user.
    NotConfigured,
    /// Allowed, but the broker did not confirm the message.
    NotQueued(EnqueueOutcome),
}

/// What a cache in front of a store tells about itself.
#[derive(Clone, Debug, Default)]
pub struct CacheMetrics {
    /// Users whose limits have changed, on any server, and whom the cache has forgotten since.
    pub forgotten: Counter,
}

/// The books of quota, read in one snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QuotaAudit {
    /// Users with a configuration.
    pub users: u64,
    /// Some of the users whose count is above their limit: there must be none.
    pub over_limit: Vec<String>,
}

/// Where quota rows live.
#[async_trait]
pub trait QuotaStore: Send + Sync + 'static {
    /// Creates or replaces a user's limits; the count starts again at 0.
    async fn configure(&self, user: &UserId, limits: QuotaLimits) -> Result<Quota>;
    /// The row as it counts now.
    async fn find(&self, user: &UserId) -> Result<Option<Quota>>;
    /// Removes the row; false when there was none.
    async fn remove(&self, user: &UserId) -> Result<bool>;
    /// Decides a batch in order, one commit for all: outcomes stand in the order of the commands, and each accepted
    /// message is enqueued on [`TOPIC`] in the same commit. The batch grows until the engine takes it.
    async fn send_batch(&self, batch: Batch<SendMessage>) -> Result<Vec<SendOutcome>>;
    /// Reads the books.
    async fn audit(&self) -> Result<QuotaAudit>;
    /// Brings everything to where it is kept, before the server stops.
    async fn close(&self) {}
}

/// A store that another one stands in front of. The one in front takes places of a window here before it hands them
/// out, so the count here is never below what was allowed, whatever becomes of the one in front.
#[async_trait]
pub trait ReservableStore: QuotaStore {
    /// Takes places for each of the wants, in one commit; nothing for users without a row.
    async fn reserve(&self, wants: Vec<ReservationRequest>) -> Result<Vec<Option<Reservation>>>;
    /// Gives back what was taken and not used.
    async fn return_unused(&self, unused: Vec<UnusedReservation>) -> Result<()>;
    /// Enqueues messages that were allowed and counted elsewhere, and says of each whether it is on its way.
    async fn enqueue(&self, accepted: &[AcceptedMessage<'_>]) -> Result<Vec<EnqueueOutcome>>;
    /// Says that the store in front may hold what is no longer true, so that no server goes on with it.
    async fn raise_cache_epoch(&self) -> Result<()>;
    /// Takes note that the store in front has nothing left of these users' old limits. Until then every server that
    /// starts, or has missed something, is told of them again.
    async fn confirm_invalidated(&self, users: &[UserId]) -> Result<()>;
    /// What this server knows of changes on others.
    fn limit_changes(&self) -> Arc<LimitChangeFeed>;
}

/// Places wanted at once; the store adds some ahead.
#[derive(Clone, Debug)]
pub struct ReservationRequest {
    /// Whose.
    pub user: UserId,
    /// How many.
    pub units: u32,
}

/// Places taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// The row with these places counted.
    pub row: Quota,
    /// How many they are: fewer than wanted when the window has no more.
    pub units: u32,
    /// The store's time.
    pub at: Timestamp,
}

/// Places that were taken in a window and not used.
#[derive(Clone, Debug)]
pub struct UnusedReservation {
    /// Whose.
    pub user: UserId,
    /// When the window began.
    pub window: Timestamp,
    /// How many.
    pub units: u32,
}

/// Whether a message is on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EnqueueOutcome {
    Enqueued,
    Failed,
    /// Nobody can say: the broker was asked and did not answer in time.
    Unknown,
}

/// The chance in message ids; nothing secret.
#[must_use]
pub fn random_bytes() -> [u8; 10] {
    let mut bytes = [0; 10];
    fastrand::fill(&mut bytes);
    bytes
}

/// What a batch of sends comes to: every outcome, and what an engine has to save in the same commit.
#[derive(Debug)]
pub struct SendPlan<'a> {
    /// One outcome per command, in order.
    pub outcomes: Vec<SendOutcome>,
    /// The rows that changed, each once.
    pub changed: Vec<(&'a UserId, Quota)>,
    /// The accepted commands with their names and times, in order.
    pub accepted: Vec<AcceptedMessage<'a>>,
    /// Whose the commands are, in order.
    users: Vec<&'a UserId>,
}

/// An accepted message, ready to be enqueued.
#[derive(Clone, Copy, Debug)]
pub struct AcceptedMessage<'a> {
    /// Its name.
    pub message_id: MessageId,
    /// Whose it is.
    pub user: &'a UserId,
    /// What to deliver.
    pub message: &'a str,
    /// When it was accepted.
    pub at: Timestamp,
}

/// Decides `batch` in order over the rows the engine has loaded (and locked).
///
/// `rows` holds the users that exist; `random` supplies the chance in message ids.
#[must_use]
pub fn plan_sends<'a>(
    batch: &'a [SendMessage],
    rows: &mut HashMap<&'a str, Quota>,
    now: Timestamp,
    mut random: impl FnMut() -> [u8; 10],
) -> SendPlan<'a> {
    let mut outcomes = Vec::with_capacity(batch.len());
    let mut accepted = Vec::with_capacity(batch.len());
    let mut touched: HashMap<&str, &UserId> = HashMap::new();
    for SendMessage { user, message } in batch {
        let Some(row) = rows.get_mut(user.as_str()) else {
            outcomes.push(SendOutcome::NotConfigured);
            continue;
        };
        let limits = row.limits;
        if row.clamp_window_start(now) {
            touched.insert(user.as_str(), user);
        }
        outcomes.push(match row.send(now) {
            Verdict::Allowed(grant) => {
                let message_id = MessageId::new(now, random());
                touched.insert(user.as_str(), user);
                accepted.push(AcceptedMessage { message_id, user, message, at: now });
                SendOutcome::Accepted { message_id, limits, grant, at: now }
            }
            Verdict::Denied(denial) => SendOutcome::Denied { limits, denial, at: now },
        });
    }
    let changed = touched.into_iter().filter_map(|(key, user)| Some((user, *rows.get(key)?))).collect();
    SendPlan { outcomes, changed, accepted, users: batch.iter().map(|send| &send.user).collect() }
}

impl SendPlan<'_> {
    /// What the plan comes to when the broker took only some of its messages: those that are not confirmed do not
    /// count, and whoever was refused for their sake may try again. `before` holds the rows as they were loaded.
    #[must_use]
    pub fn retain_confirmed(self, before: &mut HashMap<&str, Quota>, queued: &[EnqueueOutcome]) -> Self {
        let missing: HashSet<&str> = self
            .accepted
            .iter()
            .zip(queued)
            .filter(|(_, queued)| **queued != EnqueueOutcome::Enqueued)
            .map(|(accepted, _)| accepted.user.as_str())
            .collect();
        if missing.is_empty() {
            return self;
        }
        let Self { outcomes, mut changed, accepted, users } = self;
        let mut fates = accepted.iter().zip(queued);
        let recount = |(outcome, user): (SendOutcome, &UserId)| match outcome {
            SendOutcome::Accepted { message_id, limits, grant, at } => match fates.next() {
                Some((_, EnqueueOutcome::Enqueued)) => {
                    let grant = before.get_mut(user.as_str()).map_or(grant, |row| match row.send(at) {
                        Verdict::Allowed(grant) => grant,
                        Verdict::Denied(_) => grant,
                    });
                    SendOutcome::Accepted { message_id, limits, grant, at }
                }
                Some((_, not)) => SendOutcome::NotQueued(*not),
                None => SendOutcome::NotQueued(EnqueueOutcome::Failed),
            },
            SendOutcome::Denied { .. } if missing.contains(user.as_str()) => {
                SendOutcome::NotQueued(EnqueueOutcome::Failed)
            }
            other => other,
        };
        let outcomes = outcomes.into_iter().zip(users.iter().copied()).map(recount).collect();
        for (user, row) in &mut changed {
            if let Some(recounted) = before.get_mut(user.as_str()) {
                if recounted.last_refresh > row.last_refresh {
                    recounted.clamp_window_start(row.last_refresh);
                }
                *row = *recounted;
            }
        }
        let accepted =
            accepted.into_iter().zip(queued).filter(|(_, queued)| **queued == EnqueueOutcome::Enqueued);
        Self { outcomes, changed, accepted: accepted.map(|(accepted, _)| accepted).collect(), users }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn send(user: &str) -> SendMessage {
        SendMessage { user: UserId::parse(user).unwrap(), message: "hello".into() }
    }

    #[test]
    fn a_batch_is_decided_in_order_and_each_changed_row_saved_once() {
        let now = Timestamp::from_seconds(60);
        let row = Quota::new(QuotaLimits::new(2, 1).unwrap(), now);
        let mut rows = HashMap::from([("a", row), ("b", row)]);
        let batch = [send("a"), send("nobody"), send("a"), send("a")];
        let plan = plan_sends(&batch, &mut rows, now, || [7; 10]);
        assert!(matches!(
            plan.outcomes[..],
            [
                SendOutcome::Accepted { grant: Grant { remaining: 1, .. }, .. },
                SendOutcome::NotConfigured,
                SendOutcome::Accepted { grant: Grant { remaining: 0, .. }, .. },
                SendOutcome::Denied { .. },
            ]
        ));
        assert_eq!(plan.accepted.len(), 2);
        let changed: Vec<_> =
            plan.changed.iter().map(|(user, row)| (user.as_str(), row.current_count)).collect();
        assert_eq!(changed, [("a", 2)]);
    }

    #[test]
    fn a_window_ahead_of_the_clock_is_saved_where_it_was_brought_back_to_even_by_a_denial() {
        let now = Timestamp::from_seconds(60);
        let limits = QuotaLimits::new(1, 1).unwrap();
        let ahead = Quota { limits, current_count: 1, last_refresh: Timestamp::from_seconds(7_200) };
        let mut rows = HashMap::from([("a", ahead)]);
        let batch = [send("a")];
        let plan = plan_sends(&batch, &mut rows, now, || [7; 10]);
        assert!(matches!(plan.outcomes[..], [SendOutcome::Denied { .. }]));
        assert_eq!(plan.changed[0].1, Quota { limits, current_count: 1, last_refresh: now });
    }

    #[test]
    fn what_the_broker_did_not_take_does_not_count() {
        let now = Timestamp::from_seconds(60);
        let row = Quota::new(QuotaLimits::new(2, 1).unwrap(), now);
        let mut rows = HashMap::from([("a", row), ("b", row)]);
        let mut before = rows.clone();
        let batch = [send("a"), send("a"), send("a"), send("b"), send("b")];
        let plan = plan_sends(&batch, &mut rows, now, || [7; 10]);
        let fates = [
            EnqueueOutcome::Failed,
            EnqueueOutcome::Enqueued,
            EnqueueOutcome::Unknown,
            EnqueueOutcome::Enqueued,
        ];
        let plan = plan.retain_confirmed(&mut before, &fates);
        assert!(matches!(
            plan.outcomes[..],
            [
                SendOutcome::NotQueued(EnqueueOutcome::Failed),
                SendOutcome::Accepted { grant: Grant { remaining: 1, .. }, .. },
                // Refused for the sake of one that does not count.
                SendOutcome::NotQueued(EnqueueOutcome::Failed),
                SendOutcome::NotQueued(EnqueueOutcome::Unknown),
                SendOutcome::Accepted { grant: Grant { remaining: 1, .. }, .. },
            ]
        ));
        let mut changed: Vec<_> =
            plan.changed.iter().map(|(user, row)| (user.as_str(), row.current_count)).collect();
        changed.sort_unstable();
        assert_eq!(changed, [("a", 1), ("b", 1)]);
        assert_eq!(plan.accepted.len(), 2);
    }

    #[test]
    fn a_window_ahead_of_the_clock_is_brought_back_also_where_the_broker_took_nothing() {
        let now = Timestamp::from_seconds(60);
        let limits = QuotaLimits::new(2, 1).unwrap();
        let ahead = Quota { limits, current_count: 1, last_refresh: Timestamp::from_seconds(7_200) };
        let mut rows = HashMap::from([("a", ahead), ("b", Quota { current_count: 2, ..ahead })]);
        let mut before = rows.clone();
        let batch = [send("a"), send("b")];
        let plan = plan_sends(&batch, &mut rows, now, || [7; 10])
            .retain_confirmed(&mut before, &[EnqueueOutcome::Failed]);
        let mut changed = plan.changed.clone();
        changed.sort_unstable_by_key(|(user, _)| user.as_str());
        let brought_back = |current_count| Quota { limits, current_count, last_refresh: now };
        assert_eq!(
            changed.iter().map(|(_, row)| *row).collect::<Vec<_>>(),
            [brought_back(1), brought_back(2)]
        );
    }

    #[test]
    fn a_window_that_nothing_was_counted_in_does_not_begin() {
        let before = Quota::new(QuotaLimits::new(2, 1).unwrap(), Timestamp::EPOCH);
        let now = Timestamp::from_seconds(60);
        let mut rows = HashMap::from([("a", before)]);
        let mut loaded = rows.clone();
        let batch = [send("a")];
        let plan = plan_sends(&batch, &mut rows, now, || [7; 10])
            .retain_confirmed(&mut loaded, &[EnqueueOutcome::Failed]);
        assert_eq!(plan.changed[0].1, before);
    }
}
