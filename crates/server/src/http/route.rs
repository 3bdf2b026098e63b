//! An entry of the route table.

use std::sync::Arc;

use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use futures_util::future::BoxFuture;
use http::Method;

use super::error::ApiError;
use super::openapi::Description;
use super::sale_error::SaleError;
use crate::app::App;
use crate::auth::credentials::Credentials;

pub(crate) type Endpoint = fn(Request, Arc<App>) -> BoxFuture<'static, Response>;

/// One method of one path.
#[derive(Clone)]
pub struct Route {
    /// `None` if the handler takes every method.
    pub method: Option<Method>,
    /// The path, with its parameters in braces. It is also the route's label in metrics.
    pub path: &'static str,
    /// Checked before the handler runs.
    pub credentials: Credentials,
    pub errors: ErrorFormat,
    pub peer: PeerUse,
    pub role: RouteRole,
    /// Whether it answers 503 when the store is unavailable.
    pub can_be_unavailable: bool,
    /// Whether it is a page or one of its files. Their handlers send errors without a body.
    pub is_page: bool,
    /// Whether it is answered even when all ordinary connections are taken.
    pub is_in_reserve: bool,
    /// Whether it is an attempt to buy, which may be counted when it is decided.
    pub is_attempt: bool,
    pub(crate) endpoint: Endpoint,
    /// The handler's annotation, for `/openapi.json`.
    pub(crate) describe: fn() -> Description,
}

/// The format of error bodies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorFormat {
    /// The flat body of most routes.
    Flat,
    /// The envelope of sale.
    Sale,
}

impl ErrorFormat {
    pub(crate) fn refuse(self, error: impl Into<ApiError>) -> Response {
        let error = error.into();
        match self {
            Self::Flat => error.into_response(),
            Self::Sale => SaleError::from(error).into_response(),
        }
    }
}

/// What a handler needs of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerUse {
    None,
    /// The connection: the response may take long, so the handler watches whether the caller is still connected.
    Connection,
    /// The address, whose requests are limited (`address_limits.rs`).
    AddressLimit,
}

/// Which processes answer a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteRole {
    /// Those with the role `api`.
    Api,
    /// Every process, whatever its roles.
    Any,
}

impl Route {
    pub(crate) fn new(
        method: Option<Method>,
        path: &'static str,
        credentials: Credentials,
        endpoint: Endpoint,
        describe: fn() -> Description,
    ) -> Self {
        let (errors, peer, role) = (ErrorFormat::Flat, PeerUse::None, RouteRole::Api);
        Self {
            method,
            path,
            credentials,
            errors,
            peer,
            role,
            can_be_unavailable: true,
            is_page: false,
            is_in_reserve: false,
            is_attempt: false,
            endpoint,
            describe,
        }
    }

    /// The handler watches whether the caller is still connected.
    pub(crate) const fn watching_peer(mut self) -> Self {
        self.peer = PeerUse::Connection;
        self
    }

    /// A route of sale: its address limits and its envelope.
    pub(crate) const fn of_sale(mut self) -> Self {
        self.errors = ErrorFormat::Sale;
        self.peer = PeerUse::AddressLimit;
        self
    }

    /// Every process answers it, whatever its roles.
    pub(crate) const fn of_any_role(mut self) -> Self {
        self.role = RouteRole::Any;
        self
    }

    /// Never answers 503 because of the store: it answers from memory, or reports outages in its body.
    pub(crate) const fn never_unavailable(mut self) -> Self {
        self.can_be_unavailable = false;
        self
    }

    /// Answered even when all ordinary connections are taken (`serve.rs`).
    pub(crate) const fn in_reserve(mut self) -> Self {
        self.is_in_reserve = true;
        self
    }

    /// An attempt to buy: the store may count it against the address limit when it decides it (`AddressLimits::admit`).
    pub(crate) const fn of_attempts(mut self) -> Self {
        self.is_attempt = true;
        self
    }

    pub(crate) const fn of_page(mut self) -> Self {
        self.is_page = true;
        self.never_unavailable()
    }

    pub(crate) fn accepts(&self, method: &Method) -> bool {
        // HEAD is answered like GET; hyper leaves out the body, and on HTTP/2 `http2.rs`.
        let method = if method == Method::HEAD { &Method::GET } else { method };
        self.method.as_ref().is_none_or(|own| own == method)
    }
}

impl std::fmt::Debug for Route {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let method = self.method.as_ref().map_or("ANY", Method::as_str);
        write!(f, "{method} {} ({:?})", self.path, self.credentials)
    }
}
