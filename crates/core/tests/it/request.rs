//! The rules of request against models too simple to share their mistakes, and against what must hold of them.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::unwrap_used,
    reason = "a model may panic; the test then fails"
)]

mod breaker;
mod canonical;
mod idempotency;
mod retry;
mod state;
