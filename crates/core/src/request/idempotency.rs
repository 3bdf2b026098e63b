//! Idempotency: decides whether a submission is new, a repetition or a conflict, given the record of its key.

use std::time::Duration;

use crate::{IdempotencyKey, RequestId, TenantId, Timestamp};

use super::canonical::Fingerprint;

/// How long a key is stored.
pub const RETENTION: Duration = Duration::from_secs(86_400);

/// The key of a record. It contains the tenant, so tenants never see each other's keys.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantKey {
    pub tenant: TenantId,
    pub key: IdempotencyKey,
}

/// The record of the first submission with a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdempotencyRecord {
    pub fingerprint: Fingerprint,
    pub request_id: RequestId,
    /// When the key can be reused.
    pub expires: Timestamp,
}

/// The outcome for a submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum SubmissionDecision {
    /// The first submission with its key, or the first since the key expired: it becomes a request.
    New,
    /// A repeated submission: it is answered with the current state of that request.
    Replay(RequestId),
    /// A different submission with a used key: it is rejected.
    Conflict,
}

impl IdempotencyRecord {
    /// Creates the record of a submission that is accepted now.
    #[must_use]
    pub fn new(fingerprint: Fingerprint, request_id: RequestId, now: Timestamp) -> Self {
        Self { fingerprint, request_id, expires: now.plus(RETENTION) }
    }

    #[must_use]
    pub fn is_live(&self, now: Timestamp) -> bool {
        now < self.expires
    }
}

/// Decides on a submission, given the record of its [`TenantKey`] if there is one.
pub fn decide(
    record: Option<&IdempotencyRecord>,
    fingerprint: &Fingerprint,
    now: Timestamp,
) -> SubmissionDecision {
    match record.filter(|record| record.is_live(now)) {
        None => SubmissionDecision::New,
        Some(record) if record.fingerprint == *fingerprint => SubmissionDecision::Replay(record.request_id),
        Some(_) => SubmissionDecision::Conflict,
    }
}
