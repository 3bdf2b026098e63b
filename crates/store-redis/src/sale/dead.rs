//! What cannot be written down: how often the store has refused it, and what is kept of it as a dead letter.

use std::collections::HashMap;

use tokio::time::Instant;
use weir_core::sale::Sku;
use weir_core::{MessageId, Timestamp};
use weir_store::sale::DeadPurchase;

use super::follow::RETRIES;
use super::reply::Entry;

/// Entries of streams that the store has refused, and that are tried again. A worker that starts anew counts anew.
#[derive(Debug, Default)]
pub(super) struct Refusals(HashMap<Sku, HashMap<String, Refused>>);

#[derive(Debug)]
struct Refused {
    attempts: u32,
    again_at: Instant,
}

impl Refusals {
    /// Forgets those of sales that are gone.
    pub(super) fn keep_sales(&mut self, skus: &[Sku]) {
        self.0.retain(|sku, _| skus.contains(sku));
    }

    /// Forgets entries that are not there any more: another worker has moved them.
    pub(super) fn keep(&mut self, sku: &Sku, entries: &[Entry]) {
        if let Some(refused) = self.0.get_mut(sku) {
            refused.retain(|name, _| entries.iter().any(|entry| entry.name == *name));
            if refused.is_empty() {
                self.0.remove(sku);
            }
        }
    }

    /// Whether it is too early to try an entry again.
    pub(super) fn is_waiting(&self, sku: &Sku, entry: &str) -> bool {
        let refused = self.0.get(sku).and_then(|refused| refused.get(entry));
        refused.is_some_and(|refused| Instant::now() < refused.again_at)
    }

    /// Takes note of a refusal. How often it was tried, when that was often enough.
    pub(super) fn refuse(&mut self, sku: &Sku, entry: &str, reason: &str) -> Option<u32> {
        let refused = self.0.entry(sku.clone()).or_default();
        let attempts = refused.get(entry).map_or(0, |refused| refused.attempts) + 1;
        let pause = usize::try_from(attempts).ok().and_then(|attempts| RETRIES.get(attempts - 1));
        let Some(pause) = pause else {
            refused.remove(entry);
            if refused.is_empty() {
                self.0.remove(sku);
            }
            return Some(attempts);
        };
        tracing::warn!(%sku, entry, attempts, reason, ?pause, "a purchase was refused by the store; trying again");
        refused.insert(entry.to_owned(), Refused { attempts, again_at: Instant::now() + *pause });
        None
    }
}

/// An entry as a dead letter.
pub(super) fn letter(sku: &Sku, entry: &Entry, reason: String, attempts: u32) -> DeadPurchase {
    let id = name(sku, &entry.name);
    tracing::error!(%sku, entry = entry.name, id, reason, "a purchase could not be written down and is kept as a dead letter");
    DeadPurchase { id, sku: sku.clone(), payload: entry.text.clone(), reason, attempts }
}

/// The name of an entry as a dead letter: the same whichever worker finds it, and in order of time among the others.
fn name(sku: &Sku, entry: &str) -> String {
    let millis: i64 = entry.split('-').next().and_then(|millis| millis.parse().ok()).unwrap_or(0);
    // FNV-1a: it need not be hard to guess, only the same everywhere.
    let hash = |hash: u128, byte: &u8| {
        (hash ^ u128::from(*byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
    };
    let bytes = sku.as_str().as_bytes().iter().chain(b" ").chain(entry.as_bytes());
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
    async fn an_entry_is_tried_again_after_each_pause_and_then_no_more() {
        let (mut refusals, w) = (Refusals::default(), sku("W"));
        for (n, pause) in (1_u32..).zip(RETRIES) {
            assert_eq!(refusals.refuse(&w, "1-1", "no"), None, "{n}");
            assert!(refusals.is_waiting(&w, "1-1") && !refusals.is_waiting(&w, "1-2"));
            tokio::time::advance(pause - std::time::Duration::from_millis(1)).await;
            assert!(refusals.is_waiting(&w, "1-1"), "{n}");
            tokio::time::advance(std::time::Duration::from_millis(1)).await;
            assert!(!refusals.is_waiting(&w, "1-1"), "{n}");
        }
        assert_eq!(refusals.refuse(&w, "1-1", "no"), Some(4));
        assert!(refusals.0.is_empty());
    }

    #[test]
    fn entries_that_are_gone_are_forgotten() {
        let (mut refusals, w) = (Refusals::default(), sku("W"));
        refusals.refuse(&w, "1-1", "no");
        refusals.refuse(&w, "1-2", "no");
        let left = Entry { name: "1-2".to_owned(), purchase: None, text: String::new() };
        refusals.keep(&w, std::slice::from_ref(&left));
        assert!(refusals.is_waiting(&w, "1-2") && !refusals.is_waiting(&w, "1-1"));
        refusals.keep(&w, &[]);
        assert!(refusals.0.is_empty());
    }

    #[test]
    fn names_are_the_same_for_the_same_entry_and_in_order_of_time() {
        let name = |sku_text: &str, entry: &str| name(&sku(sku_text), entry);
        assert_eq!(name("W", "1771149600000-0"), name("W", "1771149600000-0"));
        assert_ne!(name("W", "1771149600000-0"), name("X", "1771149600000-0"));
        assert_ne!(name("W", "1771149600000-0"), name("W", "1771149600000-1"));
        assert!(name("W", "1771149600000-9") < name("W", "1771149600001-0"));
        assert_eq!(name("W", "nonsense").len(), 36);
    }
}
