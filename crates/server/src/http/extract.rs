//! What handlers extract from a request: the caller's identity, its address and the parameters of the path. The router has
//! put all of it into the request's extensions.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::FromRequestParts;
use http::HeaderMap;
use http::request::Parts;
use percent_encoding::percent_decode_str;
use weir_core::TenantId;
use weir_store::throttle::AddressLimit;

use super::error::ApiError;
use super::sale_error::SaleError;
use crate::app::App;
use crate::auth::credentials::Identity;
use crate::auth::jwt::VerifiedClaims;
use crate::peer::Peer;
use crate::telemetry::request_context::LogIds;

/// The tenant that a caller acts for, on routes with `Credentials::Tenant`.
#[derive(Clone, Debug)]
pub(crate) struct Tenant(pub(crate) TenantId);

/// The claims of the caller's token, on routes with `Credentials::Token`.
#[derive(Clone, Debug)]
pub(crate) struct User(pub(crate) Arc<VerifiedClaims>);

/// The claims of the caller's token, on routes with `Credentials::Buyer`; none where buyers name themselves.
#[derive(Clone, Debug)]
pub(crate) struct TokenOfBuyer(pub(crate) Option<Arc<VerifiedClaims>>);

impl<S: Sync> FromRequestParts<S> for TokenOfBuyer {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Infallible> {
        match parts.extensions.remove() {
            Some(Identity::User(claims)) => Ok(Self(Some(claims))),
            _ => Ok(Self(None)),
        }
    }
}

impl<S: Sync> FromRequestParts<S> for Tenant {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, ApiError> {
        match parts.extensions.remove() {
            Some(Identity::Tenant(tenant)) => Ok(Self(tenant)),
            _ => Err(identity_missing()),
        }
    }
}

impl<S: Sync> FromRequestParts<S> for User {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, ApiError> {
        match parts.extensions.remove() {
            Some(Identity::User(claims)) => Ok(Self(claims)),
            _ => Err(identity_missing()),
        }
    }
}

/// The route table requires other credentials than the handler needs: a bug in Weir. The route stays closed.
fn identity_missing() -> ApiError {
    let ids = LogIds::current();
    tracing::error!(
        httpRequestId = ids.http_request_id(),
        traceId = ids.trace_id(),
        "a handler needs an identity that its route does not require; fix the route table"
    );
    ApiError::internal()
}

/// The address of a caller on routes that limit addresses. The request has passed that limit.
#[derive(Clone, Debug)]
pub(crate) struct Visitor {
    /// The address of the connection, or the one that a trusted proxy names.
    pub(crate) address: IpAddr,
    /// The limit by which the store counts an attempt to buy of this address when it decides it, if it is to.
    pub(crate) limit: Option<AddressLimit>,
}

impl Visitor {
    /// Counts a request of the caller's address. `is_attempt` says whether it is an attempt to buy.
    /// Fails when the address makes too many requests.
    pub(crate) async fn admit(
        app: &App,
        peer: &Peer,
        headers: &HeaderMap,
        is_attempt: bool,
    ) -> Result<Self, SaleError> {
        let address = app.address_limits.client_address(peer.address().ip(), headers);
        let limit = app.address_limits.admit(address, is_attempt).await?;
        Ok(Self { address, limit })
    }
}

impl<S: Sync> FromRequestParts<S> for Visitor {
    type Rejection = SaleError;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, SaleError> {
        // The router inserts it on every route of sale.
        parts.extensions.remove().ok_or_else(|| ApiError::internal().into())
    }
}

/// The values of a path's parameters, in order, percent-decoded. `None` stands for a value that is not UTF-8.
#[derive(Clone, Debug, Default)]
pub(crate) struct PathParams(Vec<Option<Box<str>>>);

impl PathParams {
    pub(crate) fn decode(matched: &matchit::Params<'_, '_>) -> Self {
        let decode = |text: &str| percent_decode_str(text).decode_utf8().ok().map(Box::from);
        Self(matched.iter().map(|(_name, value)| decode(value)).collect())
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// A path parameter is not UTF-8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NotUtf8;

/// The only parameter of a path.
#[derive(Clone, Debug)]
pub(crate) struct PathParam(pub(crate) Result<Box<str>, NotUtf8>);

/// Both parameters of a path that has two.
#[derive(Clone, Debug)]
pub(crate) struct TwoPathParams(pub(crate) Result<[Box<str>; 2], NotUtf8>);

impl<S: Sync> FromRequestParts<S> for PathParam {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Infallible> {
        Ok(Self(take_params(parts).into_iter().next().flatten().ok_or(NotUtf8)))
    }
}

impl<S: Sync> FromRequestParts<S> for TwoPathParams {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Infallible> {
        let values: Option<Vec<Box<str>>> = take_params(parts).into_iter().collect();
        Ok(Self(values.and_then(|values| values.try_into().ok()).ok_or(NotUtf8)))
    }
}

fn take_params(parts: &mut Parts) -> Vec<Option<Box<str>>> {
    parts.extensions.remove::<PathParams>().unwrap_or_default().0
}
