//! Redis Cluster's hash slots: computes the slot of a key and parses `CLUSTER SLOTS`.

use redis::Value;

use crate::target::Address;

/// The number of hash slots of every cluster.
pub(crate) const HASH_SLOTS: usize = 16_384;

/// Returns the hash slot of a key: a CRC of the text between its first braces, or of the whole key.
pub(crate) fn hash_slot(key: &[u8]) -> usize {
    let tag = key.iter().position(|&byte| byte == b'{').and_then(|open| {
        let length = key[open + 1..].iter().position(|&byte| byte == b'}')?;
        (length > 0).then(|| &key[open + 1..open + 1 + length])
    });
    usize::from(crc16(tag.unwrap_or(key))) % HASH_SLOTS
}

/// CRC-16/XMODEM.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, &byte| {
        (0..8).fold(crc ^ (u16::from(byte) << 8), |crc, _| {
            if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 }
        })
    })
}

/// A range of hash slots and the server that owns it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SlotRange {
    pub(crate) first: usize,
    pub(crate) last: usize,
    pub(crate) server: Address,
}

/// Parses the reply to `CLUSTER SLOTS` of the server at `source`, whose address stands in for a missing host name.
pub(crate) fn parse_slot_ranges(reply: &Value, source: &Address) -> Option<Vec<SlotRange>> {
    let range = |entry: &Value| {
        let [first, last, master, ..] = array(entry)? else { return None };
        let [host, port, ..] = array(master)? else { return None };
        let host = match host {
            Value::BulkString(name) if !name.is_empty() && name != b"?" => {
                String::from_utf8(name.clone()).ok()?
            }
            Value::SimpleString(name) if !name.is_empty() => name.clone(),
            _ => source.host.clone(),
        };
        let port = u16::try_from(int(port)?).ok()?;
        let (first, last) = (usize::try_from(int(first)?).ok()?, usize::try_from(int(last)?).ok()?);
        (last < HASH_SLOTS && first <= last).then_some(SlotRange {
            first,
            last,
            server: Address { host, port },
        })
    };
    array(reply)?.iter().map(range).collect()
}

fn array(value: &Value) -> Option<&[Value]> {
    if let Value::Array(items) = value { Some(items) } else { None }
}

fn int(value: &Value) -> Option<i64> {
    if let Value::Int(number) = value { Some(*number) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_slots_match_those_of_redis() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
        assert_eq!(hash_slot(b"foo"), 12_182);
        assert_eq!(hash_slot(b"{user1000}.following"), hash_slot(b"user1000"));
        assert_eq!(hash_slot(b"foo{}{bar}"), usize::from(crc16(b"foo{}{bar}")) % HASH_SLOTS);
    }

    #[test]
    fn slot_ranges_name_the_masters() {
        let master = |host: &str, port| {
            Value::Array(vec![
                Value::BulkString(host.into()),
                Value::Int(port),
                Value::BulkString("id".into()),
            ])
        };
        let reply = Value::Array(vec![
            Value::Array(vec![
                Value::Int(0),
                Value::Int(100),
                master("10.0.0.1", 7000),
                master("10.0.0.9", 1),
            ]),
            Value::Array(vec![Value::Int(101), Value::Int(16_383), master("", 7001)]),
        ]);
        let source = Address { host: "here".into(), port: 1 };
        let ranges = parse_slot_ranges(&reply, &source).unwrap();
        assert_eq!(
            (ranges[0].first, ranges[0].last, ranges[0].server.to_string()),
            (0, 100, "10.0.0.1:7000".into())
        );
        assert_eq!(ranges[1].server.to_string(), "here:7001");
        assert!(parse_slot_ranges(&Value::Nil, &source).is_none());
    }
}
