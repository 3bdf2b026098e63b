//! Encryption keys: registering them, and finding the requests that were sealed with one.

use std::time::Duration;

use weir_core::{IdempotencyKey, RequestId, STORED_MARK, Timestamp};
use weir_store::request::{
    PlainKey, ResealedRequest, Sealed, SealedHashKey, SealedNames, SealedSearch, SealingKey, Submit,
};

use super::fixtures::{
    URL, accept_one, fingerprint, get_request, next_id, now, outcome_letters, report_one, resubmission,
    sealed, submission, submission_for, submit_and_claim, submit_batch, success,
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

fn hash_key(name: &str, digest: &str) -> SealedHashKey {
    let bytes = format!("{name} {digest}").into_bytes();
    SealedHashKey { name: name.to_owned(), digest: digest.to_owned(), bytes }
}

async fn begin<H: HasRequests>(h: &H, key: &SealedHashKey) {
    h.requests().begin_hashing(key).await.expect("begin_hashing must succeed");
}

async fn hash_keys<H: HasRequests>(h: &H) -> Vec<SealedHashKey> {
    h.requests().hash_keys().await.expect("hash_keys must succeed").keys
}

/// The same submission with hashed key and fingerprint.
fn hashed(submit: &Submit) -> Submit {
    let mut hash = [7; 32];
    hash.iter_mut().zip(submit.key.as_str().bytes()).for_each(|(byte, key)| *byte = key);
    Submit {
        key: IdempotencyKey::from_hash(&hash),
        fingerprint: fingerprint(&format!("keyed {}", submit.fingerprint)),
        plain: Some(PlainKey { key: submit.key.clone(), fingerprint: submit.fingerprint }),
        ..submit.clone()
    }
}

pub async fn hashing_begins_once_and_keeps_its_last_key<H: HasRequests>() {
    let h = H::open().await;
    let (first, other) = (hash_key("a", "1"), hash_key("b", "2"));
    h.requests().add_hash_key(&other).await.expect("add_hash_key must succeed");
    let stored = h.requests().hash_keys().await.expect("hash_keys must succeed");
    assert_eq!((stored.keys, stored.has_begun, stored.plain_keys_may_be_in_use), (Vec::new(), false, false));
    assert!(!stored.is_upgraded);
    begin(&h, &first).await;
    begin(&h, &other).await;
    assert_eq!(hash_keys(&h).await, std::slice::from_ref(&first), "the first that begins decides");
    for key in [&other, &hash_key("a", "1"), &other] {
        h.requests().add_hash_key(key).await.expect("add_hash_key must succeed");
    }
    assert_eq!(hash_keys(&h).await, [first.clone(), other.clone()]);
    for key in [&first, &hash_key("b", "1"), &other] {
        h.requests().remove_hash_key(&key.name, &key.digest).await.expect("remove_hash_key must succeed");
    }
    let h = h.reopen().await;
    let stored = h.requests().hash_keys().await.expect("hash_keys must succeed");
    assert_eq!((stored.keys, stored.plain_keys_may_be_in_use), (vec![other], false));
}

pub async fn a_key_that_was_prepared_is_the_one_hashing_begins_with<H: HasRequests>() {
    let h = H::open().await;
    let (first, other) = (hash_key("a", "1"), hash_key("b", "2"));
    for key in [&first, &other] {
        h.requests().prepare_hash_key(key).await.expect("prepare_hash_key must succeed");
    }
    assert_eq!(hash_keys(&h).await, std::slice::from_ref(&first));
    begin(&h, &other).await;
    let stored = h.requests().hash_keys().await.expect("hash_keys must succeed");
    assert_eq!((stored.keys, stored.has_begun), (vec![first], true));
}

pub async fn servers_that_begin_hashing_at_once_agree_on_its_key<H: HasRequests>() {
    let h = H::open().await;
    let [a, b, c, d] = ["1", "2", "3", "4"].map(|digest| hash_key("a", digest));
    tokio::join!(begin(&h, &a), begin(&h, &b), begin(&h, &c), begin(&h, &d));
    assert_eq!(hash_keys(&h).await.len(), 1);
}

pub async fn a_key_from_before_hashing_is_found_under_its_hash<H: HasRequests>() {
    let h = H::open().await;
    let before = [submission(&h, "k-1"), submission(&h, "k-2")];
    let outcomes = submit_batch(&h, before.to_vec(), None).await;
    assert_eq!(outcome_letters(&outcomes), "AA");
    begin(&h, &hash_key("a", "1")).await;
    let stored = h.requests().hash_keys().await.expect("hash_keys must succeed");
    assert!(stored.plain_keys_may_be_in_use, "keys of before may be in use");
    let again = |submit: &Submit| hashed(&resubmission(&h, submit));
    let other_payload = hashed(&submission_for(&h, before[0].tenant.as_str(), "k-1", "else"));
    let new = hashed(&submission(&h, "k-3"));
    // A conflict before the replay of the same key must not hide it.
    let batch = vec![
        other_payload.clone(),
        again(&before[0]),
        new.clone(),
        resubmission(&h, &new),
        again(&before[1]),
    ];
    assert_eq!(outcome_letters(&submit_batch(&h, batch.clone(), None).await), "CRARR");
    let repeated: Vec<Submit> = batch.iter().map(|submit| resubmission(&h, submit)).collect();
    assert_eq!(outcome_letters(&submit_batch(&h, repeated, None).await), "CRRRR");
    h.clock().advance(Duration::from_secs(86_400));
    let later =
        vec![hashed(&submission(&h, "k-1")), hashed(&submission(&h, "k-1")), hashed(&submission(&h, "k-3"))];
    assert_eq!(outcome_letters(&submit_batch(&h, later, None).await), "ARA", "a day later they are free");
    h.clock().advance(Duration::from_secs(86_400));
    let stored = h.requests().hash_keys().await.expect("hash_keys must succeed");
    assert!(!stored.plain_keys_may_be_in_use, "keys of before have expired");
}

pub async fn names_of_keys_are_listed_page_by_page<H: HasRequests>() {
    let h = H::open().await;
    let mut expected = Vec::new();
    for n in 0..3 {
        let url = format!("{STORED_MARK}key-{n}:{}", "x".repeat(200));
        let job =
            submit_and_claim(&h, Submit { callback_url: Some(url), ..sealed_with(&h, &format!("old-{n}")) })
                .await;
        let result = (n == 1).then(|| Sealed { key_id: "new".to_owned(), ..sealed("result") });
        if result.is_some() {
            let mut report = success(&job);
            report.result = result;
            report_one(&h, report).await.expect("the report must be applied");
        }
        expected.push((job.id, format!("old-{n}"), (n == 1).then(|| "new".to_owned()), format!("key-{n}")));
    }
    let mut found = Vec::new();
    let mut after = None;
    loop {
        let page = h.requests().sealed_names(after, 2).await.expect("sealed_names must succeed");
        let Some(last) = page.last() else { break };
        after = Some(last.id);
        found.extend(page.into_iter().map(|names| {
            let url =
                names.callback_url.as_deref().and_then(SealedNames::name_of).unwrap_or_default().to_owned();
            (names.id, names.payload, names.result, url)
        }));
    }
    assert_eq!(found, expected);
}

pub async fn a_field_that_changed_meanwhile_is_not_sealed_again<H: HasRequests>() {
    let h = H::open().await;
    let with_nonce = |nonce: u8, key: &str| Sealed { key_id: key.to_owned(), bytes: vec![nonce; 40] };
    let payload = with_nonce(1, "old");
    let sent = Submit { payload: payload.clone(), callback_url: Some(URL.to_owned()), ..submission(&h, "k") };
    let id = accept_one(&h, sent).await;
    let other = accept_one(&h, submission(&h, "other")).await;
    let before = get_request(&h, other).await;
    let reseal = |resealed: ResealedRequest| {
        let store = h.requests();
        async move { store.reseal_request(&resealed).await.expect("reseal_request must succeed") }
    };
    let nothing =
        ResealedRequest { id, payload: None, result: None, failure_message: None, callback_url: None };
    let stale = ResealedRequest {
        payload: Some((with_nonce(9, "old"), with_nonce(2, "new"))),
        result: Some((with_nonce(9, "old"), with_nonce(2, "new"))),
        failure_message: Some(("x".to_owned(), "y".to_owned())),
        callback_url: Some(("x".to_owned(), "y".to_owned())),
        ..nothing.clone()
    };
    let whole = get_request(&h, id).await;
    reseal(stale).await;
    reseal(nothing.clone()).await;
    assert_eq!(get_request(&h, id).await, whole);
    let fresh = ResealedRequest {
        payload: Some((payload, with_nonce(2, "new"))),
        callback_url: Some((URL.to_owned(), "new".to_owned())),
        ..nothing
    };
    reseal(fresh.clone()).await;
    reseal(fresh).await;
    let expected = weir_store::request::Request {
        payload: with_nonce(2, "new"),
        callback_url: Some("new".to_owned()),
        ..whole
    };
    assert_eq!(get_request(&h, id).await, expected, "nothing else has changed");
    assert_eq!(get_request(&h, other).await, before);
}
