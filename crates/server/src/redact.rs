//! Redacts the sensitive fields of payloads that are shown to operators.

use std::collections::BTreeMap;

use serde_json::value::{RawValue, to_raw_value};

const REDACTED: &str = "[REDACTED]";

/// Returns a payload as text, with the values of the sensitive fields replaced at every depth. Field names are compared
/// without regard to case. Numbers stay as they are written; fields may change their order. A payload that is not JSON is
/// redacted as a whole, unless there are no sensitive fields.
#[must_use]
pub(crate) fn redact(payload: &[u8], fields: &[String]) -> String {
    if fields.is_empty() {
        return String::from_utf8_lossy(payload).into_owned();
    }
    let redacted = serde_json::from_slice::<&RawValue>(payload).ok().and_then(|value| walk(value, fields));
    redacted.map_or_else(|| REDACTED.to_owned(), |redacted| redacted.get().to_owned())
}

/// The recursion is bounded by the nesting that was allowed when the payload was accepted.
fn walk(value: &RawValue, fields: &[String]) -> Option<Box<RawValue>> {
    let text = value.get();
    if text.starts_with('{') {
        let object: BTreeMap<String, &RawValue> = serde_json::from_str(text).ok()?;
        let redacted = object.into_iter().map(|(name, value)| {
            let is_sensitive = fields.iter().any(|field| field.eq_ignore_ascii_case(&name));
            let value = if is_sensitive { to_raw_value(REDACTED).ok() } else { walk(value, fields) };
            Some((name, value?))
        });
        to_raw_value(&redacted.collect::<Option<BTreeMap<_, _>>>()?).ok()
    } else if text.starts_with('[') {
        let items: Vec<&RawValue> = serde_json::from_str(text).ok()?;
        let redacted: Option<Vec<_>> = items.into_iter().map(|item| walk(item, fields)).collect();
        to_raw_value(&redacted?).ok()
    } else {
        Some(value.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn redacted(payload: &str, fields: &[&str]) -> String {
        let fields: Vec<String> = fields.iter().map(|field| (*field).to_owned()).collect();
        redact(payload.as_bytes(), &fields)
    }

    #[test]
    fn sensitive_fields_are_replaced_at_every_depth() {
        let payload = r#"{"z":1e400,"card":{"number":"4111"},"list":[{"CARD":[1,2]},"card"]}"#;
        let expected = r#"{"card":"[REDACTED]","list":[{"CARD":"[REDACTED]"},"card"],"z":1e400}"#;
        assert_eq!(redacted(payload, &["card"]), expected);
        assert_eq!(redacted(r#"{"c\u0061rd":"4111"}"#, &["card"]), r#"{"card":"[REDACTED]"}"#);
    }

    #[test]
    fn without_sensitive_fields_a_payload_is_not_changed() {
        assert_eq!(redacted(r#"{"b":1, "a":2}"#, &[]), r#"{"b":1, "a":2}"#);
        assert_eq!(redacted("nonsense", &["card"]), REDACTED);
    }
}
