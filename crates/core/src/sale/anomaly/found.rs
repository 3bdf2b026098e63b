//! The anomalies that were found: a bounded list, in which one that goes on is one entry.

use std::collections::VecDeque;
use std::time::Duration;

use super::{Pattern, Sku};
use crate::Timestamp;

/// The most anomalies that are kept. The oldest are forgotten.
pub(super) const FOUND_MAX: usize = 1_000;
/// How long an anomaly may pause and still be the same.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// A group of attempts that shows a pattern.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Anomaly {
    /// Numbered in the order in which they were found, from 1.
    pub id: u64,
    pub pattern: Pattern,
    /// What the attempts have in common: a network, an address, a form of user ids, the most frequent client.
    pub key: Box<str>,
    pub sku: Sku,
    /// The attempts.
    pub count: u64,
    pub first_seen: Timestamp,
    pub last_seen: Timestamp,
}

/// What an anomaly is about: a pattern, and the hash of what shows it.
type Subject = (Pattern, u64);

#[derive(Debug, Default)]
pub(super) struct Found {
    list: VecDeque<(Subject, Anomaly)>,
    last_id: u64,
}

impl Found {
    /// Records an attempt that belongs to an anomaly. Returns the anomaly if it is new.
    pub(super) fn record(
        &mut self,
        subject: Subject,
        sku: &Sku,
        key: impl FnOnce() -> String,
        since: Timestamp,
        count: u64,
        now: Timestamp,
    ) -> Option<Anomaly> {
        let latest = self.list.iter_mut().rev().find(|(known, _)| *known == subject);
        if let Some((_, anomaly)) = latest
            && now.since(anomaly.last_seen) <= PAUSE_MAX
        {
            anomaly.last_seen = anomaly.last_seen.max(now);
            anomaly.count = anomaly.count.saturating_add(1);
            return None;
        }
        self.last_id = self.last_id.saturating_add(1);
        let anomaly = Anomaly {
            id: self.last_id,
            pattern: subject.0,
            key: key().into(),
            sku: sku.clone(),
            count,
            first_seen: since,
            last_seen: now,
        };
        if self.list.len() >= FOUND_MAX {
            self.list.pop_front();
        }
        self.list.push_back((subject, anomaly.clone()));
        Some(anomaly)
    }

    pub(super) fn list(&self, before: Option<u64>) -> impl Iterator<Item = &Anomaly> {
        let all = self.list.iter().rev().map(|(_, anomaly)| anomaly);
        all.filter(move |anomaly| before.is_none_or(|before| anomaly.id < before))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_anomalies_are_kept_than_the_bound() {
        let (mut found, sku) = (Found::default(), Sku::parse("W").unwrap());
        for n in 0..1_500 {
            let subject = (Pattern::NetworkSpike, n);
            let new = found.record(subject, &sku, String::new, Timestamp::EPOCH, 1, Timestamp::EPOCH);
            assert!(new.is_some());
        }
        let ids: Vec<_> = found.list(None).map(|anomaly| anomaly.id).collect();
        assert_eq!((ids.len(), ids[0], ids[FOUND_MAX - 1]), (FOUND_MAX, 1_500, 501));
    }
}
