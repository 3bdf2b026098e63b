//! Callers of the routes that limit what one address may ask.

use std::net::IpAddr;

use axum::extract::FromRequestParts;
use http::HeaderMap;
use http::request::Parts;

use super::error::ApiError;
use super::sale_error::SaleError;
use crate::app::App;
use crate::peer::Peer;

/// Somebody whose address does not ask too much.
#[derive(Clone, Debug)]
pub(crate) struct Visitor {
    /// Where they are: here, or behind a proxy that is trusted.
    pub(crate) address: IpAddr,
}

impl Visitor {
    /// Counts a request of the address it comes from.
    /// Fails when the address asks too often.
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
