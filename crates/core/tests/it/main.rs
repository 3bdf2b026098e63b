//! Compares the rules with naive models.

mod anomaly;
mod quota;
mod request;
mod sale;
mod slot;
mod tier;
