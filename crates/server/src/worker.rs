//! What the process does besides answering.

pub mod dispatcher;
pub mod sender;
