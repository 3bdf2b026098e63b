//! The event on `sms-outbound`: its JSON, written by engines and read by the sender.

use std::borrow::Cow;

use jiff::Timestamp as Rfc3339;
use serde::{Deserialize, Serialize};
use weir_store::quota::AcceptedMessage;

use crate::rfc3339;

/// An accepted message to deliver. Weir writes all fields; of other producers user and message are enough.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SmsEvent<'a> {
    pub message_id: Option<uuid::Uuid>,
    #[serde(borrow)]
    pub user_id: Cow<'a, str>,
    #[serde(borrow)]
    pub message: Cow<'a, str>,
    pub accepted_at: Option<Rfc3339>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct SmsEventFields<'a> {
    message_id: &'a uuid::Uuid,
    user_id: &'a str,
    message: &'a str,
    accepted_at: Rfc3339,
}

/// The event's JSON.
#[must_use]
pub fn encode(accepted: &AcceptedMessage<'_>) -> Vec<u8> {
    let event = SmsEventFields {
        message_id: accepted.message_id.as_uuid(),
        user_id: accepted.user.as_str(),
        message: accepted.message,
        accepted_at: rfc3339(accepted.at),
    };
    // Large enough for the field names, so that writing the event allocates once.
    let mut json = Vec::with_capacity(128 + accepted.user.as_str().len() + accepted.message.len());
    serde_json::to_writer(&mut json, &event).expect("strings and numbers always become JSON");
    json
}

/// Parses an event. The error is the reason that operators see in the dead letter.
pub fn decode(payload: &[u8]) -> Result<SmsEvent<'_>, serde_json::Error> {
    serde_json::from_slice(payload)
}

#[cfg(test)]
mod tests {
    use weir_core::{MessageId, Timestamp, UserId};

    use super::*;

    #[test]
    fn the_event_has_the_four_fields_of_the_contract() {
        let user = UserId::parse("alice").unwrap();
        let at = Timestamp::from_micros(1_700_000_000_123_456);
        let message_id = MessageId::new(at, [9; 10]);
        let json =
            encode(&AcceptedMessage { message_id, user: &user, message: "hi \"there\"\n", trace: None, at });
        assert_eq!(
            String::from_utf8(json.clone()).unwrap(),
            format!(
                r#"{{"messageId":"{message_id}","userId":"alice","message":"hi \"there\"\n","acceptedAt":"2023-11-14T22:13:20.123456Z"}}"#
            )
        );
        let event = decode(&json).unwrap();
        assert_eq!((event.user_id.as_ref(), event.message.as_ref()), ("alice", "hi \"there\"\n"));
    }

    #[test]
    fn malformed_events_are_refused_with_the_reason() {
        for bad in [&b""[..], b"nonsense", b"{}", br#"{"messageId":"x"}"#, b"[]", b"\xff"] {
            assert!(decode(bad).is_err());
        }
        assert!(decode(br#"{"userId":"a"}"#).unwrap_err().to_string().contains("message"));
    }

    #[test]
    fn user_and_message_are_enough() {
        let event = decode(br#"{"message":"hi","userId":"a"}"#).unwrap();
        assert_eq!((event.user_id.as_ref(), event.message.as_ref()), ("a", "hi"));
        assert_eq!((event.message_id, event.accepted_at), (None, None));
    }
}
