//! What the quota scripts answer.

use std::time::Duration;

use redis::Value;
use weir_core::Timestamp;
use weir_core::quota::QuotaLimits;

/// The answer of `quota_spend` and `quota_install` for one user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    /// Nothing to take from.
    Cold {
        /// Under which a reservation may be installed.
        nonce: String,
        /// Redis's time, in milliseconds.
        redis_ms: i64,
    },
    /// Places were taken, perhaps fewer than asked for.
    Taken(HashState),
    /// `quota_install`: the reservation was refused.
    Refused,
    /// The hash was written under a later epoch.
    Outdated,
}

/// A user's hash after a spend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HashState {
    pub(crate) taken: u32,
    /// The count with them.
    pub(crate) count: u32,
    /// Up to which places are reserved in the store.
    pub(crate) reserved: u32,
    pub(crate) limits: QuotaLimits,
    /// When the window began.
    pub(crate) window: Timestamp,
    /// How much of it is left.
    pub(crate) left: Duration,
    /// Redis's time, in milliseconds.
    pub(crate) redis_ms: i64,
}

impl HashState {
    pub(crate) fn reset_at(&self) -> Timestamp {
        self.window.plus(self.limits.window())
    }

    /// The store's time of the decision, as far as Redis can tell.
    pub(crate) fn at(&self) -> Timestamp {
        let left_us = i64::try_from(self.left.as_micros()).unwrap_or(i64::MAX);
        Timestamp::from_micros(self.reset_at().as_micros().saturating_sub(left_us))
    }
}

/// What `quota_peek` found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) window: Timestamp,
    pub(crate) count: u32,
    pub(crate) reserved: u32,
}

/// None when it is not what the scripts answer.
pub(crate) fn spent(value: &Value) -> Option<Reply> {
    let Value::Array(fields) = value else { return None };
    let (kind, fields) = fields.split_first()?;
    match (int(kind)?, fields) {
        (0, []) => Some(Reply::Refused),
        (0, [nonce, redis_ms]) => Some(Reply::Cold { nonce: text(nonce)?, redis_ms: int(redis_ms)? }),
        (1, [taken, count, reserved, limit, minutes, window, left, redis_ms]) => {
            Some(Reply::Taken(HashState {
                taken: unsigned(taken)?,
                count: unsigned(count)?,
                reserved: unsigned(reserved)?,
                limits: QuotaLimits::new(unsigned(limit)?, unsigned(minutes)?).ok()?,
                window: Timestamp::from_micros(int(window)?),
                left: Duration::from_millis(u64::try_from(int(left)?).ok()?),
                redis_ms: int(redis_ms)?,
            }))
        }
        (2, []) => Some(Reply::Outdated),
        _ => None,
    }
}

pub(crate) fn held(value: &Value) -> Option<Held> {
    let Value::Array(fields) = value else { return None };
    let [window, count, reserved] = &fields[..] else { return None };
    let window = Timestamp::from_micros(int(window)?);
    Some(Held { window, count: unsigned(count)?, reserved: unsigned(reserved)? })
}

/// The window and the number of places that `quota_release` took back.
pub(crate) fn released(value: &Value) -> Option<(Timestamp, u32)> {
    let Value::Array(fields) = value else { return None };
    let [window, units] = &fields[..] else { return None };
    Some((Timestamp::from_micros(int(window)?), unsigned(units)?))
}

/// Scripts answer with numbers, and with what hashes hold, which is text.
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
    fn answers_are_read_and_what_is_none_is_refused() {
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
        ]);
        let Some(Reply::Taken(hash_state)) = spent(&hash_state) else { panic!("places were taken") };
        assert_eq!((hash_state.taken, hash_state.count, hash_state.reserved), (2, 7, 9));
        assert_eq!(hash_state.at(), Timestamp::from_micros(1_700_000_001_000_000));
        assert_eq!(spent(&Value::Array(vec![Value::Int(0)])), Some(Reply::Refused));
        assert_eq!(
            spent(&Value::Array(vec![Value::Int(0), bulk("n"), Value::Int(3)])),
            Some(Reply::Cold { nonce: "n".into(), redis_ms: 3 })
        );
        assert_eq!(spent(&Value::Array(vec![Value::Int(1), Value::Nil])), None);
        assert_eq!(spent(&Value::Nil), None);
        assert_eq!(held(&Value::Array(vec![])), None);
        assert_eq!(
            released(&Value::Array(vec![bulk("5"), Value::Int(2)])),
            Some((Timestamp::from_micros(5), 2))
        );
    }
}
