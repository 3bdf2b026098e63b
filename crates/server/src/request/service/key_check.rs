//! The check at the start of a server that it can decrypt the requests in the store.
//!
//! Every server registers the key that it encrypts with: its name, a digest, and a known value sealed with it. A server that
//! cannot open such a value lacks the key, or has another one under the same name. That matters only while a request is sealed
//! with it: a key that was retired long ago must not keep a server from starting. No index shows which keys are in use, so in
//! that case requests are searched. A request stores the name of its key but not the digest, so the requests found are opened:
//! two different keys may have been registered under one name before anything was sealed, and the server that has the key
//! in use must start.

use std::time::Duration;

use weir_core::{RequestId, Timestamp};
use weir_store::request::{Request, RequestStore, Sealed, SealedNames, SealedSearch};
use weir_store::{Error, Result};

use crate::request::encryption::{Keyring, SealedField};
use crate::request::stored_form::{self, UnknownHashKey};
use crate::settings::source::SettingError;

/// How many requests one query searches.
const SEARCH_BATCH: usize = 5_000;
/// How many requests are opened for one registered key, the oldest first, so that a start does not open every request in the
/// store. A later one that does not open is reported when it is read.
const OPENED_MAX: usize = 1_000;

/// Returns an error that names a missing key; if none is missing, registers the key that encrypts.
pub(crate) async fn missing_key(
    store: &dyn RequestStore,
    keys: &Keyring,
    now: Timestamp,
    retention: Duration,
) -> Result<Option<SettingError>> {
    let registered = store.sealing_keys().await?;
    if registered.is_empty()
        && let Some(request) = store.newest_request().await?
        && keys.open(request.id, SealedField::Payload, &request.payload).is_err()
    {
        // The store is from a version that did not register keys.
        return Ok(Some(missing_key_error(keys, &request.payload.key_id, None, request.id)));
    }
    for (key, registered_at) in registered.iter().filter(|(key, _)| !keys.has(key)) {
        if let Some(request) = unopenable_request(store, keys, &key.name).await? {
            return Ok(Some(missing_key_error(keys, &key.name, Some(&key.digest), request)));
        }
        // A server that still encrypts with it has registered it again at its start, and requests are stored no longer.
        if now.since(*registered_at) > retention {
            store.remove_sealing_key(&key.name, &key.digest).await?;
        }
    }
    let hash_keys = store.hash_keys().await?;
    if !hash_keys.keys.is_empty() {
        let Some(key) = stored_form::open(keys, &hash_keys.keys) else {
            return Ok(Some(SettingError::conflict(UnknownHashKey::new(keys, &hash_keys.keys).to_string())));
        };
        // Servers that have this server's first key alone can hash, too.
        let own = keys.seal_hash_key(&key).map_err(|error| Error::failed("seal", error))?;
        store.add_hash_key(&own).await?;
    }
    let own = keys.sealing_key().map_err(|error| Error::failed("seal", error))?;
    store.register_sealing_key(&own).await?;
    Ok(None)
}

/// Finds a request that is sealed with a key of this name and that `keys` cannot open.
async fn unopenable_request(
    store: &dyn RequestStore,
    keys: &Keyring,
    name: &str,
) -> Result<Option<RequestId>> {
    let (mut after, mut opened) = (None, 0);
    while opened < OPENED_MAX {
        match store.find_sealed_with(name, after, SEARCH_BATCH).await? {
            SealedSearch::Found(id) => {
                let request = store.find_request(id).await?;
                if request.is_some_and(|request| !opens(keys, &request, name)) {
                    return Ok(Some(id));
                }
                opened += 1;
                after = Some(id);
            }
            SealedSearch::NoneUpTo(id) => after = Some(id),
            SealedSearch::None => return Ok(None),
        }
    }
    Ok(None)
}

/// Whether `keys` open the fields of a request that are sealed with a key of this name.
fn opens(keys: &Keyring, request: &Request, name: &str) -> bool {
    let opens =
        |field, sealed: &Sealed| sealed.key_id != name || keys.open(request.id, field, sealed).is_ok();
    let text_opens = |field, text: &str| {
        SealedNames::name_of(text) != Some(name) || keys.open_text(request.id, field, text).is_ok()
    };
    let message = request.failure.as_ref().map(|failure| failure.message.as_str());
    opens(SealedField::Payload, &request.payload)
        && request.result.as_ref().is_none_or(|result| opens(SealedField::Result, result))
        && message.is_none_or(|message| text_opens(SealedField::FailureMessage, message))
        && request.callback_url.as_ref().is_none_or(|url| text_opens(SealedField::CallbackUrl, url))
}

fn missing_key_error(keys: &Keyring, name: &str, digest: Option<&str>, request: RequestId) -> SettingError {
    let with_digest = digest.map(|digest| format!(" with the digest {digest}")).unwrap_or_default();
    let present = match keys.digest(name) {
        Some(own) => format!("another key of that name, with the digest {own}"),
        None => "no key of that name".to_owned(),
    };
    SettingError::conflict(format!(
        "the store has requests, such as {request}, that are encrypted with the key \"{name}\"{with_digest}, and {} has {present}: \
         give all servers on one store the same WEIR_REQUEST_KEYS, or add the key again after the one that encrypts",
        keys.source()
    ))
}

#[cfg(test)]
mod tests {
    use weir_core::request::canonical::Fingerprint;
    use weir_core::{Clock, IdempotencyKey, ManualClock, RequestType, TenantId};
    use weir_store::request::Submit;
    use weir_store_sqlite::Sqlite;

    use super::*;
    use crate::request::encryption::TextKeys;

    const A: &str = "a:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
    const B: &str = "b:AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=";
    const OTHER_A: &str = "a:AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=";
    const DAY: Duration = Duration::from_secs(86_400);
    const RETENTION: Duration = Duration::from_secs(90 * 86_400);

    struct StoreFixture {
        engine: Sqlite,
        clock: ManualClock,
        _directory: tempfile::TempDir,
    }

    impl StoreFixture {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let clock = ManualClock::at(Timestamp::from_seconds(1_767_225_600));
            let engine =
                Sqlite::open_with_clock(directory.path(), std::sync::Arc::new(clock.clone())).unwrap();
            Self { engine, clock, _directory: directory }
        }

        /// The error that keeps a server with these keys from starting.
        async fn start(&self, keys: &str) -> Option<String> {
            let missing = missing_key(&self.engine, &ring(keys), self.clock.now(), RETENTION).await;
            missing.unwrap().map(|error| error.to_string())
        }

        async fn accept(&self, keys: &str) -> RequestId {
            self.accept_with_callback(keys, None).await
        }

        /// Accepts a request whose payload is sealed with `keys`, and its callback URL with others.
        async fn accept_with_callback(&self, keys: &str, callback_keys: Option<&str>) -> RequestId {
            let id = RequestId::new(self.clock.now(), std::array::from_fn(|_| fastrand::u8(..)));
            let submit = Submit {
                id,
                tenant: TenantId::parse("acme").unwrap(),
                key: IdempotencyKey::parse(id.to_string()).unwrap(),
                request_type: RequestType::parse("t").unwrap(),
                fingerprint: Fingerprint::from_bytes([0; 32]),
                plain: None,
                payload: ring(keys).seal(id, SealedField::Payload, b"1").unwrap(),
                downstream: "echo".to_owned(),
                callback_url: callback_keys
                    .map(|keys| ring(keys).seal_text(id, SealedField::CallbackUrl, "https://a.b").unwrap()),
                trace: None,
                needs_broker: false,
                limits: None,
            };
            self.engine.submit_batch(vec![submit].into()).await.unwrap();
            id
        }

        async fn names(&self) -> Vec<String> {
            self.engine.sealing_keys().await.unwrap().into_iter().map(|(key, _)| key.name).collect()
        }
    }

    fn ring(text: &str) -> Keyring {
        Keyring::from_provider(&TextKeys { setting: "WEIR_REQUEST_KEYS", text: text.to_owned() }).unwrap()
    }

    #[tokio::test]
    async fn a_lost_or_different_key_is_detected_once_something_is_sealed_with_it() {
        let fixture = StoreFixture::new();
        assert_eq!(fixture.start(A).await, None);
        assert_eq!((fixture.start(B).await, fixture.start(A).await), (None, None), "nothing is sealed yet");
        let id = fixture.accept(A).await;
        for (keys, part) in [(B, "no key of that name"), (OTHER_A, "another key of that name")] {
            let sentence = fixture.start(keys).await.expect("it must not start");
            for part in ["WEIR_REQUEST_KEYS", "\"a\"", part, &id.to_string()] {
                assert!(sentence.contains(part), "{sentence:?} lacks {part:?}");
            }
            assert!(!sentence.contains(&keys[2..]), "{sentence}");
        }
        assert_eq!(fixture.start(A).await, None);
        assert_eq!(fixture.start(&format!("{B},{A}")).await, None, "rotated");
    }

    #[tokio::test]
    async fn of_two_keys_with_one_name_a_server_needs_the_one_in_use() {
        for last in [A, OTHER_A] {
            let fixture = StoreFixture::new();
            for keys in [A, OTHER_A, last] {
                assert_eq!(fixture.start(keys).await, None, "nothing is sealed yet");
            }
            fixture.accept(A).await;
            assert_eq!(fixture.start(A).await, None, "registered last: {last}");
            assert!(fixture.start(OTHER_A).await.is_some(), "registered last: {last}");
            // The other server was never restarted and seals, too.
            fixture.accept(OTHER_A).await;
            for keys in [A, OTHER_A] {
                assert!(fixture.start(keys).await.is_some(), "each needs the other's key");
            }
        }
    }

    #[tokio::test]
    async fn a_retired_unused_key_keeps_no_server_from_starting() {
        let fixture = StoreFixture::new();
        assert_eq!(fixture.start(A).await, None);
        for _ in 0..3 {
            fixture.accept(B).await;
        }
        assert_eq!(fixture.start(&format!("{B},{A}")).await, None);
        assert_eq!(fixture.start(B).await, None);
        assert_eq!(fixture.names().await, ["a", "b"], "somebody may still seal with it");
        fixture.clock.advance(RETENTION + DAY);
        assert_eq!(fixture.start(B).await, None);
        assert_eq!(
            fixture.names().await,
            ["b"],
            "after the retention nobody does, and it is not searched for again"
        );
    }

    #[tokio::test]
    async fn a_server_that_cannot_decrypt_the_key_of_the_hashes_does_not_start() {
        let fixture = StoreFixture::new();
        let sealed = ring(A).seal_hash_key(&[7; 32]).unwrap();
        fixture.engine.begin_hashing(&sealed).await.unwrap();
        for keys in [B, OTHER_A] {
            let sentence = fixture.start(keys).await.expect("it must not start");
            assert!(sentence.contains("WEIR_REQUEST_KEYS") && sentence.contains("\"a\""), "{sentence}");
        }
        assert_eq!(fixture.start(&format!("{B},{A}")).await, None);
        assert_eq!(fixture.start(B).await, None, "a server with both has stored it for this key, too");
        assert_eq!(fixture.start(A).await, None);
    }

    #[tokio::test]
    async fn a_text_that_cannot_be_decrypted_is_found_like_a_payload() {
        let fixture = StoreFixture::new();
        assert_eq!((fixture.start(A).await, fixture.start(B).await), (None, None));
        fixture.accept_with_callback(B, Some(A)).await;
        assert!(fixture.start(B).await.is_some_and(|sentence| sentence.contains("\"a\"")));
        assert_eq!(fixture.start(&format!("{B},{A}")).await, None);
    }

    #[tokio::test]
    async fn a_store_from_before_keys_were_registered_is_checked_too() {
        let fixture = StoreFixture::new();
        fixture.accept(A).await;
        assert!(fixture.start(B).await.is_some_and(|sentence| sentence.contains("\"a\"")));
        assert!(fixture.start(OTHER_A).await.is_some());
        assert!(fixture.names().await.is_empty(), "a server that does not start registers nothing");
        assert_eq!(fixture.start(A).await, None);
        assert_eq!(fixture.names().await, ["a"]);
    }
}
