//! Names that come from callers, checked once at the edge, and names that Weir gives.

use std::fmt;
use std::sync::Arc;

use uuid::Uuid;

use crate::Timestamp;

/// Why a text cannot be a caller's name for something. The messages finish the sentence "userId …".
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// No characters at all.
    #[error("must not be empty")]
    Empty,
    /// More than [`NAME_MAX_CHARS`] characters.
    #[error("must have at most {NAME_MAX_CHARS} characters")]
    TooLong,
    /// A control character such as a line break or NUL, which logs and Postgres cannot hold.
    #[error("must not contain control characters")]
    Control,
}

/// The longest name a caller may give, in characters.
pub const NAME_MAX_CHARS: usize = 255;

/// Checks that a text can be a caller's name for something: 1 to [`NAME_MAX_CHARS`] characters, none of them a control
/// character.
/// Says what is wrong with the text.
pub fn check_name(text: &str) -> Result<(), NameError> {
    if text.is_empty() {
        return Err(NameError::Empty);
    }
    // Counting characters is needed only when the bytes could be too many.
    if text.len() > NAME_MAX_CHARS && text.chars().count() > NAME_MAX_CHARS {
        return Err(NameError::TooLong);
    }
    if text.chars().any(char::is_control) {
        return Err(NameError::Control);
    }
    Ok(())
}

/// A caller's name for one kind of thing: 1 to [`NAME_MAX_CHARS`] characters, none of them a control character. Clones
/// share the text.
macro_rules! name {
    ($(#[$about:meta])* $name:ident) => {
        $(#[$about])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Checks and takes over a caller's text.
            /// Says what is wrong with the text.
            pub fn parse(text: impl AsRef<str>) -> Result<Self, NameError> {
                let text = text.as_ref();
                check_name(text)?;
                Ok(Self(Arc::from(text)))
            }

            /// The name as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

name!(
    /// Who a quota belongs to.
    UserId
);
name!(
    /// An event that wants a slot. Ids are global: whatever config or time comes with one, it is the same event.
    EventId
);
name!(
    /// A pace that events follow.
    ConfigName
);
name!(
    /// Whose requests these are. Tenants never see each other's.
    TenantId
);
name!(
    /// A caller's name for one submission: sent again, it means the same request. Tenants may use the same ones.
    IdempotencyKey
);
name!(
    /// What kind of work a request is; it decides which downstream does it.
    RequestType
);
name!(
    /// A limit that callers name when they spend of it.
    PolicyName
);

/// A name that Weir gives: a version 7 UUID, so ids sort by the time they were given.
macro_rules! generated_id {
    ($(#[$about:meta])* $name:ident) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Uuid);

        impl $name {
            /// Makes an id from the time of the decision and 74 of these 80 random bits.
            #[must_use]
            pub fn new(now: Timestamp, random: [u8; 10]) -> Self {
                let millis = now.as_micros().max(0).unsigned_abs() / 1_000;
                Self(uuid::Builder::from_unix_timestamp_millis(millis, &random).into_uuid())
            }

            /// The id as a UUID.
            #[must_use]
            pub const fn as_uuid(&self) -> &Uuid {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

generated_id!(
    /// The name of one accepted message: a version 7 UUID, so ids sort by the time of acceptance.
    MessageId
);
generated_id!(
    /// The name of one accepted request: a version 7 UUID, so ids sort by the time of acceptance.
    RequestId
);
generated_id!(
    /// The name of one hold: a version 7 UUID, so ids sort by the time they were taken.
    HoldId
);

/// Ids that callers send back.
macro_rules! parseable_id {
    ($name:ident) => {
        impl $name {
            /// The id that a store has kept.
            #[must_use]
            pub const fn from_uuid(uuid: Uuid) -> Self {
                Self(uuid)
            }

            /// Reads an id as [`Display`](fmt::Display) writes it: 36 characters with hyphens, in either case. None for
            /// any other text, which names nothing.
            #[must_use]
            pub fn parse(text: &str) -> Option<Self> {
                let is_hyphenated = text.len() == uuid::fmt::Hyphenated::LENGTH;
                Uuid::try_parse(text).ok().filter(|_| is_hyphenated).map(Self)
            }
        }
    };
}

parseable_id!(RequestId);
parseable_id!(HoldId);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_id_has_1_to_255_characters_however_many_bytes() {
        assert_eq!(UserId::parse(""), Err(NameError::Empty));
        assert!(UserId::parse("x").is_ok());
        assert!(UserId::parse("ü".repeat(255)).is_ok());
        assert_eq!(UserId::parse("ü".repeat(256)), Err(NameError::TooLong));
        assert_eq!(UserId::parse("x".repeat(256)), Err(NameError::TooLong));
    }

    #[test]
    fn a_user_id_cannot_break_a_log_line_or_a_database() {
        for bad in ["a\nb", "a\0", "\u{1b}[31m", "\u{85}"] {
            assert_eq!(UserId::parse(bad), Err(NameError::Control), "{bad:?}");
        }
        assert!(UserId::parse("a b/ç☃").is_ok());
    }

    #[test]
    fn message_ids_are_version_7_and_sort_by_time() {
        let early = MessageId::new(Timestamp::from_seconds(1), [0xff; 10]);
        let late = MessageId::new(Timestamp::from_seconds(2), [0; 10]);
        assert!(early < late);
        assert_eq!(late.as_uuid().get_version_num(), 7);
        assert_eq!(late.to_string().len(), 36);
    }

    #[test]
    fn a_time_before_the_epoch_still_names_a_message() {
        assert_eq!(MessageId::new(Timestamp::from_micros(-5), [1; 10]).as_uuid().get_version_num(), 7);
    }

    #[test]
    fn a_request_id_reads_back_as_it_was_written_and_in_no_other_form() {
        let id = RequestId::new(Timestamp::from_seconds(1_700_000_000), [7; 10]);
        let text = id.to_string();
        assert_eq!(RequestId::parse(&text), Some(id));
        assert_eq!(RequestId::parse(&text.to_uppercase()), Some(id));
        assert_eq!(RequestId::from_uuid(*id.as_uuid()), id);
        for other in [text.replace('-', ""), format!("{{{text}}}"), format!("urn:uuid:{text}"), String::new()]
        {
            assert_eq!(RequestId::parse(&other), None, "{other}");
        }
    }
}
