//! A strict JSON parser: every text that it accepts has one meaning for every parser. Core has no serde, and two
//! things that most parsers accept are rejected here because readers disagree about them: duplicate fields, and half
//! of a surrogate pair.

use std::borrow::Cow;

/// The deepest nesting of arrays and objects. The parser recurses once per level, so this bounds the stack. Common
/// parsers that read the payload later accept this depth.
pub const DEPTH_MAX: usize = 100;

/// Why a payload is not accepted. The messages complete the sentence "payload …".
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JsonError {
    #[error("must be UTF-8 text")]
    NotText,
    #[error("must be valid JSON; it is invalid at byte {at}")]
    Syntax {
        /// The number of bytes that are valid.
        at: usize,
    },
    #[error("must not be nested more than {DEPTH_MAX} levels deep")]
    TooDeep,
    /// Two values for one field. Readers disagree about which one counts.
    #[error("must not contain a duplicate field in an object")]
    DuplicateField,
    /// An escape for half of a surrogate pair.
    #[error("must not contain half of a surrogate pair")]
    LoneSurrogate,
    /// A number whose exponent does not fit 64 bits.
    #[error("must not contain a number whose exponent does not fit 64 bits")]
    Exponent,
}

/// A JSON value that borrows from the text where possible.
#[derive(Debug)]
pub(super) enum Value<'a> {
    /// `null`, `true` or `false`.
    Word(&'static str),
    /// A number as it was written.
    Number(&'a str),
    Text(Cow<'a, str>),
    Array(Vec<Self>),
    Object(Fields<'a>),
}

/// Fields sorted by name as RFC 8785 requires, without duplicates.
pub(super) type Fields<'a> = Vec<(Cow<'a, str>, Value<'a>)>;

/// Parses one value, with nothing but white space around it.
pub(super) fn parse(json: &[u8]) -> Result<Value<'_>, JsonError> {
    let text = std::str::from_utf8(json).map_err(|_invalid| JsonError::NotText)?;
    let mut parser = Parser { whole: text, rest: text };
    let value = parser.value(0)?;
    parser.skip_space();
    if parser.rest.is_empty() { Ok(value) } else { Err(parser.syntax()) }
}

struct Parser<'a> {
    whole: &'a str,
    /// The text that is not parsed yet.
    rest: &'a str,
}

impl<'a> Parser<'a> {
    /// Parses a value inside `depth` arrays and objects.
    fn value(&mut self, depth: usize) -> Result<Value<'a>, JsonError> {
        self.skip_space();
        match self.rest.bytes().next() {
            Some(b'{') => self.object(depth),
            Some(b'[') => self.array(depth),
            Some(b'"') => self.text().map(Value::Text),
            Some(b'-' | b'0'..=b'9') => self.number().map(Value::Number),
            _ => self.word(),
        }
    }

    fn array(&mut self, depth: usize) -> Result<Value<'a>, JsonError> {
        let depth = deeper(depth)?;
        self.expect("[")?;
        let mut items = Vec::new();
        if self.next_is("]") {
            return Ok(Value::Array(items));
        }
        loop {
            items.push(self.value(depth)?);
            if self.next_is("]") {
                return Ok(Value::Array(items));
            }
            self.expect(",")?;
        }
    }

    fn object(&mut self, depth: usize) -> Result<Value<'a>, JsonError> {
        let depth = deeper(depth)?;
        self.expect("{")?;
        let mut fields = Vec::new();
        if self.next_is("}") {
            return Ok(Value::Object(fields));
        }
        loop {
            self.skip_space();
            let name = self.text()?;
            self.skip_space();
            self.expect(":")?;
            fields.push((name, self.value(depth)?));
            if self.next_is("}") {
                return sorted(fields).map(Value::Object);
            }
            self.expect(",")?;
        }
    }

    fn word(&mut self) -> Result<Value<'a>, JsonError> {
        let word = ["null", "true", "false"].into_iter().find(|word| self.consume(word));
        word.map(Value::Word).ok_or_else(|| self.syntax())
    }

    fn number(&mut self) -> Result<&'a str, JsonError> {
        let start = self.rest;
        self.consume("-");
        if !self.consume("0") {
            self.digits()?;
        }
        if self.consume(".") {
            self.digits()?;
        }
        if self.consume("e") || self.consume("E") {
            let _is_signed = self.consume("+") || self.consume("-");
            self.digits()?;
        }
        let length = start.len().saturating_sub(self.rest.len());
        start.get(..length).ok_or_else(|| self.syntax())
    }

    fn digits(&mut self) -> Result<(), JsonError> {
        let rest = self.rest.trim_start_matches(|digit: char| digit.is_ascii_digit());
        if rest.len() == self.rest.len() {
            return Err(self.syntax());
        }
        self.rest = rest;
        Ok(())
    }

    fn text(&mut self) -> Result<Cow<'a, str>, JsonError> {
        self.expect("\"")?;
        let mut text = Cow::Borrowed("");
        loop {
            // Control characters end the run too. They are neither a quote nor an escape, so the code below rejects
            // them.
            let end = self.rest.bytes().position(|byte| matches!(byte, b'"' | b'\\' | 0..=0x1f));
            let run = end.and_then(|end| self.rest.split_at_checked(end));
            let (plain, rest) = run.ok_or_else(|| self.syntax())?;
            self.rest = rest;
            if text.is_empty() {
                text = Cow::Borrowed(plain);
            } else {
                text.to_mut().push_str(plain);
            }
            if self.consume("\"") {
                return Ok(text);
            }
            text.to_mut().push(self.escape()?);
        }
    }

    fn escape(&mut self) -> Result<char, JsonError> {
        self.expect("\\")?;
        if self.consume("u") {
            return self.escaped_unicode();
        }
        let mut rest = self.rest.chars();
        let character = match rest.next() {
            Some(itself @ ('"' | '\\' | '/')) => itself,
            Some('b') => '\u{8}',
            Some('f') => '\u{c}',
            Some('n') => '\n',
            Some('r') => '\r',
            Some('t') => '\t',
            _ => return Err(self.syntax()),
        };
        self.rest = rest.as_str();
        Ok(character)
    }

    /// Parses what follows `\u`: one character, or a surrogate pair.
    fn escaped_unicode(&mut self) -> Result<char, JsonError> {
        let first = self.utf16_unit()?;
        let is_half = matches!(first, 0xd800..=0xdbff);
        let second = if is_half && self.consume("\\u") { Some(self.utf16_unit()?) } else { None };
        let units = [Some(first), second].into_iter().flatten();
        char::decode_utf16(units).next().and_then(Result::ok).ok_or(JsonError::LoneSurrogate)
    }

    fn utf16_unit(&mut self) -> Result<u16, JsonError> {
        let split = self.rest.split_at_checked(4);
        let hex = split.filter(|(digits, _)| digits.bytes().all(|digit| digit.is_ascii_hexdigit()));
        let (digits, rest) = hex.ok_or_else(|| self.syntax())?;
        let unit = u16::from_str_radix(digits, 16).map_err(|_not_hex| self.syntax())?;
        self.rest = rest;
        Ok(unit)
    }

    fn skip_space(&mut self) {
        self.rest = self.rest.trim_start_matches([' ', '\t', '\n', '\r']);
    }

    fn next_is(&mut self, token: &str) -> bool {
        self.skip_space();
        self.consume(token)
    }

    fn consume(&mut self, token: &str) -> bool {
        let rest = self.rest.strip_prefix(token);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn expect(&mut self, token: &str) -> Result<(), JsonError> {
        if self.consume(token) { Ok(()) } else { Err(self.syntax()) }
    }

    const fn syntax(&self) -> JsonError {
        JsonError::Syntax { at: self.whole.len().saturating_sub(self.rest.len()) }
    }
}

const fn deeper(depth: usize) -> Result<usize, JsonError> {
    if depth < DEPTH_MAX { Ok(depth.saturating_add(1)) } else { Err(JsonError::TooDeep) }
}

/// Sorts fields by the UTF-16 units of their names, as RFC 8785 requires.
fn sorted(mut fields: Fields<'_>) -> Result<Fields<'_>, JsonError> {
    fields.sort_by(|(a, _), (b, _)| a.encode_utf16().cmp(b.encode_utf16()));
    let is_unique = fields.is_sorted_by(|(a, _), (b, _)| a != b);
    if is_unique { Ok(fields) } else { Err(JsonError::DuplicateField) }
}
