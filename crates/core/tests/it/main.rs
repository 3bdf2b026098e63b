//! Compares the rules with naive models.

mod quota;
mod request;
mod sale;
mod slot;
mod tier;
