//! The event on `sms-outbound`: its JSON, written by engines and read by the sender.

use std::borrow::Cow;

use jiff::Timestamp as Rfc3339;
use serde::{Deserialize, Serialize};
use weir_store::quota::AcceptedMessage;

use crate::rfc3339;

/// An accepted message on its way to a phone.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SmsEvent<'a> {
    /// The message's name.
    pub message_id: uuid::Uuid,
    /// Who sends it.
    #[serde(borrow)]
    pub user_id: Cow<'a, str>,
    /// What to deliver.
    #[serde(borrow)]
    pub message: Cow<'a, str>,
    /// When it was accepted.
    pub accepted_at: Rfc3339,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Outgoing<'a> {
    message_id: &'a uuid::Uuid,
    user_id: &'a str,
    message: &'a str,
    accepted_at: Rfc3339,
}

/// The event's JSON.
#[must_use]
pub fn encode(accepted: &AcceptedMessage<'_>) -> Vec<u8> {
    let event = Outgoing {
        message_id: accepted.message_id.as_uuid(),
        user_id: accepted.user.as_str(),
        message: accepted.message,
        accepted_at: rfc3339(accepted.at),
    };
    // Room for the event's own text, so that writing it allocates once.
    let mut json = Vec::with_capacity(128 + accepted.user.as_str().len() + accepted.message.len());
    serde_json::to_writer(&mut json, &event).expect("strings and numbers always become JSON");
    json
}

/// Reads an event back.
/// Fails when the payload is not an event: what an operator finds in the dead letter.
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
        let json = encode(&AcceptedMessage { message_id, user: &user, message: "hi \"there\"\n", at });
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
    fn what_is_not_an_event_says_why() {
        for bad in [&b""[..], b"nonsense", b"{}", br#"{"messageId":"x"}"#, b"[]", b"\xff"] {
            assert!(decode(bad).is_err());
        }
        assert!(decode(br#"{"userId":"a"}"#).unwrap_err().to_string().contains("messageId"));
    }
}
