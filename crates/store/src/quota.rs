//! Quota at the store: its commands and outcomes, the traits engines implement, and the plan for a batch of sends, which
//! both SQL engines execute.

pub mod send_keys;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use async_trait::async_trait;
use prometheus_client::metrics::counter::Counter;
use weir_core::quota::{Grant, Quota, QuotaLimits};
use weir_core::{Denial, MessageId, Timestamp, TraceContext, UserId, Verdict};

pub use self::send_keys::{SendKey, SendKeyHash, SendRecord};
pub use crate::limit_changes::LimitChangeFeed;

use self::send_keys::{KeyDecision, SendKeyChanges};
use crate::{Batch, Error, Result};

/// The topic of accepted messages.
pub const TOPIC: &str = "sms-outbound";

#[derive(Clone, Debug)]
pub struct SendMessage {
    /// The user whose quota is charged.
    pub user: UserId,
    /// The text to deliver.
    pub message: Box<str>,
    /// A repeated send with the same key is answered like the first.
    pub key: Option<SendKey>,
    /// The trace of the call.
    pub trace: Option<TraceContext>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SendOutcome {
    /// Counted and enqueued in the same commit.
    Accepted {
        message_id: MessageId,
        limits: QuotaLimits,
        grant: Grant,
        /// When it was decided, by the store's clock.
        at: Timestamp,
    },
    /// Over the limit; nothing has changed.
    Denied {
        limits: QuotaLimits,
        denial: Denial,
        /// When it was decided, by the store's clock.
        at: Timestamp,
    },
    /// A message was accepted with this key before; nothing has changed.
    Replayed {
        message_id: MessageId,
        /// As it was answered then.
        grant: Grant,
        /// The user's row now; `None` if the user has no limits any more.
        row: Option<Quota>,
        at: Timestamp,
    },
    /// The key was used for another message; nothing has changed.
    KeyConflict,
    /// The user has no limits.
    NotConfigured,
    /// Within the limit, but the broker did not confirm the message.
    NotQueued(EnqueueOutcome),
}

/// Metrics of a cache in front of a store.
#[derive(Clone, Debug, Default)]
pub struct CacheMetrics {
    /// Changes of limits, on any server, after which the cache has deleted a user's entry.
    pub forgotten: Counter,
}

/// Checks of the quota tables, read in one snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QuotaAudit {
    /// Users that have limits.
    pub users: u64,
    /// Some of the users whose count is above their limit, and above the count that they kept when it was lowered. There
    /// must be none.
    pub over_limit: Vec<String>,
}

#[async_trait]
pub trait QuotaStore: Send + Sync + 'static {
    /// Creates or replaces a user's limits; the count starts again at 0.
    async fn configure(&self, user: &UserId, limits: QuotaLimits) -> Result<Quota>;
    /// Creates a user's limits, or replaces them and keeps the window and its count (see [`Quota::change_limits`]).
    async fn change_limits(&self, user: &UserId, limits: QuotaLimits) -> Result<Quota>;
    /// The user's row at the store's present time.
    async fn find(&self, user: &UserId) -> Result<Option<Quota>>;
    /// Users after `after`, in the byte order of their ids, each with the row at the store's present time.
    async fn list(&self, after: Option<&UserId>, limit: usize) -> Result<Vec<(UserId, Quota)>>;
    /// Removes a user's limits. Returns `false` if there are none.
    async fn remove(&self, user: &UserId) -> Result<bool>;
    /// Decides a batch in order and in one commit, and returns the outcomes in the same order. Each accepted message is
    /// enqueued on [`TOPIC`] in that commit, which also records its key. The batch grows until the engine takes it.
    async fn send_batch(&self, batch: Batch<SendMessage>) -> Result<Vec<SendOutcome>>;
    /// Deletes up to `limit` keys that have expired, the oldest first, and returns how many.
    async fn purge_keys(&self, limit: usize) -> Result<usize>;
    async fn audit(&self) -> Result<QuotaAudit>;
    /// Flushes everything to durable storage before the server stops.
    async fn close(&self) {}
}

/// A store with a cache in front of it. The cache reserves units of a window here before it grants them, so the count
/// here is never below what was allowed, even if the cache is lost.
#[async_trait]
pub trait ReservableStore: QuotaStore {
    /// Reserves units for all requests in one commit; `None` for users without limits.
    async fn reserve(&self, requests: Vec<ReservationRequest>) -> Result<Vec<Option<Reservation>>>;
    /// Shows reserved units as sent, because the cache has granted them. If the outcome is unknown the call may be
    /// repeated: what counts against a limit stays the same.
    async fn record_sent(&self, sent: Vec<ReservedUnits>) -> Result<()>;
    /// Returns reserved units that were not used.
    async fn return_unused(&self, unused: Vec<ReservedUnits>) -> Result<()>;
    /// Enqueues messages that the cache has allowed and counted.
    async fn enqueue(&self, accepted: &[AcceptedMessage<'_>]) -> Result<Vec<EnqueueOutcome>>;
    /// Invalidates the whole cache, on every server.
    async fn raise_cache_epoch(&self) -> Result<()>;
    /// Confirms that the cache holds nothing of these users' old limits. Until then their changes are published again to
    /// every server that starts or has missed changes.
    async fn confirm_invalidated(&self, users: &[UserId]) -> Result<()>;
    /// The changes of limits on all servers.
    fn limit_changes(&self) -> Arc<LimitChangeFeed>;
}

/// The units that are needed at once; the store reserves some more in advance.
#[derive(Clone, Debug)]
pub struct ReservationRequest {
    pub user: UserId,
    pub units: u32,
}

/// Reserved units of a user's window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// The row after the reservation was counted.
    pub row: Quota,
    /// What was requested and some more, or less if the window has no more. The requested ones are shown as sent already.
    pub units: u32,
    pub at: Timestamp,
}

/// Reserved units of a user's window that were sent, or that were not used.
#[derive(Clone, Debug)]
pub struct ReservedUnits {
    pub user: UserId,
    /// The start of the window.
    pub window: Timestamp,
    pub units: u32,
}

/// Whether a message was enqueued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EnqueueOutcome {
    Enqueued,
    Failed,
    /// The broker did not answer in time: the message may or may not be enqueued.
    Unknown,
}

impl EnqueueOutcome {
    /// The outcome for a message whose batch failed.
    #[must_use]
    pub const fn of_error(error: &Error) -> Self {
        match error {
            Error::NotDone { .. } | Error::Overloaded { .. } | Error::ShuttingDown => Self::Failed,
            _ => Self::Unknown,
        }
    }
}

/// Random bytes for ids; not for secrets.
#[must_use]
pub fn random_bytes() -> [u8; 10] {
    let mut bytes = [0; 10];
    fastrand::fill(&mut bytes);
    bytes
}

/// The outcomes of a batch of sends, and what the engine must save in the same commit.
#[derive(Debug)]
pub struct SendPlan<'a> {
    /// One outcome per command, in order.
    pub outcomes: Vec<SendOutcome>,
    /// The rows that changed, each once.
    pub changed: Vec<(&'a UserId, Quota)>,
    /// The accepted messages, in order.
    pub accepted: Vec<AcceptedMessage<'a>>,
    /// The commands, in order.
    sends: &'a [SendMessage],
}

#[derive(Clone, Copy, Debug)]
pub struct AcceptedMessage<'a> {
    pub message_id: MessageId,
    pub user: &'a UserId,
    /// The text to deliver.
    pub message: &'a str,
    /// The trace of the call that sent it; only events on Kafka carry it.
    pub trace: Option<&'a TraceContext>,
    /// When the message was accepted.
    pub at: Timestamp,
}

/// Decides `batch` in order, on the rows that the engine has loaded and locked.
///
/// `rows` has the users that have limits, `records` those of the batch's keys; `is_published` says that a broker gets the messages
/// before the commit, so that every key must have a record; `random` supplies the random bytes of message ids.
#[must_use]
pub fn plan_sends<'a>(
    batch: &'a [SendMessage],
    rows: &mut HashMap<&'a str, Quota>,
    records: &mut HashMap<SendKeyHash, SendRecord>,
    is_published: bool,
    now: Timestamp,
    mut random: impl FnMut() -> [u8; 10],
) -> SendPlan<'a> {
    let mut outcomes = Vec::with_capacity(batch.len());
    let mut accepted = Vec::with_capacity(batch.len());
    let mut touched: HashMap<&str, &UserId> = HashMap::new();
    for SendMessage { user, message, key, trace } in batch {
        let decision = key.as_ref().map_or(KeyDecision::New, |key| {
            send_keys::decide(key, records.get(&key.hash), rows.get(user.as_str()), now, is_published)
        });
        let resumed = match decision {
            KeyDecision::Answered(outcome) => {
                outcomes.push(outcome);
                continue;
            }
            KeyDecision::Resumed(message_id) => Some(message_id),
            KeyDecision::New => None,
        };
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
                let message_id = resumed.unwrap_or_else(|| MessageId::new(now, random()));
                touched.insert(user.as_str(), user);
                accepted.push(AcceptedMessage { message_id, user, message, trace: trace.as_ref(), at: now });
                if let Some(SendKey { hash, message }) = *key {
                    let expires_at = now.plus(send_keys::KEY_RETENTION);
                    records.insert(hash, SendRecord { message, message_id, grant: Some(grant), expires_at });
                }
                SendOutcome::Accepted { message_id, limits, grant, at: now }
            }
            Verdict::Denied(denial) => SendOutcome::Denied { limits, denial, at: now },
        });
    }
    let changed = touched.into_iter().filter_map(|(key, user)| Some((user, *rows.get(key)?))).collect();
    SendPlan { outcomes, changed, accepted, sends: batch }
}

/// Reserves units for all requests in order, on the rows that the engine has loaded and locked.
///
/// What is needed at once is shown as sent, and what is reserved in advance as reserved. Servers of before
/// `reserved_count` know nothing of it: while they use the database (`is_shown_as_sent`), all of it is shown as sent.
#[must_use]
pub fn plan_reservations(
    requests: &[ReservationRequest],
    rows: &mut HashMap<&str, Quota>,
    at: Timestamp,
    is_shown_as_sent: bool,
) -> Vec<Option<Reservation>> {
    let reserve = |ReservationRequest { user, units }: &ReservationRequest| {
        let row = rows.get_mut(user.as_str())?;
        let reserved = row.reserve(at, units.saturating_add(row.limits.prefetch()));
        row.record_sent(row.last_refresh, if is_shown_as_sent { reserved } else { reserved.min(*units) });
        Some(Reservation { row: *row, units: reserved, at })
    };
    requests.iter().map(reserve).collect()
}

impl SendPlan<'_> {
    /// What the plan changes in the records of keys. `reserved` are those that were created for this batch before it was
    /// published.
    #[must_use]
    pub fn key_changes(&self, reserved: &HashSet<SendKeyHash>) -> SendKeyChanges {
        SendKeyChanges::of(self.sends, &self.outcomes, reserved)
    }

    /// Adapts the plan when the broker confirmed only some of its messages: the others do not count, and denials that they
    /// caused become [`SendOutcome::NotQueued`], so that callers may retry. `before` has the rows as they were loaded.
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
        let Self { outcomes, mut changed, accepted, sends } = self;
        let mut confirmations = accepted.iter().zip(queued);
        // What became of the messages of this batch, for sends that repeat one of them.
        let mut confirmed: HashMap<MessageId, std::result::Result<Grant, EnqueueOutcome>> = HashMap::new();
        // Keys of messages that were not published: other messages with them do not conflict.
        let mut unused: HashSet<SendKeyHash> = HashSet::new();
        let recount = |(outcome, send): (SendOutcome, &SendMessage)| match outcome {
            SendOutcome::Accepted { message_id, limits, grant, at } => {
                let queued = confirmations.next().map_or(EnqueueOutcome::Failed, |(_, queued)| *queued);
                if queued != EnqueueOutcome::Enqueued {
                    confirmed.insert(message_id, Err(queued));
                    if queued == EnqueueOutcome::Failed {
                        unused.extend(send.key.map(|key| key.hash));
                    }
                    return SendOutcome::NotQueued(queued);
                }
                let grant = before.get_mut(send.user.as_str()).map_or(grant, |row| match row.send(at) {
                    Verdict::Allowed(grant) => grant,
                    Verdict::Denied(_) => grant,
                });
                confirmed.insert(message_id, Ok(grant));
                SendOutcome::Accepted { message_id, limits, grant, at }
            }
            SendOutcome::Replayed { message_id, grant, row, at } => match confirmed.get(&message_id) {
                Some(Err(queued)) => SendOutcome::NotQueued(*queued),
                Some(Ok(grant)) => SendOutcome::Replayed { message_id, grant: *grant, row, at },
                None => SendOutcome::Replayed { message_id, grant, row, at },
            },
            SendOutcome::Denied { .. } if missing.contains(send.user.as_str()) => {
                SendOutcome::NotQueued(EnqueueOutcome::Failed)
            }
            SendOutcome::KeyConflict if send.key.is_some_and(|key| unused.contains(&key.hash)) => {
                SendOutcome::NotQueued(EnqueueOutcome::Failed)
            }
            other => other,
        };
        let outcomes = outcomes.into_iter().zip(sends).map(recount).collect();
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
        Self { outcomes, changed, accepted: accepted.map(|(accepted, _)| accepted).collect(), sends }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn send(user: &str) -> SendMessage {
        SendMessage { user: UserId::parse(user).unwrap(), message: "hello".into(), key: None, trace: None }
    }

    fn keyed(user: &str, key: u8, text: u8) -> SendMessage {
        SendMessage { key: Some(SendKey { hash: [key; 16], message: [text; 16] }), ..send(user) }
    }

    /// Decides a batch and shows each outcome as a letter, and the changes of keys.
    fn decide(
        batch: &[SendMessage],
        rows: &mut HashMap<&'static str, Quota>,
        records: &mut HashMap<SendKeyHash, SendRecord>,
        now: Timestamp,
    ) -> (String, SendKeyChanges) {
        let mut borrowed = rows.iter().map(|(user, row)| (*user, *row)).collect();
        let plan = plan_sends(batch, &mut borrowed, records, false, now, random_bytes);
        for (user, row) in &plan.changed {
            *rows.get_mut(user.as_str()).unwrap() = *row;
        }
        (letters(&plan.outcomes), plan.key_changes(&HashSet::new()))
    }

    fn letters(outcomes: &[SendOutcome]) -> String {
        let letter = |outcome: &SendOutcome| match outcome {
            SendOutcome::Accepted { .. } => 'A',
            SendOutcome::Denied { .. } => 'D',
            SendOutcome::Replayed { .. } => 'R',
            SendOutcome::KeyConflict => 'C',
            SendOutcome::NotConfigured => 'N',
            SendOutcome::NotQueued(EnqueueOutcome::Unknown) => 'U',
            SendOutcome::NotQueued(_) => 'F',
        };
        outcomes.iter().map(letter).collect()
    }

    #[test]
    fn a_key_is_answered_alike_until_it_expires_and_counts_once() {
        let now = Timestamp::from_seconds(60);
        let mut rows = HashMap::from([("a", Quota::new(QuotaLimits::new(2, 1).unwrap(), now))]);
        let mut records = HashMap::new();
        let batch =
            [keyed("a", 1, 1), keyed("a", 1, 1), keyed("a", 1, 2), keyed("a", 2, 1), keyed("a", 3, 1)];
        let (outcomes, changes) = decide(&batch, &mut rows, &mut records, now);
        assert_eq!((outcomes.as_str(), rows["a"].current_count), ("ARCAD", 2));
        assert_eq!(changes.saved.iter().map(|(hash, _)| hash[0]).collect::<Vec<_>>(), [1, 2]);
        let first = records[&[1; 16]];
        let later = Timestamp::from_micros(first.expires_at.as_micros() - 1);
        let (outcomes, changes) = decide(&batch, &mut rows, &mut records, later);
        assert_eq!(outcomes, "RRCRA", "a denial is not recorded, so the third key is new");
        assert_eq!(changes.saved.len(), 1);
        let (outcomes, _) = decide(&batch[..1], &mut rows, &mut records, first.expires_at);
        assert_eq!(outcomes, "A", "the key has expired");
    }

    #[test]
    fn a_key_of_a_removed_user_is_answered_and_a_new_one_is_not_recorded() {
        let now = Timestamp::from_seconds(60);
        let mut rows = HashMap::from([("a", Quota::new(QuotaLimits::new(2, 1).unwrap(), now))]);
        let mut records = HashMap::new();
        decide(&[keyed("a", 1, 1)], &mut rows, &mut records, now);
        let batch = [keyed("a", 1, 1), keyed("a", 2, 1)];
        let (outcomes, changes) = decide(&batch, &mut HashMap::new(), &mut records, now);
        assert_eq!(outcomes, "RN");
        assert!(changes.is_empty());
    }

    #[test]
    fn a_key_whose_message_may_be_published_keeps_its_id_and_others_are_forgotten() {
        let now = Timestamp::from_seconds(60);
        let row = Quota::new(QuotaLimits::new(3, 1).unwrap(), now);
        let batch =
            [keyed("a", 4, 1), keyed("a", 1, 1), keyed("a", 1, 1), keyed("a", 2, 1), keyed("a", 3, 1)];
        let reserved = send_keys::reservations(&batch, now, random_bytes);
        assert_eq!(reserved.iter().map(|(hash, _)| hash[0]).collect::<Vec<_>>(), [1, 2, 3, 4]);
        let hashes: HashSet<_> = reserved.iter().map(|(hash, _)| *hash).collect();
        let mut records: HashMap<_, _> = reserved.iter().copied().collect();
        let (mut rows, mut before) = (HashMap::from([("a", row)]), HashMap::from([("a", row)]));
        let plan = plan_sends(&batch, &mut rows, &mut records, true, now, || panic!("the ids are reserved"));
        let ids: Vec<_> = plan.accepted.iter().map(|message| message.message_id).collect();
        assert_eq!(ids, [3, 0, 1].map(|n: usize| reserved[n].1.message_id));
        let queued = [EnqueueOutcome::Enqueued, EnqueueOutcome::Unknown, EnqueueOutcome::Failed];
        let plan = plan.retain_confirmed(&mut before, &queued);
        assert_eq!(letters(&plan.outcomes), "AUUFF");
        let changes = plan.key_changes(&hashes);
        assert_eq!(changes.saved.iter().map(|(hash, _)| hash[0]).collect::<Vec<_>>(), [4]);
        assert_eq!(changes.forgotten, [[2; 16], [3; 16]], "the one whose outcome is unknown stays");
    }

    #[test]
    fn nothing_is_published_under_a_key_whose_record_is_gone() {
        let now = Timestamp::from_seconds(60);
        let mut rows = HashMap::from([("a", Quota::new(QuotaLimits::new(5, 1).unwrap(), now))]);
        let batch = [keyed("a", 1, 1), keyed("a", 2, 1), send("a")];
        let mut records: HashMap<_, _> =
            send_keys::reservations(&batch[1..2], now, random_bytes).into_iter().collect();
        let mut expired = records.clone();
        let plan = plan_sends(&batch, &mut rows, &mut records, true, now, random_bytes);
        assert_eq!(letters(&plan.outcomes), "FAA");
        let later = now.plus(send_keys::KEY_RETENTION);
        let plan = plan_sends(&batch, &mut rows, &mut expired, true, later, random_bytes);
        assert_eq!(letters(&plan.outcomes), "FFA");
    }

    #[test]
    fn a_key_conflicts_with_no_message_that_was_not_published() {
        let now = Timestamp::from_seconds(60);
        let row = Quota::new(QuotaLimits::new(5, 1).unwrap(), now);
        let (mut rows, mut before) = (HashMap::from([("a", row)]), HashMap::from([("a", row)]));
        let batch: Vec<_> =
            [1, 2, 3].into_iter().flat_map(|key| [keyed("a", key, 1), keyed("a", key, 2)]).collect();
        let mut records = send_keys::reservations(&batch, now, random_bytes).into_iter().collect();
        let plan = plan_sends(&batch, &mut rows, &mut records, true, now, random_bytes);
        assert_eq!(letters(&plan.outcomes), "ACACAC");
        let queued = [EnqueueOutcome::Failed, EnqueueOutcome::Unknown, EnqueueOutcome::Enqueued];
        let plan = plan.retain_confirmed(&mut before, &queued);
        assert_eq!(letters(&plan.outcomes), "FFUCAC");
    }

    fn sent(limits: QuotaLimits, current_count: u32) -> Quota {
        Quota { current_count, ..Quota::new(limits, Timestamp::EPOCH) }
    }

    #[test]
    fn a_batch_is_decided_in_order_and_each_changed_row_saved_once() {
        let now = Timestamp::from_seconds(60);
        let row = Quota::new(QuotaLimits::new(2, 1).unwrap(), now);
        let mut rows = HashMap::from([("a", row), ("b", row)]);
        let batch = [send("a"), send("nobody"), send("a"), send("a")];
        let plan = plan_sends(&batch, &mut rows, &mut HashMap::new(), false, now, || [7; 10]);
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
    fn a_window_ahead_of_the_clock_is_saved_at_its_corrected_start_even_after_a_denial() {
        let now = Timestamp::from_seconds(60);
        let limits = QuotaLimits::new(1, 1).unwrap();
        let ahead = Quota { last_refresh: Timestamp::from_seconds(7_200), ..sent(limits, 1) };
        let mut rows = HashMap::from([("a", ahead)]);
        let batch = [send("a")];
        let plan = plan_sends(&batch, &mut rows, &mut HashMap::new(), false, now, || [7; 10]);
        assert!(matches!(plan.outcomes[..], [SendOutcome::Denied { .. }]));
        assert_eq!(plan.changed[0].1, Quota { last_refresh: now, ..sent(limits, 1) });
    }

    #[test]
    fn what_is_reserved_in_advance_counts_and_is_not_shown_as_sent() {
        let now = Timestamp::from_seconds(60);
        let row = Quota::new(QuotaLimits::new(5, 1).unwrap(), now);
        let request = |units| ReservationRequest { user: UserId::parse("a").unwrap(), units };
        let requests = [request(1), request(1), request(3), request(1)];
        for is_shown_as_sent in [false, true] {
            let mut rows = HashMap::from([("a", row)]);
            let reserved = plan_reservations(&requests, &mut rows, now, is_shown_as_sent);
            let reserved: Vec<_> = reserved.into_iter().flatten().collect();
            assert_eq!(reserved.iter().map(|reserved| reserved.units).collect::<Vec<_>>(), [2, 2, 1, 0]);
            let counts =
                reserved.iter().map(|Reservation { row, .. }| (row.current_count, row.reserved_count));
            let expected = match is_shown_as_sent {
                true => [(2, 0), (4, 0), (5, 0), (5, 0)],
                false => [(1, 1), (2, 2), (3, 2), (3, 2)],
            };
            assert_eq!(counts.collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn messages_the_broker_did_not_confirm_do_not_count() {
        let now = Timestamp::from_seconds(60);
        let row = Quota::new(QuotaLimits::new(2, 1).unwrap(), now);
        let mut rows = HashMap::from([("a", row), ("b", row)]);
        let mut before = rows.clone();
        let batch = [send("a"), send("a"), send("a"), send("b"), send("b")];
        let plan = plan_sends(&batch, &mut rows, &mut HashMap::new(), false, now, || [7; 10]);
        let confirmations = [
            EnqueueOutcome::Failed,
            EnqueueOutcome::Enqueued,
            EnqueueOutcome::Unknown,
            EnqueueOutcome::Enqueued,
        ];
        let plan = plan.retain_confirmed(&mut before, &confirmations);
        assert!(matches!(
            plan.outcomes[..],
            [
                SendOutcome::NotQueued(EnqueueOutcome::Failed),
                SendOutcome::Accepted { grant: Grant { remaining: 1, .. }, .. },
                // Denied because of a message that does not count.
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
    fn a_window_ahead_of_the_clock_is_corrected_even_if_the_broker_confirmed_nothing() {
        let now = Timestamp::from_seconds(60);
        let limits = QuotaLimits::new(2, 1).unwrap();
        let ahead = Quota { last_refresh: Timestamp::from_seconds(7_200), ..sent(limits, 1) };
        let mut rows = HashMap::from([("a", ahead), ("b", Quota { current_count: 2, ..ahead })]);
        let mut before = rows.clone();
        let batch = [send("a"), send("b")];
        let plan = plan_sends(&batch, &mut rows, &mut HashMap::new(), false, now, || [7; 10])
            .retain_confirmed(&mut before, &[EnqueueOutcome::Failed]);
        let mut changed = plan.changed.clone();
        changed.sort_unstable_by_key(|(user, _)| user.as_str());
        let brought_back = |count| Quota { last_refresh: now, ..sent(limits, count) };
        assert_eq!(
            changed.iter().map(|(_, row)| *row).collect::<Vec<_>>(),
            [brought_back(1), brought_back(2)]
        );
    }

    #[test]
    fn a_window_does_not_begin_if_nothing_was_counted_in_it() {
        let before = Quota::new(QuotaLimits::new(2, 1).unwrap(), Timestamp::EPOCH);
        let now = Timestamp::from_seconds(60);
        let mut rows = HashMap::from([("a", before)]);
        let mut loaded = rows.clone();
        let batch = [send("a")];
        let plan = plan_sends(&batch, &mut rows, &mut HashMap::new(), false, now, || [7; 10])
            .retain_confirmed(&mut loaded, &[EnqueueOutcome::Failed]);
        assert_eq!(plan.changed[0].1, before);
    }
}
