//! Compares the rules of request with models too simple to share their mistakes, and checks their invariants.
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
mod turn;
