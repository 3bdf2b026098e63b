//! What the process does besides answering.

pub mod dispatcher;
pub mod purchases;
pub mod request;
pub mod sender;
pub mod start;
