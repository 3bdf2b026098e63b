//! The canonical form of payloads: two payloads are the same if they are equal as JSON values, however they are
//! written.
//!
//! The form is that of RFC 8785 (no white space, sorted fields, one spelling per string and number), except that
//! numbers are compared exactly and not as 64-bit floats. So 1, 1.0 and 10e-1 are equal, but two account numbers of
//! nineteen digits are not, although no float could distinguish them. For numbers of up to fifteen digits the two
//! agree.

use std::fmt;

use sha2::{Digest, Sha256};

use crate::RequestType;

use super::json::{JsonError, Value, parse};

/// A JSON value in canonical form. `Debug` hides the text, so that payloads of callers do not get into logs by
/// accident.
#[derive(Clone, PartialEq, Eq)]
pub struct CanonicalJson(String);

impl CanonicalJson {
    /// Converts a JSON text to canonical form. Fails if it is invalid, ambiguous or nested too deep.
    pub fn parse(json: &[u8]) -> Result<Self, JsonError> {
        let mut out = String::with_capacity(json.len());
        write_value(&mut out, &parse(json)?)?;
        Ok(Self(out))
    }

    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A hash of what a submission asks for: equal for equal payloads of one request type.
///
/// It is the SHA-256 of the canonical form of `{"payload": …, "requestType": …}`, so anybody can compute it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
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

    #[must_use]
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

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
            for (index, item) in items.iter().enumerate() {
                separate(out, index);
                write_value(out, item)?;
            }
            out.push(']');
        }
        Value::Object(fields) => {
            out.push('{');
            for (index, (name, field)) in fields.iter().enumerate() {
                separate(out, index);
                write_text(out, name);
                out.push(':');
                write_value(out, field)?;
            }
            out.push('}');
        }
    }
    Ok(())
}

fn separate(out: &mut String, index: usize) {
    if index > 0 {
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

/// Whether the number is a short integer, which JSON allows to write in one way only. Most numbers are.
fn is_plain(number: &str) -> bool {
    number.len() <= 21 && number != "-0" && !number.contains(['.', 'e', 'E'])
}

/// The number 0.`digits` × 10^`point`. `digits` neither starts nor ends with a zero, and is empty for zero.
struct Decimal {
    is_negative: bool,
    digits: String,
    point: i64,
}

impl Decimal {
    /// Parses a valid JSON number. Returns `None` if its exponent does not fit 64 bits.
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

/// Writes a number like ECMAScript, as RFC 8785 requires.
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
    fn equal_numbers_have_one_form() {
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
    fn numbers_that_no_float_can_distinguish_are_different() {
        assert_ne!(canonical("9007199254740993"), canonical("9007199254740992"));
        assert_ne!(canonical("1e400"), canonical("1e401"));
        assert_eq!(canonical("1e9223372036854775808"), Err(JsonError::Exponent));
        assert_eq!(canonical("1e9223372036854775807"), Err(JsonError::Exponent));
    }

    #[test]
    fn equal_strings_have_one_form() {
        assert_eq!(canonical(r#""\u0041\/\u00fC""#), Ok("\"A/ü\"".to_owned()));
        assert_eq!(canonical(r#""\ud83d\ude00 😀""#), Ok("\"😀 😀\"".to_owned()));
        assert_eq!(
            canonical(r#""\u0008\u000c\u000A\u000d\u0009\u001F\u007f""#),
            Ok("\"\\b\\f\\n\\r\\t\\u001f\u{7f}\"".to_owned())
        );
        assert_eq!(canonical(r#""\"\\\u0000""#), Ok(r#""\"\\\u0000""#.to_owned()));
    }

    #[test]
    fn half_of_a_surrogate_pair_is_rejected() {
        for half in [r#""\ud83d""#, r#""\ude00""#, r#""\ud83dx""#, r#""\ud83d\u0041""#, r#""\ud83d\ud83d""#] {
            assert_eq!(canonical(half), Err(JsonError::LoneSurrogate), "{half}");
        }
    }

    /// The example of RFC 8785, section 3.2.3: sorted by UTF-16 units, not by code points.
    #[test]
    fn fields_are_sorted_by_utf_16_units() {
        let json = r#"{"\u20ac":1,"\r":2,"\ufb33":3,"1":4,"\ud83d\ude00":5,"\u0080":6,"\u00f6":7}"#;
        let expected = "{\"\\r\":2,\"1\":4,\"\u{80}\":6,\"ö\":7,\"€\":1,\"😀\":5,\"\u{fb33}\":3}";
        assert_eq!(canonical(json), Ok(expected.to_owned()));
    }

    #[test]
    fn a_duplicate_field_is_rejected_however_it_is_escaped() {
        for json in [r#"{"a":1,"a":1}"#, r#"{"a":1,"b":2,"\u0061":3}"#, r#"[{"":{"x":1,"y":2,"x":1}}]"#] {
            assert_eq!(canonical(json), Err(JsonError::DuplicateField), "{json}");
        }
        assert!(canonical(r#"{"a":{"a":1},"b":[{"a":1},{"a":1}]}"#).is_ok());
    }

    #[test]
    fn nesting_beyond_the_limit_is_rejected_without_a_stack_overflow() {
        let nested = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
        assert_eq!(canonical(&nested(DEPTH_MAX)), Ok(nested(DEPTH_MAX)));
        assert_eq!(canonical(&nested(DEPTH_MAX + 1)), Err(JsonError::TooDeep));
        assert_eq!(canonical(&nested(10_000)), Err(JsonError::TooDeep));
        assert_eq!(canonical(&"{\"a\":".repeat(10_000)), Err(JsonError::TooDeep));
        assert_eq!(canonical(&format!("{}1", "[{\"a\":".repeat(500_000))), Err(JsonError::TooDeep));
    }

    #[test]
    fn invalid_json_is_rejected() {
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

    /// The hash was computed elsewhere. A change would make every stored key conflict with its own repetition.
    #[test]
    fn fingerprints_never_change_and_depend_on_the_request_type() {
        let fingerprint = |kind: &str, json: &str| {
            Fingerprint::new(
                &RequestType::parse(kind).unwrap(),
                &CanonicalJson::parse(json.as_bytes()).unwrap(),
            )
        };
        let first = fingerprint("charge", r#"{"b": 1.0, "a": "ü"}"#);
        assert_eq!(first.to_string(), "c37ed11d39d1396548bf0a2c6910ee8e913be8bfe114daa731919199e22bbb85");
        assert_eq!(first, fingerprint("charge", r#"{"a":"\u00fc","b":1}"#));
        assert_ne!(first, fingerprint("refund", r#"{"a":"\u00fc","b":1}"#));
        assert_eq!(Fingerprint::from_bytes(*first.as_bytes()), first);
    }
}
