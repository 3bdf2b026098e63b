//! Settings of the sender.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use url::Url;

use crate::settings::parse::{certificates_file, count, duration, optional_url};
use crate::settings::source::{SettingError, SettingsReader};

/// How the sender claims messages from the queue and delivers them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SenderSettings {
    /// `sender.batch_max`: messages claimed at once.
    pub batch_max: usize,
    /// `sender.visibility`: how long a claim lasts. After that other senders may claim the messages.
    pub visibility: Duration,
    /// `sender.poll`: how often the queue is polled for messages that other processes enqueued.
    pub poll: Duration,
    /// `sender.url`: where messages are posted; `None` only logs them.
    pub url: Option<Url>,
    /// `sender.attempts`: calls before a message becomes a dead letter.
    pub attempts: NonZeroU32,
    /// `sender.concurrency`: concurrent calls of one process, each for another user.
    pub concurrency: usize,
    /// `sender.connect_timeout` and `sender.read_timeout`: how long the provider may take to accept a connection, and to answer.
    pub connect_timeout: Duration,
    pub read_timeout: Duration,
    /// `sender.sslrootcert`: a file of certificate authorities to trust instead of the system's.
    pub sslrootcert: Option<PathBuf>,
}

impl SenderSettings {
    /// What must be left of a claim to settle it.
    const SETTLE_TIME: Duration = Duration::from_secs(3);
    /// The shortest time in which calls of a claim may begin.
    const CALLING_TIME_MIN: Duration = Duration::from_secs(1);
    /// The longest such time: a slow user delays the others of its claim for so long and one call more.
    const CALLING_TIME_MAX: Duration = Duration::from_secs(2);

    pub(crate) fn read(reader: &mut SettingsReader) -> Result<Self, SettingError> {
        let span = "a duration from 1ms to 24h, such as 500ms or 2s";
        let attempts = |text: &str| NonZeroU32::new(u32::try_from(count(1_000)(text)?).ok()?);
        let second = Duration::from_secs(1);
        let settings = Self {
            batch_max: reader.get("sender.batch_max", 1_000, count(100_000), "a number from 1 to 100000")?,
            visibility: reader.get("sender.visibility", 30 * second, duration, span)?,
            poll: reader.get("sender.poll", Duration::from_millis(100), duration, span)?,
            url: reader.get("sender.url", None, optional_url, "an http:// or https:// URL, or empty")?,
            attempts: reader.get(
                "sender.attempts",
                NonZeroU32::MIN.saturating_add(4),
                attempts,
                "a number from 1 to 1000",
            )?,
            concurrency: reader.get("sender.concurrency", 64, count(10_000), "a number from 1 to 10000")?,
            connect_timeout: reader.get("sender.connect_timeout", second, duration, span)?,
            read_timeout: reader.get("sender.read_timeout", 3 * second, duration, span)?,
            sslrootcert: reader.get(
                "sender.sslrootcert",
                None,
                certificates_file,
                "a file of certificates in PEM that can be read, or empty",
            )?,
        };
        let shortest = settings.longest_call() + Self::SETTLE_TIME + Self::CALLING_TIME_MIN;
        if settings.url.is_some() && settings.visibility < shortest {
            let allowed = format!(
                "at least {shortest:?} with sender.url: a call, which may take sender.connect_timeout and \
                 sender.read_timeout, must end within a claim"
            );
            return Err(SettingError::new(
                "sender.visibility",
                format!("{:?}", settings.visibility),
                allowed,
            ));
        }
        Ok(settings)
    }

    pub(super) fn longest_call(&self) -> Duration {
        self.connect_timeout + self.read_timeout
    }

    /// For how long after a claim calls may begin, so that the last one ends and is settled within the claim.
    pub(super) fn calling_time(&self) -> Duration {
        self.visibility
            .saturating_sub(self.longest_call() + Self::SETTLE_TIME)
            .clamp(Self::CALLING_TIME_MIN, Self::CALLING_TIME_MAX)
    }
}
