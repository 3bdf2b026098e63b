//! The form in which idempotency keys, fingerprints, failure messages and callback URLs are stored: as keyed hashes and sealed, or
//! as they are while servers of the version before use the same store.
//!
//! The key of the hashes is generated once per store and sealed there with the request keys, so all servers hash alike, whichever
//! request key they seal with, and a rotation of request keys changes no hash. A store begins with it at its first submission; one
//! that an earlier version has created waits for the setting `postgres.formats`. It never ends: the store refuses other keys from
//! then on, so a server that has not heard of it yet cannot accept a key twice.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use ring::hmac;
use weir_core::request::canonical::Fingerprint;
use weir_core::{IdempotencyKey, RequestId, TenantId};
use weir_store::request::{HashKeys, PlainKey, RequestStore, SealedHashKey};
use weir_store::{Error, Result};

use super::encryption::{HASH_KEY_BYTES, Keyring, SealedField};
use super::events::HashingDelayed;
use crate::engines::within;
use crate::settings::store::Formats;

/// How long the form is cached while it may change.
const CACHED_FOR: Duration = Duration::from_secs(5);
/// How long it is cached after that. It is read again in case a store that fails over loses the begin of the hashes.
const SETTLED_CACHED_FOR: Duration = Duration::from_secs(60);
/// How long a failure is cached: nobody reads the store meanwhile.
const FAILURE_CACHED_FOR: Duration = Duration::from_millis(500);
/// How long a read may delay submissions if there is an older form: they need time for the store after that.
const REFRESH_TIMEOUT: Duration = Duration::from_millis(500);
const KEY_LABEL: &[u8] = b"weir idempotency key";
const FINGERPRINT_LABEL: &[u8] = b"weir fingerprint";

/// The form of a store, cached.
pub(crate) struct StoredForm {
    store: Arc<dyn RequestStore>,
    keys: Arc<Keyring>,
    formats: Formats,
    timeout: Duration,
    cached: Mutex<Option<(Instant, Result<Form>)>>,
    /// Held during a read, so that concurrent callers wait for one answer.
    reading: tokio::sync::Mutex<()>,
    hash_key: tokio::sync::OnceCell<Arc<hmac::Key>>,
}

#[derive(Clone)]
enum Form {
    Plain,
    Hashed {
        key: Arc<hmac::Key>,
        /// Whether a key that was stored before may be in use.
        plain_keys_may_be_in_use: bool,
    },
}

/// An idempotency key and a fingerprint as they are stored.
pub(crate) struct StoredKey {
    pub key: IdempotencyKey,
    pub fingerprint: Fingerprint,
    /// What they were stored as before, if that may be in use.
    pub plain: Option<PlainKey>,
}

impl StoredForm {
    pub(crate) fn new(
        store: Arc<dyn RequestStore>,
        keys: Arc<Keyring>,
        formats: Formats,
        timeout: Duration,
    ) -> Self {
        Self {
            store,
            keys,
            formats,
            timeout,
            cached: Mutex::default(),
            reading: tokio::sync::Mutex::default(),
            hash_key: tokio::sync::OnceCell::new(),
        }
    }

    /// An idempotency key as it is stored.
    /// Fails when the form is not known and the store does not answer, or this server cannot decrypt the key of the hashes.
    pub(crate) async fn of_key(
        &self,
        tenant: &TenantId,
        key: IdempotencyKey,
        fingerprint: Fingerprint,
    ) -> Result<StoredKey> {
        let (hash_key, plain_keys_may_be_in_use) = match self.get().await? {
            Form::Plain => return Ok(StoredKey { key, fingerprint, plain: None }),
            Form::Hashed { key, plain_keys_may_be_in_use } => (key, plain_keys_may_be_in_use),
        };
        let hash = |label: &[u8], content: &[u8]| {
            let mut context = hmac::Context::with_key(&hash_key);
            // Each part with its length, so that no two lists of parts are the same bytes.
            for part in [label, tenant.as_str().as_bytes(), key.as_str().as_bytes(), content] {
                context.update(&(part.len() as u64).to_be_bytes());
                context.update(part);
            }
            context.sign()
        };
        let hashed = IdempotencyKey::from_hash(hash(KEY_LABEL, &[]).as_ref());
        let mut bytes = [0; 32];
        let tag = hash(FINGERPRINT_LABEL, fingerprint.as_bytes());
        bytes.iter_mut().zip(tag.as_ref()).for_each(|(byte, tag)| *byte = *tag);
        let plain = plain_keys_may_be_in_use.then(|| PlainKey { key: key.clone(), fingerprint });
        Ok(StoredKey { key: hashed, fingerprint: Fingerprint::from_bytes(bytes), plain })
    }

    /// A text of a request as it is stored.
    /// Fails like [`StoredForm::of_key`].
    pub(crate) async fn of_text(&self, id: RequestId, field: SealedField, text: String) -> Result<String> {
        match self.get().await? {
            Form::Plain => Ok(text),
            Form::Hashed { .. } => {
                self.keys.seal_text(id, field, &text).map_err(|error| Error::failed("seal", error))
            }
        }
    }

    /// Forgets the cached form, after the store has refused a key of that form.
    pub(crate) fn forget(&self) {
        *self.cached.lock() = None;
    }

    async fn get(&self) -> Result<Form> {
        if let Some(cached) = self.cached() {
            return cached;
        }
        let _reading = self.reading.lock().await;
        if let Some(cached) = self.cached() {
            return cached;
        }
        let (read_at, last) = (Instant::now(), self.last());
        let timeout = if last.is_some() { REFRESH_TIMEOUT } else { self.timeout };
        let form = match within(timeout, self.read()).await {
            // The store refuses what is no longer right.
            Err(error) if error.is_transient() => last.ok_or(error),
            read => read,
        };
        *self.cached.lock() = Some((read_at, form.clone()));
        form
    }

    fn cached(&self) -> Option<Result<Form>> {
        let cached = self.cached.lock();
        let (at, form) = cached.as_ref()?;
        let cached_for = match form {
            Ok(Form::Hashed { plain_keys_may_be_in_use: false, .. }) => SETTLED_CACHED_FOR,
            Ok(_) => CACHED_FOR,
            Err(_) => FAILURE_CACHED_FOR,
        };
        (at.elapsed() < cached_for).then(|| form.clone())
    }

    fn last(&self) -> Option<Form> {
        self.cached.lock().as_ref().and_then(|(_, form)| form.as_ref().ok().cloned())
    }

    /// Reads the form, and begins the hashes if they may begin.
    async fn read(&self) -> Result<Form> {
        let hash_keys = self.store.hash_keys().await?;
        if hash_keys.has_begun {
            return self.hashed(&hash_keys);
        }
        if hash_keys.is_upgraded && self.formats == Formats::Compatible {
            return Ok(Form::Plain);
        }
        let sealed = self.new_key()?;
        match self.store.begin_hashing(&sealed).await {
            Ok(()) => {}
            // Whoever begins later finds what is stored until then.
            Err(error) if error.is_transient() => {
                HashingDelayed { error: &error }.emit();
                return Ok(Form::Plain);
            }
            Err(error) => return Err(error),
        }
        // Another server may have begun with another key.
        self.hashed(&self.store.hash_keys().await?)
    }

    /// The key of the hashes, for other keys than those of requests: also on a store whose requests do not have this form yet.
    /// It never changes.
    pub(crate) async fn hash_key(&self) -> Result<Arc<hmac::Key>> {
        let key = self.hash_key.get_or_try_init(|| async {
            let mut hash_keys = self.store.hash_keys().await?;
            if hash_keys.keys.is_empty() {
                self.store.prepare_hash_key(&self.new_key()?).await?;
                hash_keys = self.store.hash_keys().await?;
            }
            self.open(&hash_keys)
        });
        // Nothing depends on the key yet.
        within(self.timeout, key).await.map_err(Error::before_commit).cloned()
    }

    fn new_key(&self) -> Result<SealedHashKey> {
        let key: [u8; HASH_KEY_BYTES] = rand::random();
        self.keys.seal_hash_key(&key).map_err(|error| Error::failed("seal", error))
    }

    fn hashed(&self, hash_keys: &HashKeys) -> Result<Form> {
        Ok(Form::Hashed {
            key: self.open(hash_keys)?,
            plain_keys_may_be_in_use: hash_keys.plain_keys_may_be_in_use,
        })
    }

    fn open(&self, hash_keys: &HashKeys) -> Result<Arc<hmac::Key>> {
        let key = open(&self.keys, &hash_keys.keys).ok_or_else(|| {
            Error::unavailable("request keys", UnknownHashKey::new(&self.keys, &hash_keys.keys))
        })?;
        Ok(Arc::new(hmac::Key::new(hmac::HMAC_SHA256, &key)))
    }
}

/// Opens the key of the hashes.
pub(crate) fn open(keys: &Keyring, sealed: &[SealedHashKey]) -> Option<Vec<u8>> {
    sealed.iter().find_map(|sealed| keys.open_hash_key(sealed))
}

/// The server has none of the request keys that open the key of the hashes.
#[derive(Debug, thiserror::Error)]
#[error(
    "the key that idempotency keys are hashed with is encrypted with the request key {name}, and {source_name} has no such key: \
     give all servers on one store the same WEIR_REQUEST_KEYS, or add the key again after the one that encrypts"
)]
pub(crate) struct UnknownHashKey {
    name: String,
    source_name: String,
}

impl UnknownHashKey {
    pub(crate) fn new(keys: &Keyring, sealed: &[SealedHashKey]) -> Self {
        let names = sealed.iter().map(|key| format!("\"{}\" (digest {})", key.name, key.digest));
        Self { name: names.collect::<Vec<_>>().join(" or "), source_name: keys.source().to_owned() }
    }
}
