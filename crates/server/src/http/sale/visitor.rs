//! Who calls: anybody within the limits of their address, or a buyer by name.

use std::net::IpAddr;

use axum::extract::FromRequestParts;
use http::HeaderMap;
use http::request::Parts;
use utoipa::IntoParams;
use weir_core::UserId;

use super::super::error::ApiError;
use super::super::openapi::schema;
use super::error::SaleError;
use crate::app::App;
use crate::peer::Peer;

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

/// Somebody whose address does not ask too much.
#[derive(Clone, Debug)]
pub(crate) struct Visitor {
    /// Where they are: here, or behind a proxy that is trusted.
    pub(crate) address: IpAddr,
}

impl Visitor {
    /// Counts a request of the address it comes from.
    ///
    /// # Errors
    /// When the address asks too often.
    pub(crate) fn admit(app: &App, peer: &Peer, headers: &HeaderMap) -> Result<Self, SaleError> {
        let address = app.address_limits.address(peer.address().ip(), headers);
        app.address_limits.request(address)?;
        Ok(Self { address })
    }
}

impl<S: Sync> FromRequestParts<S> for Visitor {
    type Rejection = SaleError;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, SaleError> {
        // The router puts it there on every route of sale.
        parts.extensions.remove().ok_or_else(|| ApiError::internal().into())
    }
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
