//! The idempotency key of a submission: in the body, in the header `Idempotency-Key`, or in both.

use weir_core::IdempotencyKey;

use crate::http::error::ApiError;

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

#[cfg(test)]
mod tests {
    use super::*;

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
