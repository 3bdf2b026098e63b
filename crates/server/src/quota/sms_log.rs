//! The log lines `SMS SENT`, which deliver messages. They look like every other log line but are written a batch at a time.
//!
//! A sender may deliver a hundred thousand messages a second. One tracing event and one system call for each would cost more
//! than everything else, and would not report whether the line was written.

use std::io::Write;

use serde::Serialize;
use weir_queue::sms::SmsEvent;

use crate::settings::log::LogFormat;
use crate::telemetry::logs::is_human;

/// Target of the lines. They are written at every log level: the line is the delivery.
const TARGET: &str = "weir::sender";

/// Lines that are written together, with one timestamp.
#[derive(Debug)]
pub(super) struct SmsLog {
    is_human: bool,
    now: jiff::Timestamp,
    text: Vec<u8>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct SmsLogLine<'a> {
    timestamp: jiff::Timestamp,
    level: &'static str,
    message: &'static str,
    user_id: &'a str,
    payload: &'a str,
    message_id: uuid::Uuid,
    target: &'static str,
}

impl SmsLog {
    /// Creates an empty batch. After a failed write it begins with a line break, since the write may have ended within a
    /// line.
    #[must_use]
    pub(super) fn new(format: LogFormat, has_partial_line: bool) -> Self {
        let text = if has_partial_line { vec![b'\n'] } else { Vec::new() };
        Self { is_human: is_human(format), now: jiff::Timestamp::now(), text }
    }

    pub(super) fn add(&mut self, event: &SmsEvent<'_>, message_id: uuid::Uuid) {
        let SmsEvent { user_id, message, .. } = event;
        let timestamp = self.now;
        // Writing to memory cannot fail.
        let _ = if self.is_human {
            write!(
                self.text,
                "{timestamp}  INFO SMS SENT userId={user_id:?} payload={message:?} messageId={message_id}"
            )
        } else {
            let (level, target) = ("INFO", TARGET);
            let line = SmsLogLine {
                timestamp,
                level,
                message: "SMS SENT",
                user_id,
                payload: message,
                message_id,
                target,
            };
            serde_json::to_writer(&mut self.text, &line).map_err(std::io::Error::from)
        };
        self.text.push(b'\n');
    }

    /// Writes all lines to standard output. Succeeds only if all of them were written.
    pub(super) fn write(self) -> std::io::Result<()> {
        let mut stdout = std::io::stdout().lock();
        stdout.write_all(&self.text)?;
        stdout.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event() -> SmsEvent<'static> {
        SmsEvent {
            message_id: None,
            user_id: "alice".into(),
            message: "two\nlines \"quoted\"".into(),
            accepted_at: None,
        }
    }

    fn two_lines(is_human: bool) -> String {
        let mut log = SmsLog { is_human, now: jiff::Timestamp::UNIX_EPOCH, text: Vec::new() };
        log.add(&event(), uuid::Uuid::nil());
        log.add(&event(), uuid::Uuid::nil());
        String::from_utf8(log.text).unwrap()
    }

    #[test]
    fn a_message_with_line_breaks_is_logged_as_one_line() {
        for is_human in [true, false] {
            let text = two_lines(is_human);
            assert_eq!(text.lines().count(), 2, "{text}");
            assert!(text.lines().all(|line| line.contains("SMS SENT") && line.contains("alice")), "{text}");
        }
    }

    #[test]
    fn a_json_line_has_the_fields_of_other_log_lines() {
        let line: serde_json::Value = serde_json::from_str(two_lines(false).lines().next().unwrap()).unwrap();
        assert_eq!(
            (&line["level"], &line["message"], &line["target"]),
            (&"INFO".into(), &"SMS SENT".into(), &TARGET.into())
        );
        assert_eq!((&line["userId"], &line["payload"]), (&"alice".into(), &"two\nlines \"quoted\"".into()));
    }
}
