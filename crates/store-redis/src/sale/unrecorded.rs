//! The purchases that this process has sold and that are not known to be recorded in the store.
//!
//! They bound how far the store may be behind: while it records, buyers wait for it. A store that records nothing holds up
//! nobody; further purchases are then only in the stream and, up to a bound, here.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use weir_core::UserId;
use weir_core::sale::{PurchaseReceipt, Sku};
use weir_store::sale::{ProductId, Purchase};

/// The most purchases that are remembered until they are recorded; further ones are only in the stream.
const REMEMBERED_MAX: usize = 200_000;
/// As many are worth a commit of their own, without waiting for more.
const WORTH_A_COMMIT: usize = 1_000;
/// Buyers wait for the store when it is behind by more.
const BEHIND_MAX: usize = 3_000;
/// A store that has recorded nothing for so long holds up no buyers.
const STALLED_AFTER: Duration = Duration::from_millis(250);

/// One product's purchases by number. Two buyers may have the same number when Redis has lost purchases.
type ProductPurchases = BTreeMap<(u32, UserId), UnrecordedPurchase>;

#[derive(Debug)]
struct UnrecordedPurchase {
    receipt: PurchaseReceipt,
    /// The id of its entry in the stream.
    entry_id: String,
}

#[derive(Debug, Default)]
struct Remembered {
    by_product: BTreeMap<(ProductId, Sku), ProductPurchases>,
    count: usize,
}

#[derive(Debug, Default)]
pub(super) struct UnrecordedPurchases {
    remembered: Mutex<Remembered>,
    /// Notified when there are enough for a commit.
    is_worth_a_commit: Notify,
    /// Notified when purchases were recorded, and when the store fails.
    recorded: Notify,
    is_store_stalled: AtomicBool,
}

/// Purchases of one product, with the ids of their entries in the stream, in order of number.
pub(super) struct Page {
    pub(super) product: ProductId,
    pub(super) sku: Sku,
    pub(super) purchases: Vec<Purchase>,
    pub(super) entry_ids: Vec<String>,
}

impl UnrecordedPurchases {
    /// Waits until the store is not too far behind, or records nothing.
    pub(super) async fn wait_for_store(&self) {
        loop {
            let recorded = self.recorded.notified();
            if self.is_store_stalled.load(Ordering::SeqCst) || self.remembered.lock().count < BEHIND_MAX {
                return;
            }
            if tokio::time::timeout(STALLED_AFTER, recorded).await.is_err() {
                self.is_store_stalled.store(true, Ordering::SeqCst);
            }
        }
    }

    /// Remembers purchases of one sale: the product, the buyer, the receipt and the id of the entry in the stream.
    pub(super) fn remember<'a>(
        &self,
        sku: &Sku,
        purchases: impl Iterator<Item = (ProductId, &'a UserId, PurchaseReceipt, String)>,
    ) {
        let mut remembered = self.remembered.lock();
        let Remembered { by_product, count } = &mut *remembered;
        for (product, buyer, receipt, entry_id) in purchases {
            if *count >= REMEMBERED_MAX {
                break;
            }
            let purchases = by_product.entry((product, sku.clone())).or_default();
            let purchase = UnrecordedPurchase { receipt, entry_id };
            *count += usize::from(purchases.insert((receipt.number, buyer.clone()), purchase).is_none());
        }
        if *count >= WORTH_A_COMMIT {
            self.is_worth_a_commit.notify_one();
        }
    }

    /// Returns whether this process has sold the purchase and is about to record it.
    pub(super) fn contains(&self, sku: &Sku, purchase: &Purchase) -> bool {
        let (product, number) = ((purchase.product, sku.clone()), purchase.receipt.number);
        let remembered = self.remembered.lock();
        let purchases = remembered.by_product.get(&product);
        purchases.is_some_and(|purchases| purchases.contains_key(&(number, purchase.buyer.clone())))
    }

    /// The last number of each product.
    pub(super) fn last_numbers(&self) -> Vec<(ProductId, Sku, u32)> {
        let remembered = self.remembered.lock();
        let products = remembered.by_product.iter();
        products
            .filter_map(|((product, sku), purchases)| {
                purchases.last_key_value().map(|((number, _), _)| (*product, sku.clone(), *number))
            })
            .collect()
    }

    /// The first purchases of a product, `size` at most and none after number `last`.
    pub(super) fn page(&self, product: ProductId, sku: &Sku, last: u32, size: usize) -> Page {
        let mut page = Page { product, sku: sku.clone(), purchases: Vec::new(), entry_ids: Vec::new() };
        let remembered = self.remembered.lock();
        let purchases = remembered.by_product.get(&(product, sku.clone())).into_iter().flatten();
        for ((_, buyer), purchase) in purchases.take_while(|((number, _), _)| *number <= last).take(size) {
            page.purchases.push(Purchase { product, buyer: buyer.clone(), receipt: purchase.receipt });
            page.entry_ids.push(purchase.entry_id.clone());
        }
        page
    }

    /// Forgets purchases that are recorded, or refused and thus left to the worker.
    pub(super) fn forget(&self, page: &Page) {
        let mut remembered = self.remembered.lock();
        let Remembered { by_product, count } = &mut *remembered;
        let product = (page.product, page.sku.clone());
        if let Some(purchases) = by_product.get_mut(&product) {
            for purchase in &page.purchases {
                let number = (purchase.receipt.number, purchase.buyer.clone());
                *count -= usize::from(purchases.remove(&number).is_some());
            }
            if purchases.is_empty() {
                by_product.remove(&product);
            }
        }
        if *count < BEHIND_MAX {
            self.is_store_stalled.store(false, Ordering::SeqCst);
        }
        drop(remembered);
        self.recorded.notify_waiters();
    }

    /// Lets buyers go on while the store fails.
    pub(super) fn store_failed(&self) {
        self.is_store_stalled.store(true, Ordering::SeqCst);
        self.recorded.notify_waiters();
    }

    /// Waits until there are enough purchases for a commit.
    pub(super) async fn worth_a_commit(&self) {
        self.is_worth_a_commit.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future as _;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use weir_core::Timestamp;

    use super::*;

    const PRODUCT: ProductId = ProductId(1);

    fn sku() -> Sku {
        Sku::parse("W").unwrap()
    }

    /// Remembers one purchase for each of `numbers`.
    fn remember(unrecorded: &UnrecordedPurchases, numbers: std::ops::Range<usize>) {
        for number in numbers {
            let receipt = PurchaseReceipt { number: u32::try_from(number).unwrap(), at: Timestamp::EPOCH };
            let buyer = UserId::parse(format!("buyer-{number}")).unwrap();
            let purchase = (PRODUCT, &buyer, receipt, format!("{number}-1"));
            unrecorded.remember(&sku(), std::iter::once(purchase));
        }
    }

    fn count(unrecorded: &UnrecordedPurchases) -> usize {
        unrecorded.remembered.lock().count
    }

    #[test]
    fn remembered_purchases_are_bounded() {
        let unrecorded = UnrecordedPurchases::default();
        remember(&unrecorded, 1..REMEMBERED_MAX + 10);
        assert_eq!(count(&unrecorded), REMEMBERED_MAX);
    }

    #[test]
    fn pages_are_in_order_of_number_and_end_at_the_last_one_asked_for() {
        let unrecorded = UnrecordedPurchases::default();
        remember(&unrecorded, 5..8);
        remember(&unrecorded, 1..5);
        assert_eq!(unrecorded.last_numbers(), [(PRODUCT, sku(), 7)]);
        let numbers = |size| {
            let page = unrecorded.page(PRODUCT, &sku(), 6, size);
            page.purchases.iter().map(|purchase| purchase.receipt.number).collect::<Vec<_>>()
        };
        assert_eq!(numbers(4), [1, 2, 3, 4]);
        assert_eq!(numbers(10), [1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn two_buyers_with_the_same_number_are_both_recorded() {
        let unrecorded = UnrecordedPurchases::default();
        let receipt = PurchaseReceipt { number: 1, at: Timestamp::EPOCH };
        for buyer in ["first", "second"] {
            let buyer = UserId::parse(buyer).unwrap();
            unrecorded.remember(&sku(), std::iter::once((PRODUCT, &buyer, receipt, "1-1".to_owned())));
        }
        let page = unrecorded.page(PRODUCT, &sku(), 1, 10);
        assert_eq!(page.purchases.len(), 2);
        unrecorded.forget(&page);
        unrecorded.forget(&page);
        assert_eq!(count(&unrecorded), 0);
    }

    #[tokio::test]
    async fn buyers_wait_until_the_store_has_recorded_a_page() {
        let unrecorded = UnrecordedPurchases::default();
        remember(&unrecorded, 1..BEHIND_MAX + 1);
        let mut waiting = pin!(unrecorded.wait_for_store());
        let mut context = Context::from_waker(Waker::noop());
        assert!(waiting.as_mut().poll(&mut context).is_pending());
        let page = unrecorded.page(PRODUCT, &sku(), u32::MAX, 1);
        assert!(unrecorded.contains(&sku(), &page.purchases[0]));
        unrecorded.forget(&page);
        assert!(!unrecorded.contains(&sku(), &page.purchases[0]));
        assert_eq!(waiting.as_mut().poll(&mut context), Poll::Ready(()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_fails_or_hangs_holds_up_nobody_until_it_has_caught_up() {
        let unrecorded = UnrecordedPurchases::default();
        remember(&unrecorded, 1..BEHIND_MAX + 2);
        // It hangs: the clock of the test goes on as soon as everything waits for it.
        unrecorded.wait_for_store().await;
        let is_stalled = || unrecorded.is_store_stalled.load(Ordering::SeqCst);
        assert!(is_stalled());
        unrecorded.forget(&unrecorded.page(PRODUCT, &sku(), u32::MAX, 1));
        assert!(is_stalled(), "it is still behind");
        unrecorded.forget(&unrecorded.page(PRODUCT, &sku(), u32::MAX, 1));
        assert!(!is_stalled());
        remember(&unrecorded, BEHIND_MAX + 2..BEHIND_MAX + 4);
        let mut waiting = pin!(unrecorded.wait_for_store());
        let mut context = Context::from_waker(Waker::noop());
        assert!(waiting.as_mut().poll(&mut context).is_pending());
        unrecorded.store_failed();
        assert_eq!(waiting.as_mut().poll(&mut context), Poll::Ready(()));
    }
}
