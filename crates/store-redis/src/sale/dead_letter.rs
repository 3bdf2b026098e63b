//! Stream entries that cannot be recorded: counts how often the store has refused each, and makes dead letters of them.

use std::collections::HashMap;

use tokio::time::Instant;
use weir_core::sale::Sku;
use weir_core::{MessageId, Timestamp};
use weir_store::sale::DeadPurchase;

use super::persist::RETRY_PAUSES;
use super::reply::StreamEntry;

/// Stream entries that the store has refused and that will be tried again. The counts end with the worker.
#[derive(Debug, Default)]
pub(super) struct RefusedEntries(HashMap<Sku, HashMap<String, RefusedEntry>>);

#[derive(Debug)]
struct RefusedEntry {
    attempts: u32,
    retry_at: Instant,
}

impl RefusedEntries {
    /// Removes the entries of all other sales, which no longer exist.
    pub(super) fn retain_sales(&mut self, skus: &[Sku]) {
        self.0.retain(|sku, _| skus.contains(sku));
    }

    /// Removes all other entries of a sale: another worker has moved them.
    pub(super) fn retain_entries(&mut self, sku: &Sku, entries: &[StreamEntry]) {
        if let Some(refused) = self.0.get_mut(sku) {
            refused.retain(|id, _| entries.iter().any(|entry| entry.id == *id));
            if refused.is_empty() {
                self.0.remove(sku);
            }
        }
    }

    /// Returns whether an entry was refused and its next attempt is not due yet.
    pub(super) fn is_backing_off(&self, sku: &Sku, entry_id: &str) -> bool {
        let refused = self.0.get(sku).and_then(|refused| refused.get(entry_id));
        refused.is_some_and(|refused| Instant::now() < refused.retry_at)
    }

    /// Records a refusal. Returns the number of attempts if that was the last one.
    pub(super) fn refuse(&mut self, sku: &Sku, entry_id: &str, reason: &str) -> Option<u32> {
        let refused = self.0.entry(sku.clone()).or_default();
        let attempts = refused.get(entry_id).map_or(0, |refused| refused.attempts) + 1;
        let pause = usize::try_from(attempts).ok().and_then(|attempts| RETRY_PAUSES.get(attempts - 1));
        let Some(pause) = pause else {
            refused.remove(entry_id);
            if refused.is_empty() {
                self.0.remove(sku);
            }
            return Some(attempts);
        };
        tracing::warn!(%sku, entry = entry_id, attempts, reason, ?pause, "the store refused a purchase; retrying after the pause");
        refused.insert(entry_id.to_owned(), RefusedEntry { attempts, retry_at: Instant::now() + *pause });
        None
    }
}

/// Turns an entry into a dead letter.
pub(super) fn dead_letter(sku: &Sku, entry: &StreamEntry, reason: String, attempts: u32) -> DeadPurchase {
    let id = dead_letter_id(sku, &entry.id);
    tracing::error!(%sku, entry = entry.id, id, reason, "cannot record a purchase; it becomes a dead letter");
    DeadPurchase { id, sku: sku.clone(), payload: entry.json.clone(), reason, attempts }
}

/// Returns the id of an entry's dead letter: the same for every worker, and ordered by time.
fn dead_letter_id(sku: &Sku, entry_id: &str) -> String {
    let millis: i64 = entry_id.split('-').next().and_then(|millis| millis.parse().ok()).unwrap_or(0);
    // FNV-1a: the id need not be hard to guess, only the same everywhere.
    let hash = |hash: u128, byte: &u8| {
        (hash ^ u128::from(*byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
    };
    let bytes = sku.as_str().as_bytes().iter().chain(b" ").chain(entry_id.as_bytes());
    let hash = bytes.fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, hash);
    let mut random = [0; 10];
    random.copy_from_slice(&hash.to_be_bytes()[6..]);
    MessageId::new(Timestamp::from_micros(millis.saturating_mul(1_000)), random).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sku(text: &str) -> Sku {
        Sku::parse(text).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn an_entry_is_retried_after_each_pause_and_then_given_up() {
        let (mut refused, w) = (RefusedEntries::default(), sku("W"));
        for (n, pause) in (1_u32..).zip(RETRY_PAUSES) {
            assert_eq!(refused.refuse(&w, "1-1", "no"), None, "{n}");
            assert!(refused.is_backing_off(&w, "1-1") && !refused.is_backing_off(&w, "1-2"));
            tokio::time::advance(pause - std::time::Duration::from_millis(1)).await;
            assert!(refused.is_backing_off(&w, "1-1"), "{n}");
            tokio::time::advance(std::time::Duration::from_millis(1)).await;
            assert!(!refused.is_backing_off(&w, "1-1"), "{n}");
        }
        assert_eq!(refused.refuse(&w, "1-1", "no"), Some(4));
        assert!(refused.0.is_empty());
    }

    #[test]
    fn entries_that_left_the_stream_are_removed() {
        let (mut refused, w) = (RefusedEntries::default(), sku("W"));
        refused.refuse(&w, "1-1", "no");
        refused.refuse(&w, "1-2", "no");
        let remaining = StreamEntry { id: "1-2".to_owned(), purchase: None, json: String::new() };
        refused.retain_entries(&w, std::slice::from_ref(&remaining));
        assert!(refused.is_backing_off(&w, "1-2") && !refused.is_backing_off(&w, "1-1"));
        refused.retain_entries(&w, &[]);
        assert!(refused.0.is_empty());
    }

    #[test]
    fn ids_are_the_same_for_the_same_entry_and_ordered_by_time() {
        let id = |sku_text: &str, entry: &str| dead_letter_id(&sku(sku_text), entry);
        assert_eq!(id("W", "1771149600000-0"), id("W", "1771149600000-0"));
        assert_ne!(id("W", "1771149600000-0"), id("X", "1771149600000-0"));
        assert_ne!(id("W", "1771149600000-0"), id("W", "1771149600000-1"));
        assert!(id("W", "1771149600000-9") < id("W", "1771149600001-0"));
        assert_eq!(id("W", "nonsense").len(), 36);
    }
}
