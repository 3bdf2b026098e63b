//! The HTTP face: routes, wire types, errors. The router checks credentials; a handler parses, calls one service function and
//! answers.

mod audit;
mod body;
mod dead_letters;
mod error;
mod event_stream;
mod gateway;
mod host;
mod identity;
mod lingering_close;
pub mod openapi;
mod operations;
mod pagination;
mod path_params;
mod queue;
mod quota;
mod rate_limit_headers;
mod request;
mod request_scope;
pub mod route;
pub(crate) mod router;
pub mod routes;
mod sale;
pub(crate) mod serve;
mod slot;
mod tier;
mod tracked_body;
