//! Key names, stored inline where possible.

use std::fmt;
use std::ops::Deref;

/// A text that is stored inline up to 22 bytes, so that comparing a short one reads no other memory.
#[derive(Clone)]
pub struct Id(Text);

const INLINE_MAX: usize = 22;

#[derive(Clone)]
enum Text {
    Short { length: u8, bytes: [u8; INLINE_MAX] },
    Long(Box<str>),
}

impl Id {
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
        let mut bytes = [0; INLINE_MAX];
        match (u8::try_from(text.len()), bytes.get_mut(..text.len())) {
            (Ok(length), Some(target)) => {
                target.copy_from_slice(text.as_bytes());
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
            // The bytes are a copy of a text, so this never falls back.
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
    fn texts_of_any_length_are_preserved() {
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
