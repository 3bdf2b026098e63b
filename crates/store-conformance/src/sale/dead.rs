//! Purchases that could not be persisted: every ledger stores them as dead letters that can be replayed.

use std::time::Duration;

use weir_queue::{Queue, Settlement};
use weir_store::sale::{DeadPurchase, PURCHASES_TOPIC, SaleLedger};

use super::fixtures::sku;

/// A dead purchase is stored once however often it is reported, is listed, can be claimed after a replay, and ends when it
/// is done or discarded.
///
/// # Panics
/// If the ledger behaves differently.
pub async fn purchases_that_could_not_be_persisted_become_dead_letters_once_and_can_be_replayed(
    store: &(impl SaleLedger + Queue),
) {
    let dead = |id: u8| DeadPurchase {
        id: format!("0191{id:04}-0000-7000-8000-000000000000"),
        sku: sku("W"),
        payload: format!("{{\"n\":\"{id}\"}}"),
        reason: "refused\0".to_owned(),
        attempts: 4,
    };
    store.save_dead_purchases(vec![dead(1), dead(2)]).await.expect("bury_purchases must succeed");
    store.save_dead_purchases(vec![dead(2), dead(3)]).await.expect("bury_purchases must succeed");
    let letters = store.dead_letters(None, 10, usize::MAX).await.expect("a list");
    assert_eq!(letters.len(), 3, "{letters:?}");
    for (letter, n) in letters.iter().zip(1..) {
        let expected = dead(n);
        assert_eq!(
            (&letter.id, letter.topic.as_str(), letter.key.as_str()),
            (&expected.id, PURCHASES_TOPIC, "W")
        );
        assert_eq!((&letter.payload[..], letter.attempts), (expected.payload.as_bytes(), 4));
        assert!(letter.reason.starts_with("refused"), "{}", letter.reason);
    }
    assert!(store.discard(&dead(3).id).await.expect("an answer"));
    assert!(store.replay(&dead(2).id).await.expect("an answer"));
    let claim = store.claim(PURCHASES_TOPIC, 10, Duration::from_secs(60)).await.expect("a claim");
    let [message] = &claim.messages[..] else { panic!("one message must be claimed: {:?}", claim.messages) };
    assert_eq!((&message.payload[..], message.attempts), (dead(2).payload.as_bytes(), 0));
    let settlement = Settlement { done: vec![message.position], ..Settlement::default() };
    assert!(store.settle(&claim.receipt, settlement).await.expect("settle must succeed"));
    let books = store.audit(PURCHASES_TOPIC).await.expect("books");
    assert_eq!((books.accepted, books.done, books.discarded, books.dead), (3, 1, 1, 1));
    assert_eq!(books.difference(), 0);
}
