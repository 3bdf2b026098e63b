//! The messages of a source that are fetched and waiting, or claimed. Uses neither Kafka nor a clock.
//!
//! A partition gets a new generation whenever it is assigned or claimed, so an old receipt settles nothing. Offsets can
//! only be committed in order: the first message that is neither done nor dead, and all messages of its partition after
//! it, go back to the front of the queue and are delivered again.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::Instant;

use crate::{ClaimReceipt, Message, MessageClaim, Position, Settlement, ShardLease};

/// The messages in flight of one topic.
#[derive(Debug)]
pub(super) struct InFlight {
    topic: String,
    partitions: BTreeMap<u16, Partition>,
    waiting: VecDeque<Entry>,
    out: Option<Out>,
    generation: i64,
    bytes: usize,
    limits: Limits,
}

/// The most that is in flight. One fetch may exceed it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) messages_max: usize,
    pub(super) bytes_max: usize,
}

#[derive(Debug)]
struct Partition {
    generation: i64,
    /// The offset to commit, until the commit is confirmed.
    uncommitted: Option<i64>,
    /// No message may be claimed before this time.
    held_until: Option<Instant>,
    /// Being revoked: what is claimed may still be settled, and nothing more is claimed.
    is_leaving: bool,
}

/// One message with the original bytes of its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) message: Message,
    pub(super) key: Vec<u8>,
}

#[derive(Debug)]
struct Out {
    entries: Vec<Entry>,
    leases: Vec<ShardLease>,
    until: Instant,
}

/// A dead letter that must be published before its offset may be committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DeadMessage {
    pub(super) entry: Entry,
    pub(super) reason: String,
}

impl Entry {
    fn bytes(&self) -> usize {
        let state = self.message.trace.as_ref().and_then(|trace| trace.state.as_ref());
        let state = state.map_or(0, |state| state.len());
        self.message.payload.len() + self.key.len() + state + size_of::<Self>()
    }

    const fn partition(&self) -> u16 {
        self.message.position.shard
    }
}

impl InFlight {
    pub(super) fn new(topic: String, limits: Limits) -> Self {
        Self {
            topic,
            partitions: BTreeMap::new(),
            waiting: VecDeque::new(),
            out: None,
            generation: 0,
            bytes: 0,
            limits,
        }
    }

    /// Adds assigned partitions. Messages are fetched from the committed offset on.
    pub(super) fn assign(&mut self, partitions: impl IntoIterator<Item = u16>) {
        for partition in partitions {
            self.forget(partition);
            self.generation += 1;
            let fresh = Partition {
                generation: self.generation,
                uncommitted: None,
                held_until: None,
                is_leaving: false,
            };
            self.partitions.insert(partition, fresh);
        }
    }

    /// Drops the unclaimed messages of partitions that are about to be revoked: another member gets them. A message that was
    /// claimed between the last commit and the revocation would be delivered twice.
    pub(super) fn stop_claims(&mut self, partitions: &[u16]) {
        for partition in partitions {
            if let Some(partition) = self.partitions.get_mut(partition) {
                partition.is_leaving = true;
            }
        }
        self.waiting.retain(|entry| !partitions.contains(&entry.partition()));
        self.count_bytes();
    }

    /// Whether messages of the entry's partition may be claimed, now or later.
    fn is_claimable(&self, entry: &Entry) -> bool {
        self.partitions.get(&entry.partition()).is_some_and(|partition| !partition.is_leaving)
    }

    /// Removes partitions and their messages.
    pub(super) fn revoke(&mut self, partitions: impl IntoIterator<Item = u16>) {
        for partition in partitions {
            self.forget(partition);
        }
    }

    fn forget(&mut self, partition: u16) {
        self.partitions.remove(&partition);
        self.waiting.retain(|entry| entry.partition() != partition);
        if let Some(out) = &mut self.out {
            out.entries.retain(|entry| entry.partition() != partition);
        }
        // A claim without messages need not be settled.
        self.out.take_if(|out| out.entries.is_empty());
        self.count_bytes();
    }

    /// Whether an unexpired claim has messages of these partitions.
    pub(super) fn is_out(&self, partitions: &[u16], now: Instant) -> bool {
        let out = self.out.as_ref().filter(|out| out.until > now);
        out.is_some_and(|out| out.entries.iter().any(|entry| partitions.contains(&entry.partition())))
    }

    /// Appends fetched messages. Messages of partitions that are not assigned, or no longer for long, are dropped.
    pub(super) fn put(&mut self, entries: impl IntoIterator<Item = Entry>) {
        for entry in entries {
            if self.is_claimable(&entry) {
                self.bytes += entry.bytes();
                self.waiting.push_back(entry);
            }
        }
    }

    /// Whether to stop fetching.
    pub(super) fn is_full(&self) -> bool {
        let out = self.out.as_ref().map_or(0, |out| out.entries.len());
        self.waiting.len() + out >= self.limits.messages_max || self.bytes >= self.limits.bytes_max
    }

    /// When there will be messages to claim: `Some(now)` for at once, `None` if more must be fetched or settled first.
    pub(super) fn ready_at(&self, now: Instant) -> Option<Instant> {
        if let Some(out) = &self.out
            && out.until > now
        {
            return None;
        }
        let entries = self.waiting.iter().chain(self.out.iter().flat_map(|out| &out.entries));
        entries.map(|entry| self.held_until(entry).map_or(now, |until| until.max(now))).min()
    }

    fn held_until(&self, entry: &Entry) -> Option<Instant> {
        self.partitions.get(&entry.partition()).and_then(|partition| partition.held_until)
    }

    /// Claims waiting messages, unless another claim is unsettled.
    pub(super) fn claim(&mut self, max: usize, now: Instant, until: Instant) -> MessageClaim {
        if let Some(out) = self.out.take_if(|out| out.until <= now) {
            self.put_back(out.entries);
        }
        if self.out.is_some() {
            return MessageClaim::default();
        }
        let (mut entries, mut held_back) = (Vec::new(), Vec::new());
        while entries.len() < max
            && let Some(entry) = self.waiting.pop_front()
        {
            let held = self.held_until(&entry).is_some_and(|held| held > now);
            if held { held_back.push(entry) } else { entries.push(entry) }
        }
        held_back.into_iter().rev().for_each(|entry| self.waiting.push_front(entry));
        if entries.is_empty() {
            return MessageClaim::default();
        }
        let shards: BTreeSet<u16> = entries.iter().map(Entry::partition).collect();
        let leases: Vec<ShardLease> = shards.into_iter().filter_map(|shard| self.lease(shard)).collect();
        let messages = entries.iter().map(|entry| entry.message.clone()).collect();
        self.out = Some(Out { entries, leases: leases.clone(), until });
        MessageClaim { messages, receipt: ClaimReceipt { topic: self.topic.clone(), leases } }
    }

    fn lease(&mut self, shard: u16) -> Option<ShardLease> {
        let partition = self.partitions.get_mut(&shard)?;
        self.generation += 1;
        partition.generation = self.generation;
        Some(ShardLease { shard, token: self.generation })
    }

    /// Whether a lease is still valid.
    fn holds(&self, lease: &ShardLease) -> bool {
        let partition = self.partitions.get(&lease.shard);
        partition.is_some_and(|partition| partition.generation == lease.token)
    }

    /// Returns the dead letters whose offsets the settlement would commit. They must be published before
    /// [`InFlight::settle`]. `None` if the receipt is not that of the present claim.
    pub(super) fn dead_messages(
        &self,
        receipt: &ClaimReceipt,
        settlement: &Settlement,
    ) -> Option<Vec<DeadMessage>> {
        let out = self.out.as_ref().filter(|out| out.leases == receipt.leases)?;
        let outcomes = SettledOutcomes::of(settlement);
        let mut ended = self.lost(receipt);
        let mut dead_messages = Vec::new();
        for entry in &out.entries {
            if ended.contains(&entry.partition()) {
                continue;
            }
            match outcomes.of_entry(entry) {
                SettledOutcome::Done => {}
                SettledOutcome::Dead(reason) => {
                    dead_messages.push(DeadMessage { entry: entry.clone(), reason: reason.to_owned() });
                }
                SettledOutcome::Again(_) => {
                    ended.insert(entry.partition());
                }
            }
        }
        Some(dead_messages)
    }

    /// Settles the claim; dead letters only if they were `published`. Returns `false` if a lease was lost.
    pub(super) fn settle(
        &mut self,
        receipt: &ClaimReceipt,
        settlement: &Settlement,
        published: &BTreeSet<Position>,
        now: Instant,
    ) -> bool {
        let Some(out) = self.out.take_if(|out| out.leases == receipt.leases) else {
            return false;
        };
        let outcomes = SettledOutcomes::of(settlement);
        let lost = self.lost(receipt);
        let (mut ended, mut again) = (BTreeSet::new(), Vec::new());
        for mut entry in out.entries {
            let (partition, position) = (entry.partition(), entry.message.position);
            if lost.contains(&partition) {
                continue;
            }
            let outcome = outcomes.of_entry(&entry);
            let settled = match outcome {
                SettledOutcome::Done => true,
                SettledOutcome::Dead(_) => published.contains(&position),
                SettledOutcome::Again(pause) => {
                    if let Some(pause) = pause {
                        entry.message.attempts = entry.message.attempts.saturating_add(1);
                        self.hold(partition, now.checked_add(pause));
                    }
                    false
                }
            };
            if settled && !ended.contains(&partition) {
                if let Some(partition) = self.partitions.get_mut(&partition) {
                    partition.uncommitted = Some(position.id + 1);
                }
            } else {
                ended.insert(partition);
                again.push(entry);
            }
        }
        self.put_back(again);
        lost.is_empty()
    }

    fn hold(&mut self, partition: u16, until: Option<Instant>) {
        if let Some(partition) = self.partitions.get_mut(&partition) {
            partition.held_until = partition.held_until.max(until);
        }
    }

    fn lost(&self, receipt: &ClaimReceipt) -> BTreeSet<u16> {
        receipt.leases.iter().filter(|lease| !self.holds(lease)).map(|lease| lease.shard).collect()
    }

    fn put_back(&mut self, entries: Vec<Entry>) {
        for entry in entries.into_iter().rev() {
            if self.is_claimable(&entry) {
                self.waiting.push_front(entry);
            }
        }
        self.count_bytes();
    }

    fn count_bytes(&mut self) {
        let out = self.out.iter().flat_map(|out| &out.entries);
        self.bytes = self.waiting.iter().chain(out).map(Entry::bytes).sum();
    }

    /// The settled offsets whose commit is not confirmed.
    pub(super) fn uncommitted(&self) -> Vec<(u16, i64)> {
        let partitions = self.partitions.iter();
        partitions.filter_map(|(shard, partition)| Some((*shard, partition.uncommitted?))).collect()
    }

    /// Records that commits of these offsets were confirmed.
    pub(super) fn committed(&mut self, offsets: &[(u16, i64)]) {
        for (shard, offset) in offsets {
            if let Some(partition) = self.partitions.get_mut(shard) {
                partition.uncommitted = partition.uncommitted.filter(|uncommitted| uncommitted > offset);
            }
        }
    }
}

/// What happens to messages, by position.
struct SettledOutcomes<'a>(HashMap<Position, SettledOutcome<'a>>);

#[derive(Clone, Copy)]
enum SettledOutcome<'a> {
    Done,
    Dead(&'a str),
    /// To be delivered again, after a pause if given.
    Again(Option<std::time::Duration>),
}

impl<'a> SettledOutcomes<'a> {
    fn of(settlement: &'a Settlement) -> Self {
        let done = settlement.done.iter().map(|position| (*position, SettledOutcome::Done));
        let dead = settlement.dead.iter().map(|(position, reason)| (*position, SettledOutcome::Dead(reason)));
        let retry =
            settlement.retry.iter().map(|(position, pause)| (*position, SettledOutcome::Again(Some(*pause))));
        // A single message of a partition cannot wait, so deferring holds back the partition, as a retry does.
        let deferred = settlement
            .deferred
            .iter()
            .map(|(position, pause)| (*position, SettledOutcome::Again(Some(*pause))));
        Self(done.chain(dead).chain(retry).chain(deferred).collect())
    }

    fn of_entry(&self, entry: &Entry) -> SettledOutcome<'a> {
        self.0.get(&entry.message.position).copied().unwrap_or(SettledOutcome::Again(None))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const LIMITS: Limits = Limits { messages_max: 10, bytes_max: 1_000_000 };
    const MINUTE: Duration = Duration::from_secs(60);

    fn entry(shard: u16, id: i64) -> Entry {
        let position = Position { shard, id };
        let payload = format!("{shard}/{id}").into_bytes();
        Entry {
            message: Message { position, key: "k".to_owned(), payload, attempts: 0, trace: None },
            key: b"k".to_vec(),
        }
    }

    fn at(shard: u16, id: i64) -> Position {
        Position { shard, id }
    }

    fn positions(claim: &MessageClaim) -> Vec<(u16, i64)> {
        claim.messages.iter().map(|message| (message.position.shard, message.position.id)).collect()
    }

    /// Two partitions with three messages each. The offsets have a gap, as compaction leaves.
    fn in_flight() -> InFlight {
        let mut in_flight = InFlight::new("t".to_owned(), LIMITS);
        in_flight.assign([0, 1]);
        in_flight.put([entry(0, 5), entry(1, 0), entry(0, 6), entry(1, 1), entry(0, 9), entry(1, 2)]);
        in_flight
    }

    fn settle(in_flight: &mut InFlight, claim: &MessageClaim, settlement: &Settlement, now: Instant) -> bool {
        let dead_messages = in_flight.dead_messages(&claim.receipt, settlement).unwrap_or_default();
        let published =
            dead_messages.into_iter().map(|dead_message| dead_message.entry.message.position).collect();
        in_flight.settle(&claim.receipt, settlement, &published, now)
    }

    #[test]
    fn one_claim_exists_at_a_time_and_settled_messages_are_not_delivered_again() {
        let (mut in_flight, now) = (in_flight(), Instant::now());
        let claim = in_flight.claim(4, now, now + MINUTE);
        assert_eq!(positions(&claim), [(0, 5), (1, 0), (0, 6), (1, 1)]);
        assert!(in_flight.claim(4, now, now + MINUTE).messages.is_empty());
        assert_eq!(in_flight.ready_at(now), None);
        let done = claim.messages.iter().map(|message| message.position).collect();
        assert!(settle(&mut in_flight, &claim, &Settlement { done, ..Settlement::default() }, now));
        assert_eq!(in_flight.uncommitted(), [(0, 7), (1, 2)]);
        in_flight.committed(&[(0, 7), (1, 1)]);
        assert_eq!(in_flight.uncommitted(), [(1, 2)], "an older commit confirms nothing newer");
        assert_eq!(in_flight.ready_at(now), Some(now));
        assert_eq!(positions(&in_flight.claim(4, now, now + MINUTE)), [(0, 9), (1, 2)]);
    }

    #[test]
    fn a_gap_in_the_settlement_stops_commits_of_its_own_partition_only() {
        let (mut in_flight, now) = (in_flight(), Instant::now());
        let claim = in_flight.claim(6, now, now + MINUTE);
        // 6 of partition 0 is not settled: 9 after it is not committed, and its dead letter is not published.
        let settlement = Settlement {
            done: vec![at(0, 5), at(1, 0), at(1, 2)],
            dead: vec![(at(1, 1), "bad".to_owned()), (at(0, 9), "bad".to_owned())],
            ..Settlement::default()
        };
        let dead_messages = in_flight.dead_messages(&claim.receipt, &settlement).unwrap();
        assert_eq!(dead_messages, [DeadMessage { entry: entry(1, 1), reason: "bad".to_owned() }]);
        assert!(settle(&mut in_flight, &claim, &settlement, now));
        assert_eq!(in_flight.uncommitted(), [(0, 6), (1, 3)]);
        assert_eq!(positions(&in_flight.claim(6, now, now + MINUTE)), [(0, 6), (0, 9)]);
    }

    #[test]
    fn a_dead_letter_that_was_not_published_is_delivered_again() {
        let (mut in_flight, now) = (in_flight(), Instant::now());
        let claim = in_flight.claim(3, now, now + MINUTE);
        let settlement = Settlement {
            done: vec![at(0, 6), at(1, 0)],
            dead: vec![(at(0, 5), "bad".to_owned())],
            ..Settlement::default()
        };
        assert!(in_flight.settle(&claim.receipt, &settlement, &BTreeSet::new(), now));
        assert_eq!(in_flight.uncommitted(), [(1, 1)]);
        assert_eq!(positions(&in_flight.claim(3, now, now + MINUTE)), [(0, 5), (0, 6), (1, 1)]);
    }

    #[test]
    fn a_retry_delays_its_partition_and_counts_an_attempt() {
        let (mut in_flight, now) = (in_flight(), Instant::now());
        let claim = in_flight.claim(6, now, now + MINUTE);
        let done = vec![at(1, 0), at(1, 1), at(1, 2)];
        let settlement = Settlement { done, retry: vec![(at(0, 5), MINUTE)], ..Settlement::default() };
        assert!(settle(&mut in_flight, &claim, &settlement, now));
        assert!(in_flight.claim(6, now, now + MINUTE).messages.is_empty());
        let later = now + MINUTE;
        assert_eq!(in_flight.ready_at(now), Some(later));
        let claim = in_flight.claim(6, later, later + MINUTE);
        assert_eq!(positions(&claim), [(0, 5), (0, 6), (0, 9)]);
        assert_eq!(claim.messages.iter().map(|message| message.attempts).collect::<Vec<_>>(), [1, 0, 0]);
    }

    #[test]
    fn a_revoked_partition_settles_nothing_even_if_it_is_assigned_again() {
        let (mut in_flight, now) = (in_flight(), Instant::now());
        let claim = in_flight.claim(6, now, now + MINUTE);
        assert!(in_flight.is_out(&[0], now));
        in_flight.revoke([0]);
        in_flight.assign([0]);
        in_flight.put([entry(0, 5)]);
        let done = claim.messages.iter().map(|message| message.position).collect();
        assert!(!settle(&mut in_flight, &claim, &Settlement { done, ..Settlement::default() }, now));
        assert_eq!(in_flight.uncommitted(), [(1, 3)], "the other partition is settled");
        assert_eq!(positions(&in_flight.claim(6, now, now + MINUTE)), [(0, 5)]);
    }

    #[test]
    fn a_partition_that_is_being_revoked_settles_its_claim_and_yields_nothing_more() {
        let (mut in_flight, now) = (in_flight(), Instant::now());
        let claim = in_flight.claim(3, now, now + MINUTE);
        assert_eq!(positions(&claim), [(0, 5), (1, 0), (0, 6)]);
        in_flight.stop_claims(&[0]);
        in_flight.put([entry(0, 10), entry(1, 3)]);
        assert!(in_flight.is_out(&[0], now));
        // 6 of partition 0 is not settled and goes to the next owner.
        let done = vec![at(0, 5), at(1, 0)];
        assert!(settle(&mut in_flight, &claim, &Settlement { done, ..Settlement::default() }, now));
        assert_eq!(in_flight.uncommitted(), [(0, 6), (1, 1)], "settled before the revocation, so committed");
        assert_eq!(positions(&in_flight.claim(9, now, now + MINUTE)), [(1, 1), (1, 2), (1, 3)]);
        in_flight.revoke([0]);
        in_flight.assign([0]);
        in_flight.put([entry(0, 6)]);
        assert_eq!(in_flight.ready_at(now), None, "one claim at a time");
        let later = now + MINUTE;
        assert_eq!(positions(&in_flight.claim(9, later, later + MINUTE))[3..], [(0, 6)], "assigned again");
    }

    #[test]
    fn a_claim_that_lost_all_its_partitions_does_not_block_others() {
        let (mut in_flight, now) = (in_flight(), Instant::now());
        let late = in_flight.claim(6, now, now + MINUTE);
        in_flight.revoke([0, 1]);
        in_flight.assign([1]);
        in_flight.put([entry(1, 0)]);
        let again = in_flight.claim(6, now, now + MINUTE);
        assert_eq!(positions(&again), [(1, 0)]);
        assert!(!settle(
            &mut in_flight,
            &late,
            &Settlement { done: vec![at(1, 0)], ..Settlement::default() },
            now
        ));
        assert!(settle(
            &mut in_flight,
            &again,
            &Settlement { done: vec![at(1, 0)], ..Settlement::default() },
            now
        ));
        assert_eq!(in_flight.uncommitted(), [(1, 1)]);
    }

    #[test]
    fn an_expired_claim_settles_nothing_and_its_messages_are_delivered_again() {
        let (mut in_flight, now) = (in_flight(), Instant::now());
        let late = in_flight.claim(2, now, now + MINUTE);
        let later = now + MINUTE;
        assert!(!in_flight.is_out(&[0, 1], later));
        assert_eq!(positions(&in_flight.claim(2, later, later + MINUTE)), positions(&late));
        let done = late.messages.iter().map(|message| message.position).collect();
        assert!(!settle(&mut in_flight, &late, &Settlement { done, ..Settlement::default() }, later));
        assert!(in_flight.uncommitted().is_empty());
    }

    #[test]
    fn fetching_stops_until_something_is_settled() {
        let (mut in_flight, now) = (in_flight(), Instant::now());
        assert!(!in_flight.is_full());
        in_flight.put((10..14).map(|id| entry(0, id)));
        assert!(in_flight.is_full());
        let claim = in_flight.claim(4, now, now + MINUTE);
        assert!(in_flight.is_full(), "claimed messages count, too");
        let done = claim.messages.iter().map(|message| message.position).collect();
        assert!(settle(&mut in_flight, &claim, &Settlement { done, ..Settlement::default() }, now));
        assert!(!in_flight.is_full());
        in_flight.put([entry(7, 0)]);
        assert_eq!(positions(&in_flight.claim(9, now, now + MINUTE)).len(), 6, "partition 7 is not assigned");
    }
}
