//! Parses the replies of the quota scripts. Each parser returns `None` for a reply that its script cannot give.

use std::time::Duration;

use redis::Value;
use weir_core::Timestamp;
use weir_core::quota::{Quota, QuotaLimits};

/// The reply of `quota_spend` or `quota_install` for one user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SpendReply {
    /// There is no usable hash.
    NoHash {
        /// A reservation may be installed under this nonce.
        nonce: String,
        /// Redis's time, in milliseconds.
        redis_ms: i64,
    },
    /// Units were spent, perhaps fewer than requested.
    Spent(HashState),
    /// `quota_install`: the reservation was refused.
    Refused,
    /// The hash was written under a later epoch.
    Outdated,
}

/// A user's hash after a spend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HashState {
    /// Units that this call has spent.
    pub(crate) spent: u32,
    /// The units of the window that are spent now.
    pub(crate) count: u32,
    /// The count up to which units are reserved in the store.
    pub(crate) reserved: u32,
    pub(crate) limits: QuotaLimits,
    /// When the window began.
    pub(crate) window: Timestamp,
    /// The time until it ends.
    pub(crate) remaining: Duration,
    /// Redis's time, in milliseconds.
    pub(crate) redis_ms: i64,
    /// `quota_install`: the other callers that may be about to install units, or to give some back to the store.
    pub(crate) pending: u32,
    /// How often units of the window were given back.
    pub(crate) returns: u32,
}

impl HashState {
    pub(crate) fn reset_at(&self) -> Timestamp {
        self.window.plus(self.limits.window())
    }

    /// The store's time of the decision, derived from the time that remains of the window.
    pub(crate) fn decided_at(&self) -> Timestamp {
        let remaining_us = i64::try_from(self.remaining.as_micros()).unwrap_or(i64::MAX);
        Timestamp::from_micros(self.reset_at().as_micros().saturating_sub(remaining_us))
    }
}

/// A user's hash as `quota_peek` reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PeekedHash {
    pub(crate) window: Timestamp,
    pub(crate) count: u32,
    pub(crate) reserved: u32,
    /// The callers that may be about to install units, or to give some back to the store.
    pub(crate) pending: u32,
    /// How often units of the window were given back.
    pub(crate) returns: u32,
}

/// A user's hash after `quota_release`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReleaseReply {
    pub(crate) window: Timestamp,
    /// The units that were removed.
    pub(crate) units: u32,
    /// The other callers that may be about to install units, or to give some back to the store.
    pub(crate) pending: u32,
    /// How often units of the window were given back before.
    pub(crate) returns: u32,
}

impl PeekedHash {
    pub(crate) fn unused(&self) -> u32 {
        self.reserved.saturating_sub(self.count)
    }

    /// The row with what the hash holds unused as reserved, and all else as sent. `None` if units were reserved after the row
    /// was read, which is then too old.
    pub(crate) fn live_row(&self, row: &Quota) -> Option<Quota> {
        let reserved_count = self.unused();
        let current_count = row.counted().saturating_sub(reserved_count);
        (self.reserved <= row.counted()).then_some(Quota { current_count, reserved_count, ..*row })
    }
}

pub(crate) fn parse_spend(value: &Value) -> Option<SpendReply> {
    let Value::Array(fields) = value else { return None };
    let (kind, fields) = fields.split_first()?;
    match (int(kind)?, fields) {
        (0, []) => Some(SpendReply::Refused),
        (0, [nonce, redis_ms]) => Some(SpendReply::NoHash { nonce: text(nonce)?, redis_ms: int(redis_ms)? }),
        (1, [spent, count, reserved, limit, minutes, window, remaining, redis_ms, pending, returns]) => {
            Some(SpendReply::Spent(HashState {
                spent: unsigned(spent)?,
                count: unsigned(count)?,
                reserved: unsigned(reserved)?,
                limits: QuotaLimits::new(unsigned(limit)?, unsigned(minutes)?).ok()?,
                window: Timestamp::from_micros(int(window)?),
                remaining: Duration::from_millis(u64::try_from(int(remaining)?).ok()?),
                redis_ms: int(redis_ms)?,
                pending: unsigned(pending)?,
                returns: unsigned(returns)?,
            }))
        }
        (2, []) => Some(SpendReply::Outdated),
        _ => None,
    }
}

pub(crate) fn parse_peek(value: &Value) -> Option<PeekedHash> {
    let Value::Array(fields) = value else { return None };
    let [window, count, reserved, pending, returns] = &fields[..] else { return None };
    let window = Timestamp::from_micros(int(window)?);
    let (count, reserved) = (unsigned(count)?, unsigned(reserved)?);
    Some(PeekedHash { window, count, reserved, pending: unsigned(pending)?, returns: unsigned(returns)? })
}

pub(crate) fn parse_release(value: &Value) -> Option<ReleaseReply> {
    let Value::Array(fields) = value else { return None };
    let [window, units, pending, returns] = &fields[..] else { return None };
    let window = Timestamp::from_micros(int(window)?);
    Some(ReleaseReply {
        window,
        units: unsigned(units)?,
        pending: unsigned(pending)?,
        returns: unsigned(returns)?,
    })
}

/// Returns the window and its unused units from the reply of `quota_forget`.
pub(crate) fn parse_forget(value: &Value) -> Option<(Timestamp, u32)> {
    let Value::Array(fields) = value else { return None };
    let [window, units] = &fields[..] else { return None };
    Some((Timestamp::from_micros(int(window)?), unsigned(units)?))
}

/// Parses a number that a script computed, or one that it read from a hash, which is text.
fn int(value: &Value) -> Option<i64> {
    match value {
        Value::Int(number) => Some(*number),
        Value::BulkString(text) => str::from_utf8(text).ok()?.parse().ok(),
        _ => None,
    }
}

fn unsigned(value: &Value) -> Option<u32> {
    u32::try_from(int(value)?).ok()
}

fn text(value: &Value) -> Option<String> {
    if let Value::BulkString(text) = value { String::from_utf8(text.clone()).ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bulk(text: &str) -> Value {
        Value::BulkString(text.into())
    }

    #[test]
    fn replies_are_parsed_and_malformed_ones_are_refused() {
        let hash_state = Value::Array(vec![
            Value::Int(1),
            Value::Int(2),
            Value::Int(7),
            Value::Int(9),
            bulk("10"),
            bulk("1"),
            bulk("1700000000000000"),
            Value::Int(59_000),
            Value::Int(5),
            Value::Int(0),
            bulk("3"),
        ]);
        let Some(SpendReply::Spent(hash_state)) = parse_spend(&hash_state) else {
            panic!("units were spent")
        };
        assert_eq!((hash_state.spent, hash_state.count, hash_state.reserved), (2, 7, 9));
        assert_eq!((hash_state.pending, hash_state.returns), (0, 3));
        assert_eq!(hash_state.decided_at(), Timestamp::from_micros(1_700_000_001_000_000));
        assert_eq!(parse_spend(&Value::Array(vec![Value::Int(0)])), Some(SpendReply::Refused));
        assert_eq!(
            parse_spend(&Value::Array(vec![Value::Int(0), bulk("n"), Value::Int(3)])),
            Some(SpendReply::NoHash { nonce: "n".into(), redis_ms: 3 })
        );
        assert_eq!(parse_spend(&Value::Array(vec![Value::Int(1), Value::Nil])), None);
        assert_eq!(parse_spend(&Value::Nil), None);
        assert_eq!(parse_peek(&Value::Array(vec![])), None);
        let released = Value::Array(vec![bulk("5"), Value::Int(2), Value::Int(1), bulk("3")]);
        let expected = ReleaseReply { window: Timestamp::from_micros(5), units: 2, pending: 1, returns: 3 };
        assert_eq!(parse_release(&released), Some(expected));
        let forgotten = Value::Array(vec![bulk("5"), Value::Int(2)]);
        assert_eq!(parse_forget(&forgotten), Some((Timestamp::from_micros(5), 2)));
        assert_eq!((parse_release(&forgotten), parse_forget(&Value::Array(vec![]))), (None, None));
    }
}
