//! The rules against naive models of them.

mod quota;
mod request;
mod sale;
mod slot;
mod tier;
