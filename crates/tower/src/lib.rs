//! Weir's limits inside of a Rust service: a [`tower::Layer`] that holds callers to a policy, in the memory of the process.
//!
//! ```
//! use std::time::Duration;
//! use weir_tower::{LimitLayer, Policy, by_header};
//!
//! # fn main() -> Result<(), weir_tower::PolicyError> {
//! let policy = Policy::token_bucket("login", 5, 5, Duration::from_secs(60))?;
//! let app: axum::Router = axum::Router::new()
//!     .route("/login", axum::routing::post(async || "welcome"))
//!     .layer(LimitLayer::new(policy, by_header("x-api-key")));
//! # Ok(())
//! # }
//! ```
//!
//! The rules are those of the server (`weir_core::tier`), exact to the microsecond, and so are the headers of responses and the
//! body of a 429. Nothing is shared with other processes and nothing outlives this one: for that, ask a server
//! (`POST /v1/check`).

mod answer;
mod key;
mod layer;
mod policy;

pub use key::{ByHeader, Everybody, Key, by_header};
pub use layer::{LimitLayer, Limited, LimitedFuture};
pub use policy::{Policy, PolicyError};
