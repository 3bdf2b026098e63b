//! Weir's rules, as pure functions of state, command, time and random numbers.
//!
//! Nothing here reads a clock, draws a random number, waits, or touches a file or a socket. An engine loads the state,
//! calls the rule and saves the result. So one rule serves SQLite and Postgres alike, and tests can compare it with a
//! naive model millions of times a second.

pub mod id;
pub mod quota;
pub mod request;
pub mod sale;
pub mod slot;
pub mod tier;
pub mod time;
pub mod trace;
pub mod verdict;
pub mod webhook;

pub use id::{
    ConfigName, EventId, HoldId, IdempotencyKey, MessageId, NameError, PermitId, PolicyName, RequestId,
    RequestType, STORED_MARK, TenantId, UserId,
};
pub use time::{Clock, ManualClock, Timestamp};
pub use trace::{SpanId, TraceContext, TraceId, TraceParent};
pub use verdict::{Denial, Verdict};
