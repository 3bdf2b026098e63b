//! What the process does besides answering.

pub mod sender;
