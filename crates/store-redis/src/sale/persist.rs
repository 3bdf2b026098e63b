//! Records purchases from Redis in the store. Every server records what it has sold itself, within a moment, so that it survives
//! a Redis that loses its data, and removes it from the stream. A worker moves what is left in the stream: purchases of a server
//! that stopped, or that could not record them. Recording a purchase twice changes nothing. A purchase that the store refuses is
//! retried after each of the pauses, then becomes a dead letter (`dead_letter.rs`).

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures_util::future::join;
use tokio_util::sync::CancellationToken;
use weir_core::UserId;
use weir_core::sale::Sku;
use weir_store::sale::{ProductId, Purchase};
use weir_store::{Error, Result};

use super::dead_letter::{RefusedEntries, dead_letter};
use super::reply::StreamEntry;
use super::{RedisSales, SharedSales, malformed_reply, reply, sale_call};
use crate::client::KeyCall;
use crate::script::Script;

/// How often a server records its purchases while it sells.
const RECORD_EVERY: Duration = Duration::from_millis(50);
/// How often a server checks for purchases while it does not sell, and a worker polls the streams.
const POLL_EVERY: Duration = Duration::from_millis(250);
/// Younger entries are left to the server that has sold them.
const OWNER_RECORDS_FOR: Duration = Duration::from_secs(1);
/// How often the catalogue is read again without a subscription, and when reading it has failed.
const CATALOGUE_EVERY: Duration = Duration::from_secs(1);
/// How often it is read again while events announce changes.
const CATALOGUE_SUBSCRIBED_EVERY: Duration = Duration::from_secs(10);
/// How often a worker polls the streams while events announce purchases.
const POLL_SUBSCRIBED_EVERY: Duration = Duration::from_secs(2);
/// Purchases in one commit of the server that sold them. The next ones wait for it.
const RECORD_PAGE: usize = 2_000;
/// Purchases that a worker moves at once, and that one call removes from a stream.
const PAGE: usize = 1_000;
/// How often the number of waiting purchases is shown during a pause.
const SHOW_EVERY: Duration = Duration::from_secs(1);
/// Pauses after failures. While the whole store is down the last one repeats: no purchase is given up because of that.
pub(super) const RETRY_PAUSES: [Duration; 3] =
    [Duration::from_secs(1), Duration::from_secs(5), Duration::from_secs(25)];

/// Records the purchases of this process and refreshes the catalogue.
pub(super) async fn keep_recording(shared: Arc<SharedSales>) {
    let mut read_at = Instant::now();
    loop {
        let recorded = record_own(&shared).await;
        let is_subscribed = shared.is_subscribed.load(Ordering::SeqCst);
        let is_stale = shared.is_catalogue_stale.load(Ordering::SeqCst);
        let every = if is_subscribed && !is_stale { CATALOGUE_SUBSCRIBED_EVERY } else { CATALOGUE_EVERY };
        if read_at.elapsed() >= every {
            shared.is_catalogue_stale.store(false, Ordering::SeqCst);
            // While the store is down the cached catalogue stays in use.
            let read = shared.read_catalogue().await;
            shared.is_catalogue_stale.fetch_or(read.is_err(), Ordering::SeqCst);
            read_at = Instant::now();
        }
        match recorded {
            Ok(recorded) => {
                let pause = if recorded > 0 { RECORD_EVERY } else { POLL_EVERY };
                let _ = tokio::time::timeout(pause, shared.unrecorded.worth_a_commit()).await;
            }
            Err(error) => {
                tracing::debug!(error = %error.with_causes(), "cannot record purchases in the store; retrying");
                shared.unrecorded.store_failed();
                tokio::time::sleep(POLL_EVERY).await;
            }
        }
    }
}

/// Records the purchases that this process has sold until now, removes them from the streams, and returns their number.
pub(super) async fn record_own(shared: &SharedSales) -> Result<usize> {
    let mut count = 0;
    for (product, sku, last) in shared.unrecorded.last_numbers() {
        let mut recorded = Vec::new();
        loop {
            let page = shared.unrecorded.page(product, &sku, last, RECORD_PAGE);
            if page.purchases.is_empty() {
                shared.remove_recorded(&sku, recorded).await;
                break;
            }
            // The entries of one page are removed while the next one is recorded.
            let record = shared.record_each(product, &page.purchases);
            let (refused, ()) = join(record, shared.remove_recorded(&sku, recorded)).await;
            // A refused purchase stays in the stream: the worker retries it and makes it a dead letter.
            let refused = refused?;
            shared.unrecorded.forget(&page);
            count += page.purchases.len();
            let entries = page.purchases.into_iter().zip(page.entry_ids);
            let entries = entries.filter(|(purchase, _)| !refused.contains_key(&purchase.buyer));
            recorded = entries.map(|(_, entry_id)| entry_id).collect();
        }
    }
    Ok(count)
}

impl RedisSales {
    /// Moves purchases from the streams to the store, until the server stops.
    pub async fn persist_purchases(self, closing: CancellationToken) {
        let (mut failures, mut refused) = (0, RefusedEntries::default());
        loop {
            let pause = match self.shared.move_purchases(&mut refused).await {
                Ok((moved, remaining)) => {
                    failures = 0;
                    match (moved, remaining) {
                        (1.., _) => Some(Duration::ZERO),
                        (0, 1..) => Some(POLL_EVERY),
                        (0, 0) => None,
                    }
                }
                Err(error) => {
                    let pause = RETRY_PAUSES[failures.min(RETRY_PAUSES.len() - 1)];
                    tracing::warn!(error = %error.with_causes(), ?pause, "cannot move purchases from Redis to the store; retrying after the pause");
                    failures += 1;
                    Some(pause)
                }
            };
            tokio::select! {
                () = self.shared.wait(pause) => {}
                () = closing.cancelled() => return,
            }
        }
    }
}

impl SharedSales {
    /// Waits for `pause`, or without one until there may be a new purchase. The number of purchases that wait is shown all the
    /// while: it matters most while the store is down.
    async fn wait(&self, pause: Option<Duration>) {
        let until = Instant::now() + pause.unwrap_or(POLL_EVERY);
        loop {
            let rest = until.saturating_duration_since(Instant::now());
            tokio::time::sleep(rest.min(SHOW_EVERY)).await;
            if rest <= SHOW_EVERY {
                break;
            }
            self.show_depth().await;
        }
        if pause.is_none() && self.is_subscribed.load(Ordering::SeqCst) {
            let _ = tokio::time::timeout(POLL_SUBSCRIBED_EVERY, self.entry_added.notified()).await;
        }
    }

    /// Shows how many purchases wait to be recorded. If Redis does not answer, the last number stays.
    async fn show_depth(&self) {
        let Ok(catalogue) = self.catalogue().await else { return };
        let skus: Vec<Sku> = catalogue.into_keys().collect();
        if let Ok(peeked) = self.peek(&skus).await {
            let waiting: u64 = peeked.iter().map(|peeked| peeked.waiting).sum();
            self.metrics.depth.set(i64::try_from(waiting).unwrap_or(i64::MAX));
        }
    }

    /// Removes entries of recorded purchases from the stream of a sale. If it fails, the worker removes them.
    async fn remove_recorded(&self, sku: &Sku, entry_ids: Vec<String>) {
        for entry_ids in entry_ids.chunks(PAGE) {
            let _ = self.remove_entries(sku, entry_ids.to_vec()).await;
        }
    }

    /// Moves one page of each stream. Returns how many purchases were moved and how many remain.
    async fn move_purchases(&self, refused: &mut RefusedEntries) -> Result<(usize, usize)> {
        let skus: Vec<Sku> = self.catalogue().await?.into_keys().collect();
        refused.retain_sales(&skus);
        let calls: Vec<KeyCall> = skus.iter().map(|sku| sale_call(sku, Vec::new())).collect();
        let bounds = [&*PAGE.to_string(), &OWNER_RECORDS_FOR.as_millis().to_string()];
        let replies = self.call(Script::SaleRead, &bounds, &calls).await?;
        let read = replies.iter().map(|reply| reply::parse_entries(reply).ok_or_else(malformed_reply));
        let read = read.collect::<Result<Vec<_>>>()?;
        let waiting: usize = read.iter().map(|(length, _)| length).sum();
        // Before they are recorded: that fails while the store is down.
        self.metrics.depth.set(i64::try_from(waiting).unwrap_or(i64::MAX));
        let mut moved = 0;
        for (sku, (_, entries)) in skus.iter().zip(read) {
            moved += self.move_entries(sku, entries, refused).await?;
        }
        let remaining = waiting.saturating_sub(moved);
        self.metrics.depth.set(i64::try_from(remaining).unwrap_or(i64::MAX));
        Ok((moved, remaining))
    }

    /// Records entries and removes them from the stream. An entry that the store refuses stays there until its attempts are used
    /// up and then becomes a dead letter; one that is no purchase does so at once.
    async fn move_entries(
        &self,
        sku: &Sku,
        entries: Vec<StreamEntry>,
        refused_entries: &mut RefusedEntries,
    ) -> Result<usize> {
        refused_entries.retain_entries(sku, &entries);
        let (mut finished, mut dead) = (Vec::new(), Vec::new());
        let mut by_product: BTreeMap<ProductId, Vec<(StreamEntry, Purchase)>> = BTreeMap::new();
        for mut entry in entries {
            match entry.purchase.take() {
                None => {
                    dead.push(dead_letter(sku, &entry, "the stream entry is not a purchase".to_owned(), 1))
                }
                Some(_) if refused_entries.is_backing_off(sku, &entry.id) => continue,
                // This server is about to record it, and recording it twice would only delay it.
                Some(purchase) if self.unrecorded.contains(sku, &purchase) => continue,
                Some(purchase) => {
                    by_product.entry(purchase.product).or_default().push((entry, purchase));
                    continue;
                }
            }
            finished.push(entry.id);
        }
        for (product, entries) in by_product {
            let purchases: Vec<Purchase> = entries.iter().map(|(_, purchase)| purchase.clone()).collect();
            let refused = self.record_each(product, &purchases).await?;
            for (entry, purchase) in entries {
                if let Some(error) = refused.get(&purchase.buyer) {
                    let reason = error.with_causes().to_string();
                    let Some(attempts) = refused_entries.refuse(sku, &entry.id, &reason) else { continue };
                    dead.push(dead_letter(sku, &entry, reason, attempts));
                }
                finished.push(entry.id);
            }
        }
        if !dead.is_empty() {
            self.ledger.save_dead_purchases(dead).await?;
        }
        self.remove_entries(sku, finished).await
    }

    /// Removes entries from the stream of a sale. Returns how many of them were there.
    async fn remove_entries(&self, sku: &Sku, entry_ids: Vec<String>) -> Result<usize> {
        if entry_ids.is_empty() {
            return Ok(0);
        }
        let arguments = std::iter::once(entry_ids.len().to_string()).chain(entry_ids).collect();
        let replies = self.call(Script::SaleRemove, &[], &[sale_call(sku, arguments)]).await?;
        match replies.first() {
            Some(redis::Value::Int(removed)) => Ok(usize::try_from(*removed).unwrap_or(0)),
            _ => Err(malformed_reply()),
        }
    }

    /// Records purchases of one product, in smaller parts if the store refuses them together. Returns the error of each buyer
    /// whose purchase was refused.
    pub(super) async fn record_each(
        &self,
        product: ProductId,
        purchases: &[Purchase],
    ) -> Result<HashMap<UserId, Error>> {
        let (mut refused, mut pending) = (HashMap::new(), vec![purchases]);
        while let Some(part) = pending.pop() {
            match (self.ledger.record_purchases(product, part.to_vec()).await, part) {
                (Ok(None), [_, ..]) => {
                    let (product, count) = (product.0, part.len());
                    tracing::info!(product, count, "dropped purchases of a product that was removed");
                }
                (Ok(_), _) => {}
                (Err(error), _) if error.is_transient() || part.is_empty() => return Err(error),
                (Err(error), [purchase]) => drop(refused.insert(purchase.buyer.clone(), error)),
                (Err(_), _) => pending.extend(<[_; 2]>::from(part.split_at(part.len() / 2))),
            }
        }
        Ok(refused)
    }
}
