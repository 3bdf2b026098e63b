//! The HTTP API: listeners, router, request bodies, errors, OpenAPI. The router checks credentials; handlers, in the `routes`
//! modules of the capabilities, parse, call one service function and respond.

pub(crate) mod body;
mod encrypted;
pub(crate) mod error;
pub(crate) mod event_stream;
pub(crate) mod extract;
mod host;
mod http2;
pub(crate) mod idempotency_key;
mod lingering_close;
pub mod openapi;
pub(crate) mod page_files;
pub(crate) mod pagination;
pub(crate) mod rate_limit_headers;
pub mod route;
pub(crate) mod router;
pub(crate) mod sale_error;
pub(crate) mod serve;
pub(crate) mod time;
mod tracked_body;
