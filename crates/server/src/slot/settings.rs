//! How slots are assigned and dispatched.

use crate::settings::parse::count;
use crate::settings::source::{SettingError, SettingsReader};

/// Topics of Weir's own, where due events must not be mixed in.
const RESERVED: [&str; 3] = ["sms-outbound", "request-processing", weir_store::request::WEBHOOKS_TOPIC];

/// How slots are assigned and dispatched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotSettings {
    /// `slot.headroom`: windows searched past the first one with room while others hold them, before an event waits.
    pub headroom: u32,
    /// `slot.dispatch.topic`: where each slot is published when its time comes.
    pub dispatch_topic: Option<String>,
}

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
        Ok(Self { headroom: u32::try_from(headroom).unwrap_or(u32::MAX), dispatch_topic })
    }
}

fn topic(text: &str) -> Option<String> {
    let is_spelled = text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'));
    let is_ours = RESERVED.contains(&text) || text.ends_with(".dlq");
    let is_allowed = is_spelled && !is_ours && text.len() <= 200 && !matches!(text, "." | "..");
    is_allowed.then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_topic_is_spelled_as_kafka_wants_it_and_is_none_of_ours() {
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
