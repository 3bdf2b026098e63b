//! Settings of the sender.

use std::time::Duration;

use crate::settings::parse::{count, duration};
use crate::settings::source::{SettingError, SettingsReader};

/// How the sender claims messages from the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SenderSettings {
    /// `sender.batch_max`: messages claimed at once.
    pub batch_max: usize,
    /// `sender.visibility`: how long a claim lasts. After that other senders may claim the messages.
    pub visibility: Duration,
    /// `sender.poll`: how often the queue is polled for messages that other processes enqueued.
    pub poll: Duration,
}

impl SenderSettings {
    pub(crate) fn read(reader: &mut SettingsReader) -> Result<Self, SettingError> {
        let span = "a duration from 1ms to 24h, such as 500ms or 2s";
        Ok(Self {
            batch_max: reader.get("sender.batch_max", 1_000, count(100_000), "a number from 1 to 100000")?,
            visibility: reader.get("sender.visibility", Duration::from_secs(30), duration, span)?,
            poll: reader.get("sender.poll", Duration::from_millis(100), duration, span)?,
        })
    }
}
