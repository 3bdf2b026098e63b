//! The idempotency key: in the body, in the header `Idempotency-Key`, or in both.

use http::{HeaderMap, HeaderName};
use weir_core::IdempotencyKey;

use crate::http::error::ApiError;

const HEADER: HeaderName = HeaderName::from_static("idempotency-key");

/// The key in the header, without its optional quotes.
/// Fails if the header is repeated, not ASCII, or badly quoted.
pub(super) fn from_header(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let mut values = headers.get_all(HEADER).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err(ApiError::invalid_field("Idempotency-Key", "must not be repeated"));
    }
    let text = value.to_str().ok().and_then(unquote);
    text.map(Some).ok_or_else(|| {
        ApiError::invalid_field("Idempotency-Key", "must be ASCII text, bare or in double quotes")
    })
}

/// The key of the field or the header.
/// Fails if both are missing, they differ, or the key is not valid.
pub(super) fn resolve(field: Option<&str>, header: Option<&str>) -> Result<IdempotencyKey, ApiError> {
    let key = match (field, header) {
        (Some(field), Some(header)) if field != header => {
            let problem = "differs from the header Idempotency-Key; send one of them, or the same in both";
            return Err(ApiError::invalid_field("idempotencyKey", problem));
        }
        (Some(key), _) | (None, Some(key)) => key,
        (None, None) => {
            let problem = "is required, in the body or as the header Idempotency-Key";
            return Err(ApiError::invalid_field("idempotencyKey", problem));
        }
    };
    IdempotencyKey::parse(key).map_err(|problem| ApiError::invalid_field("idempotencyKey", problem))
}

/// Removes the quotes and escapes of a structured field; text without quotes stays as it is.
fn unquote(text: &str) -> Option<String> {
    let text = text.trim();
    let Some(rest) = text.strip_prefix('"') else { return Some(text.to_owned()) };
    let (mut key, mut rest) = (String::with_capacity(rest.len()), rest.chars());
    loop {
        match rest.next()? {
            '"' => return rest.as_str().is_empty().then_some(key),
            '\\' => key.push(rest.next().filter(|escaped| matches!(escaped, '"' | '\\'))?),
            plain => key.push(plain),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_are_removed_and_bare_keys_stay() {
        for (text, key) in [
            ("abc", Some("abc")),
            (" abc ", Some("abc")),
            (r#""abc""#, Some("abc")),
            (r#""a\"b\\c""#, Some(r#"a"b\c"#)),
            (r#""""#, Some("")),
            (r#"a"b"#, Some(r#"a"b"#)),
            (r#""abc"#, None),
            (r#""abc" x"#, None),
            (r#""a\x""#, None),
            (r#""a\"#, None),
        ] {
            assert_eq!(unquote(text).as_deref(), key, "{text}");
        }
    }

    #[test]
    fn field_and_header_must_agree_and_one_is_enough() {
        let key = |field, header| resolve(field, header).ok().map(|key| key.to_string());
        assert_eq!(key(Some("a"), None).as_deref(), Some("a"));
        assert_eq!(key(None, Some("a")).as_deref(), Some("a"));
        assert_eq!(key(Some("a"), Some("a")).as_deref(), Some("a"));
        assert_eq!(key(Some("a"), Some("b")), None);
        assert_eq!(key(None, None), None);
        assert_eq!(key(None, Some("")), None);
    }
}
