//! Buyers, who name themselves in a header.

use http::HeaderMap;
use utoipa::IntoParams;
use weir_core::UserId;

use crate::http::openapi::schema;
use crate::http::sale_error::SaleError;

const BUYER: &str = "X-User-Id";

/// The header that names a buyer, as the document shows it.
#[derive(IntoParams)]
#[into_params(parameter_in = Header)]
#[expect(dead_code, reason = "parse_buyer reads it")]
pub(super) struct BuyerHeader {
    /// Who buys, or has bought. Blanks around it are removed.
    #[param(rename = "X-User-Id", value_type = schema::UserId, example = "user@example.com")]
    user: String,
}

/// Who wants to buy, or has bought.
pub(crate) fn parse_buyer(headers: &HeaderMap) -> Result<UserId, SaleError> {
    let text = headers.get(BUYER).and_then(|value| std::str::from_utf8(value.as_bytes()).ok());
    text.and_then(|text| UserId::parse(text.trim()).ok()).ok_or_else(|| {
        let message = "X-User-Id header is required and must be a non-empty string.";
        let allowed = "Must be a non-empty string (max 255 characters)".to_owned();
        SaleError::invalid_fields(vec![(BUYER, allowed)], Some(message))
    })
}
