//! Redis as a cache of requests.

use weir_store_conformance::request::fixtures;
use weir_store_conformance::{EngineFixture, HasRequests};

use crate::fixtures::RedisFixture;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_was_read_is_cached_until_it_changes() {
    if RedisFixture::<false>::skipped() {
        return;
    }
    let h = RedisFixture::<false>::open().await;
    let id = fixtures::accept_one(&h, fixtures::submission(&h, "key")).await;
    let first = h.requests().find_request(id).await.expect("an answer");
    assert!(first.is_some());
    h.database.execute("UPDATE request_record SET attempts = 9").await;
    assert_eq!(h.requests().find_request(id).await.expect("an answer"), first, "from Redis");
    h.requests().mark_enqueued(&[id]).await.expect("an answer");
    for _ in 0..2 {
        let now = h.requests().find_request(id).await.expect("an answer").expect("a request");
        assert_eq!(now.attempts, 9, "from the store, as long as the marker of the change lasts");
    }
}
