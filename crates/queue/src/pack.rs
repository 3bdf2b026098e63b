//! Packs: the format of messages that were enqueued together and are stored as one row. Ids and partly settled packs are
//! left to the engines.
//!
//! A batch of messages costs one insert and one delete per shard instead of one per message. Each engine's `queue.rs` reads
//! packs when it claims messages.

/// The most messages in a pack.
pub const MESSAGES_MAX: usize = 1_024;

const LENGTH_BYTES: usize = size_of::<u32>();

/// The bytes of a pack end in the middle of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a row of queue_pack is truncated")]
pub struct TruncatedPack;

/// Returns how many messages with these lengths fit into a pack of `bytes_max`: one at least.
pub fn count_fitting(lengths: impl Iterator<Item = usize>, bytes_max: usize) -> usize {
    let mut bytes = 0_usize;
    let fits = |length: &usize| {
        bytes = bytes.saturating_add(*length);
        bytes <= bytes_max
    };
    lengths.take(MESSAGES_MAX).take_while(fits).count().max(1)
}

/// Encodes messages, each a key and a payload, in order.
pub fn write<'a>(messages: impl IntoIterator<Item = (&'a str, &'a [u8])> + Clone) -> Vec<u8> {
    let length = |(key, payload): (&str, &[u8])| 2 * LENGTH_BYTES + key.len() + payload.len();
    let mut text = Vec::with_capacity(messages.clone().into_iter().map(length).sum());
    for (key, payload) in messages {
        put(&mut text, key.as_bytes());
        put(&mut text, payload);
    }
    text
}

/// Decodes the messages of a pack, in order.
pub fn read(pack: &[u8]) -> impl Iterator<Item = Result<(&str, &[u8]), TruncatedPack>> {
    let mut rest = pack;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let message = (|| Some((str::from_utf8(take(&mut rest)?).ok()?, take(&mut rest)?)))();
        // Nothing after a truncated message can be decoded.
        message.is_none().then(|| rest = &[]);
        Some(message.ok_or(TruncatedPack))
    })
}

/// Appends the length of `part` in [`LENGTH_BYTES`], little-endian, and its bytes.
fn put(text: &mut Vec<u8>, part: &[u8]) {
    let length = u32::try_from(part.len()).expect("a message is short");
    text.extend_from_slice(&length.to_le_bytes());
    text.extend_from_slice(part);
}

/// Takes what [`put`] has appended, or `None` if it is truncated.
fn take<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let (length, after) = rest.split_first_chunk()?;
    let (part, after) = after.split_at_checked(usize::try_from(u32::from_le_bytes(*length)).ok()?)?;
    *rest = after;
    Some(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_read_back_as_they_were_written() {
        let messages = [("a", &b"1"[..]), ("", b""), ("ä", b"\0\xff")];
        let pack = write(messages);
        assert_eq!(read(&pack).collect::<Result<Vec<_>, _>>().unwrap(), messages);
    }

    #[test]
    fn a_pack_is_bounded_by_messages_and_by_bytes() {
        assert_eq!(count_fitting([1; 3].into_iter(), 10), 3);
        assert_eq!(count_fitting(std::iter::repeat(0), 10), MESSAGES_MAX);
        assert_eq!(count_fitting([9, 1, 1].into_iter(), 10), 2);
        assert_eq!(count_fitting([11, 1].into_iter(), 10), 1);
    }

    #[test]
    fn a_truncated_pack_is_an_error_and_not_a_wrong_message() {
        for cut in [
            &b"\x01"[..],
            b"\x01\0\0\0",
            b"\x01\0\0\0a",
            b"\x01\0\0\0a\x02\0\0\0b",
            b"\x01\0\0\0\xff\0\0\0\0",
        ] {
            let found: Vec<_> = read(cut).collect();
            assert_eq!(found, [Err(TruncatedPack)], "{cut:?}");
        }
        assert_eq!(read(b"").count(), 0);
    }
}
