//! The key of hashed idempotency keys, and what is read and written when requests are sealed with another key.

use weir_core::{RequestId, STORED_MARK};

use super::Sealed;

/// How many first bytes of a sealed value are compared to see whether it is still the same: the nonce, which is never used
/// twice.
pub(super) const NONCE_BYTES: usize = 12;

/// The key of the hashes that idempotency keys are stored as, sealed with a request key. The hashes need a key of their own:
/// with one derived from a request key, two servers that seal with different keys would each accept the same submission.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SealedHashKey {
    /// The name of the request key.
    pub name: String,
    /// Tells request keys of one name apart.
    pub digest: String,
    pub bytes: Vec<u8>,
}

/// How idempotency keys are stored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HashKeys {
    /// The key of the hashes, sealed once for each request key that opens it.
    pub keys: Vec<SealedHashKey>,
    /// Whether the idempotency keys of requests are stored as hashes, and no longer as they are.
    pub has_begun: bool,
    /// Whether keys that were stored before hashing began may still be in use.
    pub plain_keys_may_be_in_use: bool,
    /// Whether a server of an earlier version may have used the store, and may use it still.
    pub is_upgraded: bool,
}

/// An idempotency key was not hashed although hashing has begun. Nothing was done; the same submission with a hashed key
/// succeeds.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("idempotency keys are stored as keyed hashes since a moment ago, and this one was not hashed")]
pub struct PlainKeysRefused;

/// The names of the keys that the fields of a request are sealed with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SealedNames {
    pub id: RequestId,
    pub payload: String,
    pub result: Option<String>,
    /// The beginning of the failure message; `None` without one.
    pub failure_message: Option<String>,
    /// The beginning of the callback URL; `None` without one.
    pub callback_url: Option<String>,
}

impl SealedNames {
    /// How many characters of a text field are read: the mark, the name and the colon behind it.
    pub const TEXT_CHARS: usize = 66;

    /// The name of the key that a text field is sealed with, by its beginning; `None` if it is not sealed.
    #[must_use]
    pub fn name_of(text: &str) -> Option<&str> {
        text.strip_prefix(STORED_MARK)?.split_once(':').map(|(name, _)| name)
    }
}

/// Fields of a request that were sealed again: each as it was and as it is to be. `None` leaves a field as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResealedRequest {
    pub id: RequestId,
    pub payload: Option<(Sealed, Sealed)>,
    pub result: Option<(Sealed, Sealed)>,
    pub failure_message: Option<(String, String)>,
    pub callback_url: Option<(String, String)>,
}

impl ResealedRequest {
    /// The part of a sealed value that tells whether it is still the same.
    #[must_use]
    pub fn nonce_of(sealed: &Sealed) -> &[u8] {
        sealed.bytes.get(..NONCE_BYTES).unwrap_or(&sealed.bytes)
    }
}
