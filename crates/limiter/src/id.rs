//! The names of keys, kept where they are looked at.

use std::fmt;
use std::ops::Deref;

/// A text of which up to 22 bytes stand in place, so that comparing a short one touches no other memory.
#[derive(Clone)]
pub struct Id(Text);

const IN_PLACE: usize = 22;

#[derive(Clone)]
enum Text {
    Short { length: u8, bytes: [u8; IN_PLACE] },
    Long(Box<str>),
}

impl Id {
    /// The text as bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        match &self.0 {
            Text::Short { length, bytes } => &bytes[..usize::from(*length)],
            Text::Long(text) => text.as_bytes(),
        }
    }
}

impl From<&str> for Id {
    fn from(text: &str) -> Self {
        let mut bytes = [0; IN_PLACE];
        match (u8::try_from(text.len()), bytes.get_mut(..text.len())) {
            (Ok(length), Some(place)) => {
                place.copy_from_slice(text.as_bytes());
                Self(Text::Short { length, bytes })
            }
            _ => Self(Text::Long(Box::from(text))),
        }
    }
}

impl Deref for Id {
    type Target = str;

    fn deref(&self) -> &str {
        match &self.0 {
            // The bytes came from a text, so this never falls back.
            Text::Short { .. } => std::str::from_utf8(self.as_bytes()).unwrap_or_default(),
            Text::Long(text) => text,
        }
    }
}

impl fmt::Debug for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_any_length_come_back_as_they_were() {
        for length in [0, 1, 21, 22, 23, 255, 256, 1_000] {
            let text = "ü".repeat(length / 2) + &"x".repeat(length % 2);
            let id = Id::from(text.as_str());
            assert_eq!((&*id, id.as_bytes()), (text.as_str(), text.as_bytes()));
        }
    }

    #[test]
    fn an_id_is_24_bytes() {
        assert_eq!(size_of::<Id>(), 24);
    }
}
