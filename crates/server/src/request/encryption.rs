//! Encryption of payloads, results, failure messages and callback URLs: AES-256-GCM, with the name of the key stored beside the
//! ciphertext.
//!
//! The first key of the ring encrypts (seals); all of them decrypt (open). A key is rotated by putting a new one before it and
//! keeping the old one for as long as something is encrypted with it. The request and the field are authenticated, too:
//! ciphertext that was moved to another row does not open. [`KeyProvider`] supplies the keys.

use std::collections::BTreeSet;
use std::path::PathBuf;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE_NO_PAD};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::digest::{Context, SHA256};
use weir_core::{RequestId, STORED_MARK};
use weir_store::request::{Sealed, SealedHashKey, SealingKey};

use super::key_command::CommandKeys;
use super::settings::RequestSettings;
use crate::auth::secrets;
use crate::settings::source::SettingError;

const KEY_BYTES: usize = 32;
/// The length of the key that idempotency keys are hashed with.
pub(crate) const HASH_KEY_BYTES: usize = 32;

/// How many bytes sealing adds: the nonce and the tag.
pub(crate) const SEALING_BYTES: usize = NONCE_LEN + 16;
const NAME_MAX: usize = 64;

/// The key that is generated when the settings have none.
const GENERATED: secrets::SecretFile = secrets::REQUEST_KEY;
const GENERATED_NAME: &str = "generated";

/// Sealed with a key to recognise the key later.
const CHECK: &[u8] = b"weir request key";
/// How many bytes of a key's digest tell it from any other.
const DIGEST_BYTES: usize = 16;

/// The request id for values that belong to no request.
const NO_REQUEST: RequestId = RequestId::from_uuid(uuid::Uuid::nil());

/// A source of keys.
pub trait KeyProvider: Send + Sync {
    /// All keys as (name, 32 bytes), the one that encrypts first.
    fn keys(&self) -> Result<Vec<(String, Vec<u8>)>, SettingError>;
}

/// Keys written as text, `name:base64`, separated by commas or lines.
#[derive(Clone)]
pub(crate) struct TextKeys {
    /// Where the text came from, for error messages.
    pub setting: &'static str,
    pub text: String,
}

impl KeyProvider for TextKeys {
    fn keys(&self) -> Result<Vec<(String, Vec<u8>)>, SettingError> {
        let parts = self.text.split([',', '\n']).map(str::trim);
        let keys: Option<Vec<_>> =
            parts.filter(|part| !part.is_empty() && !part.starts_with('#')).map(parse).collect();
        // What is sealed names its key, so two keys of one name could not be told apart.
        let are_distinct = |keys: &Vec<(String, Vec<u8>)>| {
            let names: BTreeSet<&str> = keys.iter().map(|(name, _)| name.as_str()).collect();
            names.len() == keys.len()
        };
        keys.filter(|keys| !keys.is_empty() && are_distinct(keys)).ok_or_else(|| {
            SettingError::secret(
                self.setting,
                "a list of name:base64, each key 32 bytes and each name once, the first one encrypts",
            )
        })
    }
}

/// [`TextKeys`] in a file.
#[derive(Clone, Debug)]
pub(crate) struct FileKeys(pub PathBuf);

impl KeyProvider for FileKeys {
    fn keys(&self) -> Result<Vec<(String, Vec<u8>)>, SettingError> {
        let text = std::fs::read_to_string(&self.0).map_err(|error| {
            let allowed = format!("a file that can be read ({error})");
            SettingError::new("request.keys_file", self.0.display(), allowed)
        })?;
        TextKeys { setting: "request.keys_file", text }.keys()
    }
}

fn parse(text: &str) -> Option<(String, Vec<u8>)> {
    let (name, key) = text.split_once(':')?;
    let key = STANDARD.decode(key).or_else(|_| URL_SAFE_NO_PAD.decode(key)).ok()?;
    let is_named = (1..=NAME_MAX).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic());
    (is_named && key.len() == KEY_BYTES).then(|| (name.to_owned(), key))
}

/// Which field of a request is sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SealedField {
    Payload,
    Result,
    FailureMessage,
    CallbackUrl,
    /// The key that idempotency keys are hashed with; not a field of a request.
    HashKey,
    /// A known value that identifies a key; not a field of a request.
    Check,
}

/// Why a sealed value does not open.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    #[error("this server does not have the key {0}")]
    UnknownKey(String),
    #[error("the ciphertext was changed, or belongs to another request or field")]
    Broken,
}

/// The keys of this server.
pub struct Keyring {
    keys: Vec<RequestKey>,
    /// Where the keys came from, for error messages.
    source: String,
}

struct RequestKey {
    name: String,
    /// Shows only whether two keys are equal.
    digest: String,
    key: LessSafeKey,
}

impl RequestKey {
    fn new(name: String, bytes: &[u8]) -> Option<Self> {
        let digest = digest(bytes);
        Some(Self { name, digest, key: LessSafeKey::new(UnboundKey::new(&AES_256_GCM, bytes).ok()?) })
    }
}

fn digest(key: &[u8]) -> String {
    let mut context = Context::new(&SHA256);
    context.update(CHECK);
    context.update(key);
    context.finish().as_ref().iter().take(DIGEST_BYTES).map(|byte| format!("{byte:02x}")).collect()
}

impl std::fmt::Debug for Keyring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.keys.iter().map(|key| &key.name)).finish()
    }
}

impl Keyring {
    /// Loads the keys of the settings, or creates one in the data directory.
    pub fn load(settings: &RequestSettings, data: &std::path::Path) -> Result<Self, SettingError> {
        if let Some(keys) = &settings.keys {
            return Self::from_provider(&TextKeys { setting: "WEIR_REQUEST_KEYS", text: keys.0.clone() });
        }
        if let Some(command) = &settings.keys_command {
            let keys = Self::from_provider(&CommandKeys(command.clone()))?;
            return Ok(Self { source: "the output of keys.command".to_owned(), ..keys });
        }
        if let Some(path) = &settings.keys_file {
            let keys = Self::from_provider(&FileKeys(path.clone()))?;
            return Ok(Self { source: format!("request.keys_file ({})", path.display()), ..keys });
        }
        let key = secrets::load_or_create(data, GENERATED)?;
        let text = format!("{GENERATED_NAME}:{key}");
        let keys = Self::from_provider(&TextKeys { setting: "request.key in the data directory", text })?;
        Ok(Self { source: data.join(GENERATED.file).display().to_string(), ..keys })
    }

    /// As [`Keyring::load`], but fails where that would create a key.
    pub(crate) fn load_existing(
        settings: &RequestSettings,
        data: &std::path::Path,
    ) -> Result<Self, SettingError> {
        let is_set =
            settings.keys.is_some() || settings.keys_command.is_some() || settings.keys_file.is_some();
        if !is_set && !data.join(GENERATED.file).exists() {
            return Err(SettingError::conflict(format!(
                "there are no request keys: set WEIR_REQUEST_KEYS, keys.command or request.keys_file as the servers have it, or \
                 name the directory with {} with --data, which is {}",
                GENERATED.file,
                data.display()
            )));
        }
        Self::load(settings, data)
    }

    pub fn from_provider(provider: &dyn KeyProvider) -> Result<Self, SettingError> {
        // The provider has checked the length, so no key is dropped here.
        let keys = provider.keys()?.into_iter().filter_map(|(name, key)| RequestKey::new(name, &key));
        Ok(Self { keys: keys.collect(), source: "WEIR_REQUEST_KEYS".to_owned() })
    }

    /// Where the keys came from: a setting, or a file.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The digest of the key of this name, if there is one.
    #[must_use]
    pub fn digest(&self, name: &str) -> Option<&str> {
        self.keys.iter().find(|key| key.name == name).map(|key| key.digest.as_str())
    }

    /// The key that encrypts, as it is registered in the store.
    /// Fails when the system gives no random bytes.
    pub fn sealing_key(&self) -> std::io::Result<SealingKey> {
        let key = self.first()?;
        let check = self.seal(NO_REQUEST, SealedField::Check, CHECK)?;
        Ok(SealingKey { name: key.name.clone(), digest: key.digest.clone(), check })
    }

    /// Whether the ring has this key, under the same name.
    #[must_use]
    pub fn has(&self, key: &SealingKey) -> bool {
        self.open(NO_REQUEST, SealedField::Check, &key.check).is_ok_and(|value| value == CHECK)
    }

    fn first(&self) -> std::io::Result<&RequestKey> {
        self.keys.first().ok_or_else(|| std::io::Error::other("there is no key to encrypt with"))
    }

    /// Seals a field of a request with the first key.
    /// Fails when there is no key, or the text is too long for the cipher.
    pub fn seal(&self, id: RequestId, field: SealedField, plain: &[u8]) -> std::io::Result<Sealed> {
        let RequestKey { name, key, .. } = self.first()?;
        let nonce: [u8; NONCE_LEN] = rand::random();
        let mut bytes = Vec::with_capacity(NONCE_LEN + plain.len() + AES_256_GCM.tag_len());
        bytes.extend_from_slice(&nonce);
        bytes.extend_from_slice(plain);
        let tag = key
            .seal_in_place_separate_tag(
                Nonce::assume_unique_for_key(nonce),
                Aad::from(associated_data(id, field)),
                &mut bytes[NONCE_LEN..],
            )
            .map_err(|_too_long| std::io::Error::other("the text is too long to be encrypted"))?;
        bytes.extend_from_slice(tag.as_ref());
        Ok(Sealed { key_id: name.clone(), bytes })
    }

    /// Opens a sealed field of a request.
    /// Fails when the key is missing, or the ciphertext was changed or belongs elsewhere.
    pub fn open(&self, id: RequestId, field: SealedField, sealed: &Sealed) -> Result<Vec<u8>, OpenError> {
        let key = self.keys.iter().find(|key| key.name == sealed.key_id);
        let RequestKey { key, .. } = key.ok_or_else(|| OpenError::UnknownKey(sealed.key_id.clone()))?;
        let (nonce, rest) = sealed.bytes.split_first_chunk::<NONCE_LEN>().ok_or(OpenError::Broken)?;
        let mut bytes = rest.to_vec();
        let nonce = Nonce::assume_unique_for_key(*nonce);
        let plain = key
            .open_in_place(nonce, Aad::from(associated_data(id, field)), &mut bytes)
            .map_err(|_unspecified| OpenError::Broken)?
            .len();
        bytes.truncate(plain);
        Ok(bytes)
    }

    /// Seals a field that is stored as text: the mark, the name of the key, a colon, and the sealed bytes in base64.
    /// Fails like [`Keyring::seal`].
    pub fn seal_text(&self, id: RequestId, field: SealedField, text: &str) -> std::io::Result<String> {
        let Sealed { key_id, bytes } = self.seal(id, field, text.as_bytes())?;
        Ok(format!("{STORED_MARK}{key_id}:{}", STANDARD_NO_PAD.encode(bytes)))
    }

    /// Opens a field that is stored as text. A text without the mark is not sealed: a server of an earlier version wrote it.
    /// Fails like [`Keyring::open`].
    pub fn open_text(&self, id: RequestId, field: SealedField, text: &str) -> Result<String, OpenError> {
        let Some(sealed) = text.strip_prefix(STORED_MARK) else { return Ok(text.to_owned()) };
        let (key_id, bytes) = sealed.split_once(':').ok_or(OpenError::Broken)?;
        let bytes = STANDARD_NO_PAD.decode(bytes).map_err(|_not_base64| OpenError::Broken)?;
        let plain = self.open(id, field, &Sealed { key_id: key_id.to_owned(), bytes })?;
        String::from_utf8(plain).map_err(|_not_utf8| OpenError::Broken)
    }

    /// Seals the key that idempotency keys are hashed with, with the first key.
    /// Fails like [`Keyring::seal`].
    pub(crate) fn seal_hash_key(&self, key: &[u8]) -> std::io::Result<SealedHashKey> {
        let Sealed { key_id, bytes } = self.seal(NO_REQUEST, SealedField::HashKey, key)?;
        Ok(SealedHashKey { name: key_id, digest: self.first()?.digest.clone(), bytes })
    }

    /// The names and digests of the keys, the one that encrypts first.
    pub(crate) fn names(&self) -> impl Iterator<Item = (&str, &str)> {
        self.keys.iter().map(|key| (key.name.as_str(), key.digest.as_str()))
    }

    /// Opens the key that idempotency keys are hashed with; `None` if it was sealed with a key that is missing.
    #[must_use]
    pub(crate) fn open_hash_key(&self, sealed: &SealedHashKey) -> Option<Vec<u8>> {
        let sealed = Sealed { key_id: sealed.name.clone(), bytes: sealed.bytes.clone() };
        self.open(NO_REQUEST, SealedField::HashKey, &sealed).ok()
    }
}

fn associated_data(id: RequestId, field: SealedField) -> [u8; 17] {
    let mut data = [match field {
        SealedField::Payload => b'p',
        SealedField::Result => b'r',
        SealedField::FailureMessage => b'f',
        SealedField::CallbackUrl => b'u',
        SealedField::HashKey => b'i',
        SealedField::Check => b'c',
    }; 17];
    data[1..].copy_from_slice(id.as_uuid().as_bytes());
    data
}

#[cfg(test)]
mod tests {
    use weir_core::Timestamp;

    use super::*;

    fn ring(text: &str) -> Keyring {
        Keyring::from_provider(&TextKeys { setting: "request.keys", text: text.to_owned() }).unwrap()
    }

    fn id(n: u8) -> RequestId {
        RequestId::new(Timestamp::from_seconds(1), [n; 10])
    }

    const A: &str = "a:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
    const B: &str = "b:AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=";

    #[test]
    fn a_sealed_value_opens_and_does_not_show_its_content() {
        let ring = ring(A);
        let sealed = ring.seal(id(1), SealedField::Payload, b"card 4111").unwrap();
        assert!(!sealed.bytes.windows(4).any(|window| window == b"4111"));
        assert_eq!(sealed.bytes.len(), b"card 4111".len() + SEALING_BYTES);
        assert_eq!(ring.open(id(1), SealedField::Payload, &sealed).unwrap(), b"card 4111");
        assert_ne!(
            ring.seal(id(1), SealedField::Payload, b"card 4111").unwrap(),
            sealed,
            "never the same nonce"
        );
        let empty = ring.seal(id(1), SealedField::Payload, b"").unwrap();
        assert_eq!(ring.open(id(1), SealedField::Payload, &empty).unwrap(), b"");
    }

    #[test]
    fn ciphertext_that_was_moved_or_changed_does_not_open() {
        let ring = ring(A);
        let sealed = ring.seal(id(1), SealedField::Payload, b"x").unwrap();
        assert_eq!(ring.open(id(2), SealedField::Payload, &sealed), Err(OpenError::Broken));
        assert_eq!(ring.open(id(1), SealedField::Result, &sealed), Err(OpenError::Broken));
        for place in 0..sealed.bytes.len() {
            let mut changed = sealed.clone();
            changed.bytes[place] ^= 1;
            assert_eq!(
                ring.open(id(1), SealedField::Payload, &changed),
                Err(OpenError::Broken),
                "byte {place}"
            );
        }
        for length in 0..sealed.bytes.len() {
            let cut = Sealed { bytes: sealed.bytes[..length].to_vec(), ..sealed.clone() };
            assert_eq!(ring.open(id(1), SealedField::Payload, &cut), Err(OpenError::Broken));
        }
    }

    #[test]
    fn a_sealed_text_opens_and_one_of_an_earlier_version_is_read_as_it_is() {
        let ring = ring(A);
        let sealed = ring.seal_text(id(1), SealedField::FailureMessage, "no such account ü").unwrap();
        assert!(sealed.starts_with("\u{1}a:") && !sealed.contains("account"), "{sealed:?}");
        let open = |field, text: &str| ring.open_text(id(1), field, text);
        assert_eq!(open(SealedField::FailureMessage, &sealed).unwrap(), "no such account ü");
        assert_eq!(open(SealedField::CallbackUrl, &sealed), Err(OpenError::Broken));
        assert_eq!(ring.open_text(id(2), SealedField::FailureMessage, &sealed), Err(OpenError::Broken));
        for plain in ["", "a:b", "https://example.com/a?b"] {
            assert_eq!(open(SealedField::CallbackUrl, plain).unwrap(), plain);
        }
        for broken in ["\u{1}", "\u{1}a", "\u{1}a:", "\u{1}a:*", "\u{1}a:AAAA"] {
            assert_eq!(open(SealedField::CallbackUrl, broken), Err(OpenError::Broken), "{broken:?}");
        }
        assert_eq!(open(SealedField::CallbackUrl, "\u{1}b:AAAA"), Err(OpenError::UnknownKey("b".to_owned())));
    }

    #[test]
    fn a_new_key_seals_and_the_old_one_still_opens() {
        let old = ring(A).seal(id(1), SealedField::Result, b"x").unwrap();
        let rotated = ring(&format!("{B}\n# the old one\n{A}"));
        assert_eq!(rotated.open(id(1), SealedField::Result, &old).unwrap(), b"x");
        assert_eq!(rotated.seal(id(1), SealedField::Result, b"x").unwrap().key_id, "b");
        assert_eq!(
            ring(B).open(id(1), SealedField::Result, &old),
            Err(OpenError::UnknownKey("a".to_owned()))
        );
    }

    #[test]
    fn a_key_is_identified_by_its_sealed_value_and_not_by_its_name() {
        let registered = ring(A).sealing_key().unwrap();
        assert_eq!(registered.name, "a");
        let same_name = ring(&B.replace("b:", "a:"));
        assert!(ring(A).has(&registered) && ring(&format!("{B},{A}")).has(&registered));
        assert!(!ring(B).has(&registered) && !same_name.has(&registered));
        assert_ne!(same_name.sealing_key().unwrap().digest, registered.digest);
        assert_eq!(ring(A).digest("a"), Some(registered.digest.as_str()), "the digest stays the same");
        assert_eq!(ring(A).open(NO_REQUEST, SealedField::Payload, &registered.check), Err(OpenError::Broken));
    }

    #[test]
    fn an_invalid_key_is_refused_without_being_shown() {
        let twice = format!("{A},{}", B.replace("b:", "a:"));
        let nameless = &A[1..];
        for bad in ["", "a", "a:", "a:c2hvcnQ=", nameless, "a:!!", &twice] {
            let keys = TextKeys { setting: "WEIR_REQUEST_KEYS", text: bad.to_owned() };
            let sentence = keys.keys().unwrap_err().to_string();
            assert!(!sentence.contains("c2hvcnQ") && !sentence.contains(&A[2..]), "{sentence}");
            assert!(sentence.contains("WEIR_REQUEST_KEYS"), "{sentence}");
        }
    }

    #[test]
    fn a_key_is_created_once_if_the_settings_have_none() {
        let data = tempfile::tempdir().unwrap();
        let settings =
            crate::settings::Settings::read(crate::settings::source::Sources::default()).unwrap().request;
        let sealed =
            Keyring::load(&settings, data.path()).unwrap().seal(id(1), SealedField::Payload, b"x").unwrap();
        assert_eq!(
            Keyring::load(&settings, data.path())
                .unwrap()
                .open(id(1), SealedField::Payload, &sealed)
                .unwrap(),
            b"x"
        );
    }
}
