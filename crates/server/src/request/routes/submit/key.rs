//! The idempotency key: in the body, in the header `Idempotency-Key`, or in both.

use http::{HeaderMap, HeaderName};
use weir_core::IdempotencyKey;

use crate::http::error::ApiError;

const HEADER: HeaderName = HeaderName::from_static("idempotency-key");

/// The key in the header, without the quotes it may have.
/// Fails when there are several, or it is not plain text, or a quote is left open.
pub(super) fn of_header(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let mut values = headers.get_all(HEADER).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err(ApiError::invalid_field("Idempotency-Key", "must be there once"));
    }
    let text = value.to_str().ok().and_then(unquote);
    text.map(Some).ok_or_else(|| {
        ApiError::invalid_field("Idempotency-Key", "must be ASCII text, bare or in double quotes")
    })
}

/// The one key that both places name.
/// Fails when neither does, they differ, or it is no key.
pub(super) fn agreed(field: Option<&str>, header: Option<&str>) -> Result<IdempotencyKey, ApiError> {
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

/// Takes a structured field's quotes and escapes off; a bare text is taken as it is.
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
    fn quotes_are_taken_off_and_bare_keys_left_alone() {
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
    fn both_places_must_agree_and_one_is_enough() {
        let key = |field, header| agreed(field, header).ok().map(|key| key.to_string());
        assert_eq!(key(Some("a"), None).as_deref(), Some("a"));
        assert_eq!(key(None, Some("a")).as_deref(), Some("a"));
        assert_eq!(key(Some("a"), Some("a")).as_deref(), Some("a"));
        assert_eq!(key(Some("a"), Some("b")), None);
        assert_eq!(key(None, None), None);
        assert_eq!(key(None, Some("")), None);
    }
}
