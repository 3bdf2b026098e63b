//! Moving what Redis has sold to the store. Every server writes down what it has sold itself, within a moment, so that it is safe
//! from a Redis that forgets, and takes it out of the stream. A worker moves what is left there: what a server that is gone has
//! sold, or could not write down. Writing something down twice changes nothing. What the store refuses is tried again after each of
//! the pauses, then kept as a dead letter (`dead.rs`).

use std::collections::{BTreeMap, HashMap};
use std::sync::Weak;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use weir_core::UserId;
use weir_core::sale::Sku;
use weir_store::sale::{ProductId, Purchase};
use weir_store::{Error, Result};

use super::dead::{self, Refusals};
use super::reply::Entry;
use super::{Parts, RedisSales, Sold, item, reply, unreadable};
use crate::client::Item;
use crate::script::Script;

/// How often a server writes down what it has sold, while it sells.
const RECORD_PACE: Duration = Duration::from_millis(50);
/// How often it looks while it does not, and a worker looks for more.
const PACE: Duration = Duration::from_millis(250);
/// How long the server that has sold something may take to write it down: younger entries are left to it.
const LEFT_FOR: Duration = Duration::from_secs(1);
/// How often names and terms are read again: seldom while changes are told.
const CATALOGUE_EVERY: Duration = Duration::from_secs(1);
const CATALOGUE_TOLD_EVERY: Duration = Duration::from_secs(10);
/// How often a worker looks for more while it is told what is sold.
const PACE_TOLD: Duration = Duration::from_secs(2);
/// Purchases in one commit of the server that sold them. A commit takes as long for many as for few, and behind it wait those that
/// are sold meanwhile.
const RECORD_PAGE: usize = 4_000;
/// Purchases that a worker moves at once, and that one call takes out of a stream.
const PAGE: usize = 1_000;
/// Pauses after failures; of the store as a whole the last one again and again: nothing that was sold is given up while it is
/// down.
pub(super) const RETRIES: [Duration; 3] =
    [Duration::from_secs(1), Duration::from_secs(5), Duration::from_secs(25)];

/// Writes down what this process has sold, as long as it sells.
pub(super) async fn keep_recording(parts: Weak<Parts>) {
    let mut read_at = Instant::now();
    while let Some(parts) = parts.upgrade() {
        let recorded = record_unsettled(&parts).await.unwrap_or_else(|error| {
            tracing::debug!(error = %error.with_causes(), "purchases are written down later");
            0
        });
        let is_told = parts.is_told.load(Ordering::SeqCst);
        let is_late = parts.is_catalogue_late.load(Ordering::SeqCst);
        let every = if is_told && !is_late { CATALOGUE_TOLD_EVERY } else { CATALOGUE_EVERY };
        if read_at.elapsed() >= every {
            parts.is_catalogue_late.store(false, Ordering::SeqCst);
            // While the store is down, what it said last holds.
            let read = parts.read_catalogue().await;
            parts.is_catalogue_late.fetch_or(read.is_err(), Ordering::SeqCst);
            read_at = Instant::now();
        }
        drop(parts);
        tokio::time::sleep(if recorded > 0 { RECORD_PACE } else { PACE }).await;
    }
}

/// Writes down what this process has sold, and takes it out of the streams. How much that was.
pub(super) async fn record_unsettled(parts: &Parts) -> Result<usize> {
    let mut recorded = 0;
    let sold = parts.unsettled.lock().clone();
    for ((product, sku), purchases) in sold {
        let mut purchases: Vec<(UserId, Sold)> = purchases.into_iter().collect();
        purchases.sort_unstable_by_key(|(_, sold)| sold.receipt.number);
        for page in purchases.chunks(RECORD_PAGE) {
            let purchase = |(buyer, sold): &(UserId, Sold)| Purchase {
                product,
                buyer: buyer.clone(),
                receipt: sold.receipt,
            };
            let written: Vec<Purchase> = page.iter().map(purchase).collect();
            // What the store refuses stays in the stream, for the worker, which tries again and keeps it.
            let refused = parts.record_each(product, &written).await?;
            parts.settle(product, &sku, page);
            let is_written = |(buyer, _): &&(UserId, Sold)| !refused.contains_key(buyer);
            let entries: Vec<String> =
                page.iter().filter(is_written).map(|(_, sold)| sold.entry.clone()).collect();
            for entries in entries.chunks(PAGE) {
                // A Redis that does not answer leaves it to the worker.
                let _ = parts.take_out(&sku, entries.to_vec()).await;
            }
            recorded += page.len();
        }
    }
    Ok(recorded)
}

impl RedisSales {
    /// Moves purchases from the streams to the store, until the server stops.
    pub async fn follow(self, closing: CancellationToken) {
        let (mut failures, mut refusals) = (0, Refusals::default());
        loop {
            let pause = match self.parts.move_purchases(&mut refusals).await {
                Ok((moved, left)) => {
                    failures = 0;
                    match (moved, left) {
                        (1.., _) => Some(Duration::ZERO),
                        (0, 1..) => Some(PACE),
                        (0, 0) => None,
                    }
                }
                Err(error) => {
                    let pause = RETRIES[failures.min(RETRIES.len() - 1)];
                    tracing::warn!(error = %error.with_causes(), ?pause, "purchases could not be written down; trying again");
                    failures += 1;
                    Some(pause)
                }
            };
            tokio::select! {
                () = self.parts.rest(pause) => {}
                () = closing.cancelled() => return,
            }
        }
    }
}

impl Parts {
    /// A pause; without one that is given, until something may have been sold.
    async fn rest(&self, pause: Option<Duration>) {
        tokio::time::sleep(pause.unwrap_or(PACE)).await;
        if pause.is_none() && self.is_told.load(Ordering::SeqCst) {
            let _ = tokio::time::timeout(PACE_TOLD, self.sold.notified()).await;
        }
    }

    /// Whether this process has sold it and is about to write it down.
    fn is_unsettled(&self, sku: &Sku, purchase: &Purchase) -> bool {
        let key = (purchase.product, sku.clone());
        self.unsettled.lock().get(&key).is_some_and(|sold| sold.contains_key(&purchase.buyer))
    }

    /// Forgets purchases that are written down, or that only the worker can do something about.
    fn settle(&self, product: ProductId, sku: &Sku, page: &[(UserId, Sold)]) {
        let (mut unsettled, key) = (self.unsettled.lock(), (product, sku.clone()));
        if let Some(left) = unsettled.get_mut(&key) {
            page.iter().for_each(|(buyer, _)| drop(left.remove(buyer)));
            if left.is_empty() {
                unsettled.remove(&key);
            }
        }
    }

    /// Moves what waits, one page of each sale. How much that was, and how much is left.
    async fn move_purchases(&self, refusals: &mut Refusals) -> Result<(usize, usize)> {
        let skus: Vec<Sku> = self.catalogue().await?.into_keys().collect();
        refusals.keep_sales(&skus);
        let items: Vec<Item> = skus.iter().map(|sku| item(sku, Vec::new())).collect();
        let bounds = [&*PAGE.to_string(), &LEFT_FOR.as_millis().to_string()];
        let answers = self.ask(Script::SaleTake, &bounds, &items).await?;
        let mut moved = 0;
        let mut waiting = 0;
        for (sku, answer) in skus.iter().zip(answers) {
            let (there, entries) = reply::entries(&answer).ok_or_else(unreadable)?;
            waiting += there;
            moved += self.write_down(sku, entries, refusals).await?;
        }
        let left = waiting.saturating_sub(moved);
        self.metrics.depth.set(i64::try_from(left).unwrap_or(i64::MAX));
        Ok((moved, left))
    }

    /// Writes purchases down and takes them out of the stream. What the store refuses stays there until it has been tried often
    /// enough, and is then kept as a dead letter, as is at once what is no purchase.
    async fn write_down(&self, sku: &Sku, entries: Vec<Entry>, refusals: &mut Refusals) -> Result<usize> {
        refusals.keep(sku, &entries);
        let (mut settled, mut dead) = (Vec::new(), Vec::new());
        let mut by_product: BTreeMap<ProductId, Vec<(Entry, Purchase)>> = BTreeMap::new();
        for mut entry in entries {
            match entry.purchase.take() {
                None => dead.push(dead::letter(sku, &entry, "it is no purchase".to_owned(), 1)),
                Some(_) if refusals.is_waiting(sku, &entry.name) => continue,
                // Late, but on its way: writing it down twice would only make it later.
                Some(purchase) if self.is_unsettled(sku, &purchase) => continue,
                Some(purchase) => {
                    by_product.entry(purchase.product).or_default().push((entry, purchase));
                    continue;
                }
            }
            settled.push(entry.name);
        }
        for (product, entries) in by_product {
            let purchases: Vec<Purchase> = entries.iter().map(|(_, purchase)| purchase.clone()).collect();
            let refused = self.record_each(product, &purchases).await?;
            for (entry, purchase) in entries {
                if let Some(error) = refused.get(&purchase.buyer) {
                    let reason = error.with_causes().to_string();
                    let Some(attempts) = refusals.refuse(sku, &entry.name, &reason) else { continue };
                    dead.push(dead::letter(sku, &entry, reason, attempts));
                }
                settled.push(entry.name);
            }
        }
        if !dead.is_empty() {
            self.ledger.save_dead_purchases(dead).await?;
        }
        self.take_out(sku, settled).await
    }

    async fn take_out(&self, sku: &Sku, entries: Vec<String>) -> Result<usize> {
        if entries.is_empty() {
            return Ok(0);
        }
        let arguments = std::iter::once(entries.len().to_string()).chain(entries).collect();
        let answers = self.ask(Script::SaleDone, &[], &[item(sku, arguments)]).await?;
        match answers.first() {
            Some(redis::Value::Int(moved)) => Ok(usize::try_from(*moved).unwrap_or(0)),
            _ => Err(Error::failed(crate::ENGINE, "sale_done must answer with a number")),
        }
    }

    /// Writes down purchases of one product, in smaller parts if the store refuses them together. Whose were refused, and why.
    pub(super) async fn record_each(
        &self,
        product: ProductId,
        purchases: &[Purchase],
    ) -> Result<HashMap<UserId, Error>> {
        let (mut refused, mut open) = (HashMap::new(), vec![purchases]);
        while let Some(part) = open.pop() {
            match (self.ledger.record_purchases(product, part.to_vec()).await, part) {
                (Ok(None), [_, ..]) => {
                    let (product, count) = (product.0, part.len());
                    tracing::info!(product, count, "purchases of a product that was removed are left out");
                }
                (Ok(_), _) => {}
                (Err(error), _) if error.is_transient() || part.is_empty() => return Err(error),
                (Err(error), [purchase]) => drop(refused.insert(purchase.buyer.clone(), error)),
                (Err(_), _) => open.extend(<[_; 2]>::from(part.split_at(part.len() / 2))),
            }
        }
        Ok(refused)
    }
}
