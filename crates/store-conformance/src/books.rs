//! The counts that an engine keeps of its rows. They are checked wherever a case audits a capability.

use weir_queue::QueueAudit;

use crate::EngineFixture;

/// Asserts that the counts of rows are right, whatever is going on meanwhile: each comparison is of one moment.
pub async fn expect_counts<H: EngineFixture>(h: &H) {
    let Some(store) = h.books() else { return };
    let recount = store.recount(&|_step| ()).await.expect("recount must succeed");
    assert_eq!(recount.named("rows"), Vec::<String>::new(), "all rows are counted");
    let books = store.books().await.expect("books must succeed").expect("the counts are complete");
    let requests = books.requests();
    assert_eq!((requests.difference(), requests.jobs), (0, requests.in_flight), "{books:?}");
    let slots = books.slots(None);
    assert_eq!(slots.slots, slots.counted, "{books:?}");
}

/// Asserts that the counts of a topic's messages balance. Unlike [`expect_counts`] it reads no rows, so it may follow every step.
pub async fn expect_queue_counts<H: EngineFixture>(h: &H, topic: &str) {
    let Some(store) = h.books() else { return };
    let books = store.books().await.expect("books must succeed").expect("the counts are complete");
    assert_eq!(QueueAudit::from_books(&books, topic).difference(), 0, "{books:?}");
}
