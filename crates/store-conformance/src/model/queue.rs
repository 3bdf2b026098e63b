//! The model as a queue: every call scans all messages ever enqueued.

use std::collections::BTreeSet;
use std::time::Duration;

use async_trait::async_trait;
use weir_core::Timestamp;
use weir_queue::{
    ClaimReceipt, DeadLetter, Message, MessageClaim, MessageSource, Position, Queue, QueueAudit, Settlement,
    ShardLease,
};
use weir_store::Result;
use weir_store::quota::TOPIC;

use super::{ActiveLease, MessageState, Model, QueuedMessage, State};

impl QueuedMessage {
    fn is_waiting(&self) -> bool {
        matches!(self.state, MessageState::Waiting)
    }

    fn is_dead(&self) -> bool {
        matches!(self.state, MessageState::Dead { .. })
    }

    fn put_back(&mut self, at: Timestamp) {
        self.state = MessageState::Waiting;
        self.attempts = 0;
        self.hidden_until = at;
    }
}

impl State {
    fn is_leased(&self, shard: u16, now: Timestamp) -> bool {
        self.leases.iter().any(|held| held.lease.shard == shard && now < held.until)
    }

    fn holds(&self, lease: &ShardLease, now: Timestamp) -> bool {
        self.leases.iter().any(|held| held.lease == *lease && now < held.until)
    }

    /// Returns the claimable messages in order. A hidden message holds back the later ones of its key.
    fn claimable(&self, max: usize, now: Timestamp) -> Vec<Message> {
        let mut held_back = BTreeSet::new();
        let mut messages = Vec::new();
        for (id, entry) in (0..).zip(&self.entries) {
            if !entry.is_waiting() || self.is_leased(entry.shard, now) || held_back.contains(&entry.key) {
                continue;
            }
            if entry.hidden_until > now {
                held_back.insert(entry.key.clone());
            } else if messages.len() < max {
                let position = Position { shard: entry.shard, id };
                let (key, payload) = (entry.key.clone(), entry.payload.clone());
                messages.push(Message { position, key, payload, attempts: entry.attempts, trace: None });
            }
        }
        messages
    }

    fn lease(&mut self, shard: u16, until: Timestamp) -> ShardLease {
        self.last_token += 1;
        let lease = ShardLease { shard, token: self.last_token };
        self.leases.retain(|held| held.lease.shard != shard);
        self.leases.push(ActiveLease { lease, until });
        lease
    }

    /// Returns the message at a position if it is waiting in one of `shards`.
    fn waiting(&mut self, position: Position, shards: &BTreeSet<u16>) -> Option<&mut QueuedMessage> {
        let entry = self.entries.get_mut(usize::try_from(position.id).ok()?)?;
        let held = entry.shard == position.shard && shards.contains(&entry.shard);
        (held && entry.is_waiting()).then_some(entry)
    }

    fn settle(&mut self, shards: &BTreeSet<u16>, settlement: Settlement, now: Timestamp) {
        for position in settlement.done {
            if let Some(entry) = self.waiting(position, shards) {
                entry.state = MessageState::Done;
            }
        }
        for (position, reason) in settlement.dead {
            if let Some(entry) = self.waiting(position, shards) {
                entry.attempts += 1;
                entry.state = MessageState::Dead { reason, died_at: now };
            }
        }
        for (position, after) in settlement.retry {
            if let Some(entry) = self.waiting(position, shards) {
                entry.attempts += 1;
                entry.hidden_until = now.plus(after);
            }
        }
        for (position, after) in settlement.deferred {
            if let Some(entry) = self.waiting(position, shards) {
                entry.hidden_until = now.plus(after);
            }
        }
    }

    fn dead(&mut self, dead_id: &str) -> Option<&mut QueuedMessage> {
        let named = (0..).zip(&mut self.entries).find(|(id, _)| dead_letter_id(*id) == dead_id);
        named.map(|(_, entry)| entry).filter(|entry| entry.is_dead())
    }

    fn count(&self, matches: impl Fn(&MessageState) -> bool) -> u64 {
        self.entries.iter().filter(|entry| matches(&entry.state)).count() as u64
    }
}

fn dead_letter_id(id: i64) -> String {
    format!("{TOPIC}-{id:019}")
}

fn dead_letter(id: i64, entry: &QueuedMessage) -> Option<DeadLetter> {
    let MessageState::Dead { reason, died_at } = &entry.state else {
        return None;
    };
    Some(DeadLetter {
        id: dead_letter_id(id),
        topic: TOPIC.to_owned(),
        key: entry.key.clone(),
        payload: entry.payload.clone(),
        reason: reason.clone(),
        attempts: entry.attempts,
        died_at: *died_at,
    })
}

#[async_trait]
impl MessageSource for Model {
    async fn claim(&self, topic: &str, max: usize, visibility: Duration) -> Result<MessageClaim> {
        if topic != TOPIC {
            return Ok(MessageClaim::default());
        }
        let mut state = self.state.lock();
        let now = self.now();
        let messages = state.claimable(max, now);
        let shards: BTreeSet<u16> = messages.iter().map(|message| message.position.shard).collect();
        let leases = shards.into_iter().map(|shard| state.lease(shard, now.plus(visibility))).collect();
        Ok(MessageClaim { messages, receipt: ClaimReceipt { topic: topic.to_owned(), leases } })
    }

    async fn settle(&self, receipt: &ClaimReceipt, settlement: Settlement) -> Result<bool> {
        let mut state = self.state.lock();
        let now = self.now();
        let held: Vec<ShardLease> =
            receipt.leases.iter().filter(|lease| state.holds(lease, now)).copied().collect();
        let shards = held.iter().map(|lease| lease.shard).collect();
        state.settle(&shards, settlement, now);
        state.leases.retain(|other| !held.contains(&other.lease));
        Ok(held.len() == receipt.leases.len())
    }

    async fn wait(&self, _topic: &str, at_most: Duration) {
        let sent = tokio::time::timeout(at_most, self.sent.notified()).await;
        sent.unwrap_or_default();
    }
}

#[async_trait]
impl Queue for Model {
    async fn dead_letters(
        &self,
        after: Option<&str>,
        limit: usize,
        payload_max: usize,
    ) -> Result<Vec<DeadLetter>> {
        let state = self.state.lock();
        let letters = (0..).zip(&state.entries).filter_map(|(id, entry)| dead_letter(id, entry));
        let later = letters.filter(|dead_letter| after.is_none_or(|after| dead_letter.id.as_str() > after));
        let cut = later.take(limit).map(|mut dead_letter| {
            dead_letter.payload.truncate(payload_max);
            dead_letter.reason = dead_letter.reason.chars().take(payload_max).collect();
            dead_letter
        });
        Ok(cut.collect())
    }

    async fn settle_deferred(&self, topic: &str, settlement: Settlement) -> Result<()> {
        let mut state = self.state.lock();
        let shards = state.entries.iter().map(|entry| entry.shard).filter(|_| topic == TOPIC).collect();
        let now = self.now();
        state.settle(&shards, settlement, now);
        Ok(())
    }

    async fn replay(&self, id: &str) -> Result<bool> {
        let now = self.now();
        Ok(self.state.lock().dead(id).map(|entry| entry.put_back(now)).is_some())
    }

    async fn replay_all(&self) -> Result<u64> {
        let now = self.now();
        let mut state = self.state.lock();
        let dead = state.entries.iter_mut().filter(|entry| entry.is_dead());
        Ok(dead.map(|entry| entry.put_back(now)).count() as u64)
    }

    async fn discard(&self, id: &str) -> Result<bool> {
        Ok(self.state.lock().dead(id).map(|entry| entry.state = MessageState::Discarded).is_some())
    }

    async fn count_dead_letters(&self, topic: &str, limit: usize) -> Result<u64> {
        let dead = self.state.lock().count(|state| matches!(state, MessageState::Dead { .. }));
        Ok(if topic == TOPIC { dead.min(limit as u64) } else { 0 })
    }

    async fn audit(&self, topic: &str) -> Result<QueueAudit> {
        if topic != TOPIC {
            return Ok(QueueAudit::default());
        }
        let state = self.state.lock();
        Ok(QueueAudit {
            accepted: state.entries.len() as u64,
            done: state.count(|state| matches!(state, MessageState::Done)),
            discarded: state.count(|state| matches!(state, MessageState::Discarded)),
            dead: state.count(|state| matches!(state, MessageState::Dead { .. })),
            in_flight: state.count(|state| matches!(state, MessageState::Waiting)),
        })
    }
}
