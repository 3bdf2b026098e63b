//! Settings of slot: assigning and dispatching.

use std::time::Duration;

use crate::settings::parse::{count, duration};
use crate::settings::source::{SettingError, SettingsReader};

/// Topics that Weir uses itself. Due events must not be published there.
const RESERVED: [&str; 3] = ["sms-outbound", "request-processing", weir_store::request::WEBHOOKS_TOPIC];

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotSettings {
    /// `slot.headroom`: how many windows past the first one with room are tried while other calls have them locked, before
    /// an event waits.
    pub headroom: u32,
    /// `slot.dispatch.topic`: the topic on which each slot is published when its time comes.
    pub dispatch_topic: Option<String>,
    /// `slot.retention`: how long slots, counters and versions of configs are stored after their time; `None`: forever.
    pub retention: Option<Duration>,
}

/// The longest retention, in days.
const RETENTION_DAYS_MAX: usize = 3_650;

impl SlotSettings {
    pub(crate) fn read(reader: &mut SettingsReader) -> Result<Self, SettingError> {
        let headroom =
            reader.get("slot.headroom", 100, count(10_000), "a number of windows from 1 to 10000")?;
        let dispatch_topic = reader.get(
            "slot.dispatch.topic",
            None,
            |text| if text.is_empty() { Some(None) } else { topic(text).map(Some) },
            "the name of a topic (letters, digits, '.', '_', '-', at most 200; not one of Weir's own), or nothing",
        )?;
        let retention = reader.get(
            "slot.retention",
            None,
            retention,
            "a duration of at least 1s, such as 90d or 12h (at most 3650d), or off",
        )?;
        Ok(Self { headroom: u32::try_from(headroom).unwrap_or(u32::MAX), dispatch_topic, retention })
    }
}

/// Parses `off`, a number of days such as `90d`, or a shorter duration.
fn retention(text: &str) -> Option<Option<Duration>> {
    if matches!(text.trim(), "off" | "") {
        return Some(None);
    }
    let span = match text.trim().strip_suffix('d').map(count(RETENTION_DAYS_MAX)) {
        Some(days) => Duration::from_secs(days? as u64 * 86_400),
        None => duration(text)?,
    };
    (span >= Duration::from_secs(1)).then_some(Some(span))
}

fn topic(text: &str) -> Option<String> {
    let has_valid_chars = text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'));
    let is_reserved = RESERVED.contains(&text) || text.ends_with(".dlq");
    let is_allowed = has_valid_chars && !is_reserved && text.len() <= 200 && !matches!(text, "." | "..");
    is_allowed.then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_retention_is_off_or_a_second_to_ten_years() {
        let seconds = |seconds| Some(Some(Duration::from_secs(seconds)));
        assert_eq!(retention("off"), Some(None));
        assert_eq!(retention("90d"), seconds(90 * 86_400));
        assert_eq!(retention("36h"), None, "more than a day is written in days");
        assert_eq!(retention("1h 30m"), seconds(5_400));
        assert_eq!(retention("1s"), seconds(1));
        for bad in ["0", "0d", "999ms", "3651d", "-1d", "1.5d", "forever"] {
            assert_eq!(retention(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_topic_has_a_name_that_kafka_accepts_and_is_not_reserved() {
        assert_eq!(topic("payments.due-1_x"), Some("payments.due-1_x".to_owned()));
        for bad in [
            "a b",
            "sms-outbound",
            "request-webhooks",
            "request-processing",
            "x.dlq",
            "..",
            "ü",
            &"x".repeat(201),
        ] {
            assert_eq!(topic(bad), None, "{bad}");
        }
    }
}
