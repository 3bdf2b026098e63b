//! Calls that Weir makes over HTTP.

pub mod address;
