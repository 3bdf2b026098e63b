//! Weir's rate limits inside a Rust service: a [`tower::Layer`] that limits callers by a policy, in the process's memory.
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
//! The rules (`weir_core::tier`), which are exact to the microsecond, the response headers and the body of a 429 are those
//! of the server. Counters are neither shared with other processes nor saved; use a server (`POST /v1/check`) for that.

mod answer;
mod key;
mod layer;
mod policy;

pub use key::{ByHeader, Everybody, Key, by_header};
pub use layer::{LimitLayer, Limited, LimitedFuture};
pub use policy::{Policy, PolicyError};
