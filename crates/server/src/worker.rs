//! What the process does besides answering.

pub(crate) mod dispatcher;
pub(crate) mod purchases;
pub(crate) mod request;
pub(crate) mod sender;
pub(crate) mod start;
