//! When two payloads are the same: they are if they are equal as JSON values, however they are spelled.
//!
//! The canonical form is that of RFC 8785 (no space, fields sorted, one spelling for each string and number), except that
//! numbers are compared exactly and not as 64-bit floats. So 1, 1.0 and 10e-1 are equal, but two account numbers of
//! nineteen digits are not, although no float could tell them apart. For numbers of up to fifteen digits the two agree.

use std::fmt;

use sha2::{Digest, Sha256};

use crate::RequestType;

use super::json::{JsonError, Value, parse};

/// A JSON value in its one canonical spelling. It is a caller's payload, so no log gets to see it by accident.
#[derive(Clone, PartialEq, Eq)]
pub struct CanonicalJson(String);

impl CanonicalJson {
    /// Brings a JSON text into canonical form.
    /// Fails when it is not JSON, or cannot mean the same to every reader, or is nested too deep.
    pub fn parse(json: &[u8]) -> Result<Self, JsonError> {
        let mut out = String::with_capacity(json.len());
        write_value(&mut out, &parse(json)?)?;
        Ok(Self(out))
    }

    /// The canonical text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// What a submission asks for, in 32 bytes: equal for equal payloads of one type.
///
/// It is the SHA-256 of the canonical form of `{"payload": …, "requestType": …}`, so anybody can compute it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// The fingerprint of a payload for one type of request.
    #[must_use]
    pub fn new(request_type: &RequestType, payload: &CanonicalJson) -> Self {
        let mut kind = String::new();
        write_text(&mut kind, request_type.as_str());
        let hash = Sha256::new()
            .chain_update(r#"{"payload":"#)
            .chain_update(payload.as_str())
            .chain_update(r#","requestType":"#)
            .chain_update(kind)
            .chain_update("}");
        Self(hash.finalize().into())
    }

    /// The fingerprint that a store has kept.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for CanonicalJson {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CanonicalJson({} bytes)", self.0.len())
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({self})")
    }
}

fn write_value(out: &mut String, value: &Value<'_>) -> Result<(), JsonError> {
    match value {
        Value::Word(word) => out.push_str(word),
        Value::Number(number) if is_plain(number) => out.push_str(number),
        Value::Number(number) => write_number(out, &Decimal::parse(number).ok_or(JsonError::Exponent)?),
        Value::Text(text) => write_text(out, text),
        Value::Array(items) => {
            out.push('[');
            for (place, item) in items.iter().enumerate() {
                separate(out, place);
                write_value(out, item)?;
            }
            out.push(']');
        }
        Value::Object(fields) => {
            out.push('{');
            for (place, (name, field)) in fields.iter().enumerate() {
                separate(out, place);
                write_text(out, name);
                out.push(':');
                write_value(out, field)?;
            }
            out.push('}');
        }
    }
    Ok(())
}

fn separate(out: &mut String, place: usize) {
    if place > 0 {
        out.push(',');
    }
}

fn write_text(out: &mut String, text: &str) {
    out.push('"');
    for character in text.chars() {
        match character {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\0'..='\u{1f}' => out.push_str(&format!("\\u{:04x}", u32::from(character))),
            _ => out.push(character),
        }
    }
    out.push('"');
}

/// Whether a number is a short integer, which JSON lets nobody spell in two ways. Most numbers are.
fn is_plain(number: &str) -> bool {
    number.len() <= 21 && number != "-0" && !number.contains(['.', 'e', 'E'])
}

/// A number as 0.`digits` times ten to the power of `point`. Digits neither begin nor end with a zero; zero has none.
struct Decimal {
    is_negative: bool,
    digits: String,
    point: i64,
}

impl Decimal {
    /// Takes a number apart that is spelled as JSON allows. None when its exponent does not fit 64 bits.
    fn parse(number: &str) -> Option<Self> {
        let unsigned = number.trim_start_matches('-');
        let (mantissa, exponent) = unsigned.split_once(['e', 'E']).unwrap_or((unsigned, "0"));
        let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        let all = format!("{whole}{fraction}");
        let significant = all.trim_start_matches('0');
        if significant.is_empty() {
            return Some(Self { is_negative: false, digits: String::new(), point: 0 });
        }
        let zeros = i64::try_from(all.len().checked_sub(significant.len())?).ok()?;
        let whole_digits = i64::try_from(whole.len()).ok()?;
        let point = exponent.parse::<i64>().ok()?.checked_add(whole_digits)?.checked_sub(zeros)?;
        let digits = significant.trim_end_matches('0').to_owned();
        Some(Self { is_negative: unsigned.len() < number.len(), digits, point })
    }
}

/// Spells a number as ECMAScript does, which is what RFC 8785 refers to.
fn write_number(out: &mut String, number: &Decimal) {
    if number.is_negative {
        out.push('-');
    }
    let digits = number.digits.as_str();
    let zeros = |count: i64| "0".repeat(usize::try_from(count).unwrap_or(0));
    let length = i64::try_from(digits.len()).unwrap_or(i64::MAX);
    let split = |at: i64| digits.split_at_checked(usize::try_from(at).unwrap_or(0)).unwrap_or((digits, ""));
    match number.point {
        _ if digits.is_empty() => out.push('0'),
        point @ 1..=21 if point >= length => {
            out.push_str(digits);
            out.push_str(&zeros(point.saturating_sub(length)));
        }
        point @ 1..=21 => {
            let (whole, fraction) = split(point);
            out.push_str(&format!("{whole}.{fraction}"));
        }
        point @ -5..=0 => out.push_str(&format!("0.{}{digits}", zeros(point.saturating_neg()))),
        point => {
            let (first, others) = split(1);
            let dot = if others.is_empty() { "" } else { "." };
            out.push_str(&format!("{first}{dot}{others}e{:+}", i128::from(point).saturating_sub(1)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::json::DEPTH_MAX;
    use super::*;

    fn canonical(json: &str) -> Result<String, JsonError> {
        CanonicalJson::parse(json.as_bytes()).map(|canonical| canonical.0)
    }

    #[test]
    fn numbers_have_one_spelling() {
        for (spelled, expected) in [
            ("1", "1"),
            ("1.0", "1"),
            ("10e-1", "1"),
            ("0.1E+1", "1"),
            ("-0", "0"),
            ("-0.000e7", "0"),
            ("0e99999999999999999999", "0"),
            ("-12.50", "-12.5"),
            ("100", "100"),
            ("1e2", "100"),
            ("123456789012345678901", "123456789012345678901"),
            ("-123456789012345678901", "-123456789012345678901"),
            ("4.50", "4.5"),
            ("2e-3", "0.002"),
            ("1E30", "1e+30"),
            ("0.000000000000000000000000001", "1e-27"),
            ("1e-6", "0.000001"),
            ("1e-7", "1e-7"),
            ("12e-8", "1.2e-7"),
            ("1e20", "100000000000000000000"),
            ("1e21", "1e+21"),
            ("123456789012345678901234", "1.23456789012345678901234e+23"),
            ("1e400", "1e+400"),
        ] {
            assert_eq!(canonical(spelled), Ok(expected.to_owned()), "{spelled}");
        }
    }

    #[test]
    fn numbers_that_no_float_can_tell_apart_are_different() {
        assert_ne!(canonical("9007199254740993"), canonical("9007199254740992"));
        assert_ne!(canonical("1e400"), canonical("1e401"));
        assert_eq!(canonical("1e9223372036854775808"), Err(JsonError::Exponent));
        assert_eq!(canonical("1e9223372036854775807"), Err(JsonError::Exponent));
    }

    #[test]
    fn strings_have_one_spelling() {
        assert_eq!(canonical(r#""\u0041\/\u00fC""#), Ok("\"A/ü\"".to_owned()));
        assert_eq!(canonical(r#""\ud83d\ude00 😀""#), Ok("\"😀 😀\"".to_owned()));
        assert_eq!(
            canonical(r#""\u0008\u000c\u000A\u000d\u0009\u001F\u007f""#),
            Ok("\"\\b\\f\\n\\r\\t\\u001f\u{7f}\"".to_owned())
        );
        assert_eq!(canonical(r#""\"\\\u0000""#), Ok(r#""\"\\\u0000""#.to_owned()));
    }

    #[test]
    fn half_a_character_is_refused() {
        for half in [r#""\ud83d""#, r#""\ude00""#, r#""\ud83dx""#, r#""\ud83d\u0041""#, r#""\ud83d\ud83d""#] {
            assert_eq!(canonical(half), Err(JsonError::HalfCharacter), "{half}");
        }
    }

    /// The example of RFC 8785, section 3.2.3: by UTF-16 units, not by code points.
    #[test]
    fn fields_are_sorted_as_the_standard_says() {
        let json = r#"{"\u20ac":1,"\r":2,"\ufb33":3,"1":4,"\ud83d\ude00":5,"\u0080":6,"\u00f6":7}"#;
        let expected = "{\"\\r\":2,\"1\":4,\"\u{80}\":6,\"ö\":7,\"€\":1,\"😀\":5,\"\u{fb33}\":3}";
        assert_eq!(canonical(json), Ok(expected.to_owned()));
    }

    #[test]
    fn a_field_named_twice_is_refused_however_it_is_spelled() {
        for json in [r#"{"a":1,"a":1}"#, r#"{"a":1,"b":2,"\u0061":3}"#, r#"[{"":{"x":1,"y":2,"x":1}}]"#] {
            assert_eq!(canonical(json), Err(JsonError::DuplicateField), "{json}");
        }
        assert!(canonical(r#"{"a":{"a":1},"b":[{"a":1},{"a":1}]}"#).is_ok());
    }

    #[test]
    fn nesting_ends_at_the_limit_and_ten_thousand_levels_do_no_harm() {
        let nested = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
        assert_eq!(canonical(&nested(DEPTH_MAX)), Ok(nested(DEPTH_MAX)));
        assert_eq!(canonical(&nested(DEPTH_MAX + 1)), Err(JsonError::TooDeep));
        assert_eq!(canonical(&nested(10_000)), Err(JsonError::TooDeep));
        assert_eq!(canonical(&"{\"a\":".repeat(10_000)), Err(JsonError::TooDeep));
        assert_eq!(canonical(&format!("{}1", "[{\"a\":".repeat(500_000))), Err(JsonError::TooDeep));
    }

    #[test]
    fn what_is_not_json_is_refused() {
        for text in [
            "",
            " ",
            "nul",
            "nullx",
            "True",
            "01",
            "-",
            "+1",
            "1.",
            ".5",
            "1e",
            "1e+",
            "0x1",
            "NaN",
            "[1,]",
            "[1 2]",
            "[",
            "]",
            "{\"a\"}",
            "{\"a\":}",
            "{a:1}",
            "{\"a\":1,}",
            "{,}",
            "'a'",
            "\"a",
            "\"\t\"",
            "\"\\x\"",
            "\"\\u12\"",
            "\"\\u+123\"",
            "1 2",
            "\u{feff}1",
            "\u{a0}1",
            "/**/1",
        ] {
            assert!(matches!(canonical(text), Err(JsonError::Syntax { .. })), "{text:?}");
        }
        assert_eq!(canonical("[1,x]"), Err(JsonError::Syntax { at: 3 }));
        assert_eq!(CanonicalJson::parse(b"\"\xff\""), Err(JsonError::NotText));
    }

    /// Computed elsewhere: a change would make every key that is remembered conflict with its own repetition.
    #[test]
    fn fingerprints_never_change_and_tell_types_apart() {
        let of = |kind: &str, json: &str| {
            Fingerprint::new(
                &RequestType::parse(kind).unwrap(),
                &CanonicalJson::parse(json.as_bytes()).unwrap(),
            )
        };
        let print = of("charge", r#"{"b": 1.0, "a": "ü"}"#);
        assert_eq!(print.to_string(), "c37ed11d39d1396548bf0a2c6910ee8e913be8bfe114daa731919199e22bbb85");
        assert_eq!(print, of("charge", r#"{"a":"\u00fc","b":1}"#));
        assert_ne!(print, of("refund", r#"{"a":"\u00fc","b":1}"#));
        assert_eq!(Fingerprint::from_bytes(*print.as_bytes()), print);
    }
}
