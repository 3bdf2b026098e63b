//! Encryption keys: registering them, and finding the requests that were sealed with one.

use std::time::Duration;

use weir_core::{RequestId, Timestamp};
use weir_store::request::{Sealed, SealedSearch, SealingKey, Submit};

use super::fixtures::{
    accept_one, get_request, next_id, now, report_one, sealed, submission, submit_and_claim, success,
};
use crate::HasRequests;

fn key(name: &str, digest: &str) -> SealingKey {
    let check = Sealed { key_id: name.to_owned(), bytes: vec![0, 255, 7] };
    SealingKey { name: name.to_owned(), digest: digest.to_owned(), check }
}

async fn register<H: HasRequests>(h: &H, key: &SealingKey) {
    h.requests().register_sealing_key(key).await.expect("register_sealing_key must succeed");
}

async fn registered_keys<H: HasRequests>(h: &H) -> Vec<(SealingKey, Timestamp)> {
    h.requests().sealing_keys().await.expect("sealing_keys must succeed")
}

async fn search<H: HasRequests>(h: &H, name: &str, after: Option<RequestId>, limit: usize) -> SealedSearch {
    h.requests().find_sealed_with(name, after, limit).await.expect("find_sealed_with must succeed")
}

/// A submission whose payload is sealed with the key of this name.
fn sealed_with<H: HasRequests>(h: &H, name: &str) -> Submit {
    let payload = Sealed { key_id: name.to_owned(), ..sealed("payload") };
    Submit { payload, ..submission(h, &next_id(h).to_string()) }
}

pub async fn keys_are_registered_and_removed_by_name_and_digest<H: HasRequests>() {
    let h = H::open().await;
    assert_eq!(registered_keys(&h).await, []);
    let (first, other, same_name) = (key("ü b", "1"), key("a", "2"), key("ü b", "3"));
    let start = now(&h);
    register(&h, &first).await;
    register(&h, &other).await;
    assert_eq!(registered_keys(&h).await, [(other.clone(), start), (first.clone(), start)]);
    h.clock().advance(Duration::from_secs(1));
    let later = now(&h);
    register(&h, &same_name).await;
    let both = [(other.clone(), start), (first.clone(), start), (same_name.clone(), later)];
    assert_eq!(registered_keys(&h).await, both, "another digest is another key");
    register(&h, &first).await;
    assert_eq!(
        registered_keys(&h).await,
        [(other.clone(), start), (first.clone(), later), (same_name, later)]
    );
    for (name, digest) in [("ü b", "2"), ("a", "3"), ("c", "2")] {
        h.requests().remove_sealing_key(name, digest).await.expect("remove_sealing_key must succeed");
    }
    assert_eq!(registered_keys(&h).await.len(), 3, "another digest is another key");
    for (name, digest) in [("a", "2"), ("ü b", "3")] {
        h.requests().remove_sealing_key(name, digest).await.expect("remove_sealing_key must succeed");
    }
    let h = h.reopen().await;
    assert_eq!(registered_keys(&h).await, [(first, later)]);
}

pub async fn requests_sealed_with_a_key_are_found_page_by_page<H: HasRequests>() {
    let h = H::open().await;
    assert_eq!(search(&h, "old", None, 10).await, SealedSearch::None);
    let mut ids = Vec::new();
    for name in ["new", "old", "new", "new"] {
        ids.push(accept_one(&h, sealed_with(&h, name)).await);
    }
    assert_eq!(search(&h, "old", None, 10).await, SealedSearch::Found(ids[1]));
    assert_eq!(search(&h, "old", None, 1).await, SealedSearch::NoneUpTo(ids[0]));
    assert_eq!(search(&h, "old", Some(ids[0]), 1).await, SealedSearch::Found(ids[1]));
    assert_eq!(search(&h, "old", Some(ids[1]), 10).await, SealedSearch::NoneUpTo(ids[3]));
    assert_eq!(search(&h, "old", Some(ids[3]), 10).await, SealedSearch::None);
    assert_eq!(search(&h, "o%", None, 10).await, SealedSearch::NoneUpTo(ids[3]), "names are no patterns");
}

pub async fn a_result_sealed_with_a_key_is_found_too<H: HasRequests>() {
    let h = H::open().await;
    let job = submit_and_claim(&h, sealed_with(&h, "old")).await;
    assert_eq!(search(&h, "new", None, 10).await, SealedSearch::NoneUpTo(job.id));
    let mut report = success(&job);
    report.result = Some(Sealed { key_id: "new".to_owned(), ..sealed("result") });
    report_one(&h, report).await.expect("the report is accepted");
    assert_eq!(search(&h, "new", None, 10).await, SealedSearch::Found(job.id));
    assert_eq!(search(&h, "old", None, 10).await, SealedSearch::Found(job.id));
}

pub async fn the_newest_request_is_the_one_accepted_last<H: HasRequests>() {
    let h = H::open().await;
    let newest = async |h: &H| h.requests().newest_request().await.expect("newest_request must succeed");
    assert_eq!(newest(&h).await, None);
    for key in ["a", "b"] {
        h.clock().advance(Duration::from_secs(1));
        let id = accept_one(&h, submission(&h, key)).await;
        assert_eq!(newest(&h).await, Some(get_request(&h, id).await));
    }
}
