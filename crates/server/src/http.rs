//! The HTTP face: routes, wire types, errors. It authenticates, parses, calls one service function and answers.

pub mod ai;
pub mod audit;
pub mod body;
pub mod caller;
pub mod dead_letters;
mod endless;
pub mod envelope;
pub mod error;
pub mod limits;
pub mod operations;
pub mod page;
pub mod queue;
pub mod quota;
pub mod request;
pub mod router;
pub mod sale;
pub mod serve;
pub(crate) mod short;
pub mod slot;
pub mod tier;
