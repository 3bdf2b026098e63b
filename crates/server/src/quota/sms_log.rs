//! The lines a delivery is: `SMS SENT`, in the form of every other log line, but written many at a time.
//!
//! A sender may deliver a hundred thousand messages a second. One event and one system call for each would cost more
//! than all the rest, and would not say whether the line got out.

use std::io::Write;

use serde::Serialize;
use weir_queue::sms::SmsEvent;

use crate::settings::log::LogFormat;
use crate::telemetry::logs::is_human;

/// The target under which deliveries stand in the log. They are written whatever the level: the line is the delivery.
pub(crate) const TARGET: &str = "weir::sender";

/// Lines waiting to be written together.
#[derive(Debug)]
pub(crate) struct Lines {
    human: bool,
    /// All lines of one batch are written at one moment and bear its time.
    now: jiff::Timestamp,
    text: Vec<u8>,
}

#[derive(Serialize)]
struct Line<'a> {
    timestamp: jiff::Timestamp,
    level: &'static str,
    message: &'static str,
    user_id: &'a str,
    payload: &'a str,
    message_id: &'a uuid::Uuid,
    target: &'static str,
}

impl Lines {
    /// An empty batch, in the log's form. `torn` says that the last one broke off, maybe within a line.
    #[must_use]
    pub(crate) fn begin(format: LogFormat, torn: bool) -> Self {
        let human = is_human(format);
        Self { human, now: jiff::Timestamp::now(), text: if torn { vec![b'\n'] } else { Vec::new() } }
    }

    /// Adds the line of one message.
    pub(crate) fn add(&mut self, event: &SmsEvent<'_>) {
        let SmsEvent { message_id, user_id, message, .. } = event;
        // Writing to memory cannot fail.
        let _ = if self.human {
            let now = self.now;
            write!(
                self.text,
                "{now}  INFO SMS SENT user_id={user_id:?} payload={message:?} message_id={message_id}"
            )
        } else {
            let (timestamp, level, target) = (self.now, "INFO", TARGET);
            let line =
                Line { timestamp, level, message: "SMS SENT", user_id, payload: message, message_id, target };
            serde_json::to_writer(&mut self.text, &line).map_err(std::io::Error::from)
        };
        self.text.push(b'\n');
    }

    /// Writes them all, and says whether they got out.
    /// Fails when standard output takes no more.
    pub(crate) fn write(self) -> std::io::Result<()> {
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
            message_id: uuid::Uuid::nil(),
            user_id: "alice".into(),
            message: "two\nlines \"quoted\"".into(),
            accepted_at: jiff::Timestamp::UNIX_EPOCH,
        }
    }

    fn text(human: bool) -> String {
        let mut lines = Lines { human, now: jiff::Timestamp::UNIX_EPOCH, text: Vec::new() };
        lines.add(&event());
        lines.add(&event());
        String::from_utf8(lines.text).unwrap()
    }

    #[test]
    fn a_message_is_one_line_whatever_it_says() {
        for human in [true, false] {
            let text = text(human);
            assert_eq!(text.lines().count(), 2, "{text}");
            assert!(text.lines().all(|line| line.contains("SMS SENT") && line.contains("alice")), "{text}");
        }
    }

    #[test]
    fn a_json_line_has_the_fields_of_every_other_one() {
        let line: serde_json::Value = serde_json::from_str(text(false).lines().next().unwrap()).unwrap();
        assert_eq!(
            (&line["level"], &line["message"], &line["target"]),
            (&"INFO".into(), &"SMS SENT".into(), &TARGET.into())
        );
        assert_eq!(line["payload"], "two\nlines \"quoted\"");
    }
}
