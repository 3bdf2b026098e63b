//! Showing a payload to people without the fields that are marked sensitive.

use std::collections::BTreeMap;

use serde_json::value::{RawValue, to_raw_value};

/// What stands in place of a sensitive value.
const REDACTED: &str = "[REDACTED]";

/// A payload as text, the values of these fields replaced wherever they stand. Names count in either case. Numbers are
/// not touched; fields may change their order. What is no JSON is shown only where nothing is sensitive.
#[must_use]
pub(crate) fn redact(payload: &[u8], fields: &[String]) -> String {
    if fields.is_empty() {
        return String::from_utf8_lossy(payload).into_owned();
    }
    let shown = serde_json::from_slice::<&RawValue>(payload).ok().and_then(|value| walk(value, fields));
    shown.map_or_else(|| REDACTED.to_owned(), |shown| shown.get().to_owned())
}

/// Payloads are nested at most as deep as was allowed when they came in, which bounds the recursion.
fn walk(value: &RawValue, fields: &[String]) -> Option<Box<RawValue>> {
    let text = value.get();
    if text.starts_with('{') {
        let object: BTreeMap<String, &RawValue> = serde_json::from_str(text).ok()?;
        let shown = object.into_iter().map(|(name, value)| {
            let is_sensitive = fields.iter().any(|field| field.eq_ignore_ascii_case(&name));
            let value = if is_sensitive { to_raw_value(REDACTED).ok() } else { walk(value, fields) };
            Some((name, value?))
        });
        to_raw_value(&shown.collect::<Option<BTreeMap<_, _>>>()?).ok()
    } else if text.starts_with('[') {
        let items: Vec<&RawValue> = serde_json::from_str(text).ok()?;
        let shown: Option<Vec<_>> = items.into_iter().map(|item| walk(item, fields)).collect();
        to_raw_value(&shown?).ok()
    } else {
        Some(value.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(payload: &str, fields: &[&str]) -> String {
        let fields: Vec<String> = fields.iter().map(|field| (*field).to_owned()).collect();
        redact(payload.as_bytes(), &fields)
    }

    #[test]
    fn sensitive_fields_are_replaced_wherever_they_stand() {
        let payload = r#"{"z":1e400,"card":{"number":"4111"},"list":[{"CARD":[1,2]},"card"]}"#;
        let expected = r#"{"card":"[REDACTED]","list":[{"CARD":"[REDACTED]"},"card"],"z":1e400}"#;
        assert_eq!(shown(payload, &["card"]), expected);
        assert_eq!(shown(r#"{"c\u0061rd":"4111"}"#, &["card"]), r#"{"card":"[REDACTED]"}"#);
    }

    #[test]
    fn without_sensitive_fields_a_payload_is_shown_as_it_is() {
        assert_eq!(shown(r#"{"b":1, "a":2}"#, &[]), r#"{"b":1, "a":2}"#);
        assert_eq!(shown("nonsense", &["card"]), REDACTED);
    }
}
