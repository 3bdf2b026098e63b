//! Finds callers of gRPC that do not take their responses. HTTP/2 opens a window for each, and hyper waits for it without end,
//! however many responses wait. A connection with a message that was not taken for a minute is ended. Messages are small, so a
//! caller that reads takes them at once.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::requests::RequestPermit;
use crate::peer::transport::WRITE_TIMEOUT;

/// The messages of one connection that its caller has not taken. Clones share them.
#[derive(Clone, Default)]
pub(super) struct UnreadMessages(Arc<Mutex<Messages>>);

#[derive(Default)]
struct Messages {
    /// When each was sent, with its number.
    unread: BTreeSet<(Instant, u64)>,
    /// How many there have been.
    count: u64,
}

impl UnreadMessages {
    /// Whether a message was not taken for a minute. Connections are pinged more often than that, so whoever asks when the
    /// connection is read is told in time.
    pub(super) fn is_overdue(&self) -> bool {
        self.0.lock().unread.first().is_some_and(|(sent, _)| sent.elapsed() >= WRITE_TIMEOUT)
    }

    /// Counts a message as unread until the bytes are dropped: when they are written, or with their stream. So long its request has
    /// the permit.
    pub(super) fn track(&self, bytes: Bytes, permit: Option<RequestPermit>) -> Bytes {
        let mut messages = self.0.lock();
        messages.count += 1;
        let key = (Instant::now(), messages.count);
        messages.unread.insert(key);
        drop(messages);
        Bytes::from_owner(UnreadMessage { bytes, key, unread: self.clone(), _permit: permit })
    }
}

struct UnreadMessage {
    bytes: Bytes,
    key: (Instant, u64),
    unread: UnreadMessages,
    _permit: Option<RequestPermit>,
}

impl AsRef<[u8]> for UnreadMessage {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for UnreadMessage {
    fn drop(&mut self) {
        self.unread.0.lock().unread.remove(&self.key);
    }
}
