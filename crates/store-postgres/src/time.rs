//! Converts between `Timestamp` and the driver's `SystemTime`. Both have microseconds here, so the conversion is exact.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use weir_core::Timestamp;

pub(crate) fn to_system(at: Timestamp) -> SystemTime {
    let span = Duration::from_micros(at.as_micros().unsigned_abs());
    if at < Timestamp::EPOCH { UNIX_EPOCH - span } else { UNIX_EPOCH + span }
}

pub(crate) fn from_system(at: SystemTime) -> Timestamp {
    match at.duration_since(UNIX_EPOCH) {
        Ok(after) => Timestamp::from_micros(micros(after)),
        Err(before) => Timestamp::from_micros(-micros(before.duration())),
    }
}

/// Converts a duration to the microseconds that statements take, up to the maximum of `bigint`.
pub(crate) fn micros(span: Duration) -> i64 {
    i64::try_from(span.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversion_is_exact_in_both_directions() {
        for micros in [0, 1, -1, 1_700_000_000_123_456, -62_000_000_000_000_000] {
            let at = Timestamp::from_micros(micros);
            assert_eq!(from_system(to_system(at)), at);
        }
    }
}
