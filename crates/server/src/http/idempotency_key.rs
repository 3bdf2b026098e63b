//! The header `Idempotency-Key` of a request, and the mark of a response that was given before.

use axum::extract::FromRequestParts;
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue};

use super::error::ApiError;

const HEADER: HeaderName = HeaderName::from_static("idempotency-key");
const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

/// The key in the header, without its optional quotes; `None` without the header.
#[derive(Debug)]
pub(crate) struct IdempotencyKeyHeader(pub(crate) Option<String>);

impl<S: Sync> FromRequestParts<S> for IdempotencyKeyHeader {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, ApiError> {
        from_header(&parts.headers).map(Self)
    }
}

/// Marks the response to a call that was answered before with the same key.
pub(crate) fn mark_replayed(headers: &mut HeaderMap) {
    headers.insert(REPLAYED, HeaderValue::from_static("true"));
}

/// Fails if the header is repeated, not ASCII, or badly quoted.
fn from_header(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
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
}
