//! Who calls: anybody within the limits of their address, a buyer by name, or the operator.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::FromRequestParts;
use http::HeaderMap;
use http::request::Parts;
use weir_core::UserId;

use super::super::caller::Caller;
use super::super::error::ApiError;
use super::error::SaleError;
use crate::app::App;

const BUYER: &str = "X-User-Id";

/// Somebody whose address does not ask too much.
#[derive(Clone, Debug)]
pub(crate) struct Visitor {
    /// Where they are: here, or behind a proxy that is trusted.
    pub(crate) address: IpAddr,
}

impl FromRequestParts<Arc<App>> for Visitor {
    type Rejection = SaleError;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, SaleError> {
        // Every request to these routes comes with it.
        let caller = parts.extensions.remove::<Caller>().ok_or_else(ApiError::internal)?;
        let address = app.edge.address(caller.address().ip(), &parts.headers);
        app.edge.request(address)?;
        Ok(Self { address })
    }
}

/// The operator, in sale's envelope.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Admin;

impl FromRequestParts<Arc<App>> for Admin {
    type Rejection = SaleError;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, SaleError> {
        if app.auth.admin.matches(&parts.headers) { Ok(Self) } else { Err(SaleError::unauthorized()) }
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
