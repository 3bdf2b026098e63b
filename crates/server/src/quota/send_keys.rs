//! Idempotency keys of sends as they are stored: keyed hashes of the user and the key, and of the message.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use ring::hmac;
use weir_core::{IdempotencyKey, UserId};
use weir_store::Result;
use weir_store::quota::SendKey;

const KEY_LABEL: &[u8] = b"weir send key";
const MESSAGE_LABEL: &[u8] = b"weir send message";

/// Supplies the key of the hashes, which is the same on all servers of a store.
pub(crate) type HashKeySource =
    Arc<dyn Fn() -> Pin<Box<dyn Future<Output = Result<Arc<hmac::Key>>> + Send>> + Send + Sync>;

pub(super) fn send_key(hash_key: &hmac::Key, user: &UserId, key: &IdempotencyKey, message: &str) -> SendKey {
    let hash = |label: &[u8], content: &str| {
        let mut context = hmac::Context::with_key(hash_key);
        // Each part with its length, so that no two lists of parts are the same bytes.
        for part in [label, user.as_str().as_bytes(), content.as_bytes()] {
            context.update(&(part.len() as u64).to_be_bytes());
            context.update(part);
        }
        let mut bytes = [0; 16];
        let tag = context.sign();
        bytes.iter_mut().zip(tag.as_ref()).for_each(|(byte, tag)| *byte = *tag);
        bytes
    };
    SendKey { hash: hash(KEY_LABEL, key.as_str()), message: hash(MESSAGE_LABEL, message) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_keys_and_messages_are_told_apart() {
        let hash_key = hmac::Key::new(hmac::HMAC_SHA256, &[7; 32]);
        let of = |user, key, message| {
            let (user, key) = (UserId::parse(user).unwrap(), IdempotencyKey::parse(key).unwrap());
            send_key(&hash_key, &user, &key, message)
        };
        let first = of("alice", "k", "hello");
        assert_eq!(first, of("alice", "k", "hello"));
        assert_eq!(first.hash, of("alice", "k", "hello ").hash);
        assert_ne!(first.message, of("alice", "k", "hello ").message);
        for other in [of("bob", "k", "hello"), of("alice", "K", "hello"), of("alicek", "k", "hello")] {
            assert_ne!(first.hash, other.hash);
        }
        let other_key = hmac::Key::new(hmac::HMAC_SHA256, &[8; 32]);
        let (user, key) = (UserId::parse("alice").unwrap(), IdempotencyKey::parse("k").unwrap());
        assert_ne!(first.hash, send_key(&other_key, &user, &key, "hello").hash);
    }
}
