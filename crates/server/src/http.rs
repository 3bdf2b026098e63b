//! The HTTP face: routes, wire types, errors. The router checks credentials; a handler parses, calls one service function and
//! answers.

pub(crate) mod body;
pub(crate) mod error;
pub(crate) mod event_stream;
mod host;
pub(crate) mod identity;
mod lingering_close;
pub mod openapi;
pub(crate) mod pagination;
pub(crate) mod path_params;
pub(crate) mod rate_limit_headers;
pub(crate) mod request_scope;
pub mod route;
pub(crate) mod router;
pub(crate) mod sale_error;
pub(crate) mod serve;
mod tracked_body;
pub(crate) mod visitor;
