//! Once per key: what a submission is, given what its tenant has sent under the same key before.

use std::time::Duration;

use crate::{IdempotencyKey, RequestId, TenantId, Timestamp};

use super::canonical::Fingerprint;

/// How long a key is remembered.
pub const RETENTION: Duration = Duration::from_secs(86_400);

/// What a submission is remembered under. The tenant is part of it, so tenants cannot meet each other's keys.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantKey {
    /// Who sent it.
    pub tenant: TenantId,
    /// The tenant's name for it.
    pub key: IdempotencyKey,
}

/// What is remembered of the first submission under a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdempotencyRecord {
    /// What was asked for.
    pub fingerprint: Fingerprint,
    /// The request that it became.
    pub request_id: RequestId,
    /// When the key is free again.
    pub expires: Timestamp,
}

/// What a submission is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Submission {
    /// The first under its key, or the first since the key expired: it becomes a request.
    New,
    /// One that was sent before: it is answered with that request as it stands now.
    Replay(RequestId),
    /// Another one under a used key: it is refused.
    Conflict,
}

impl IdempotencyRecord {
    /// What to remember of a submission accepted now.
    #[must_use]
    pub fn new(fingerprint: Fingerprint, request_id: RequestId, now: Timestamp) -> Self {
        Self { fingerprint, request_id, expires: now.plus(RETENTION) }
    }

    /// Whether the key is still taken.
    #[must_use]
    pub fn is_live(&self, now: Timestamp) -> bool {
        now < self.expires
    }
}

/// Decides what a submission is, given the record of its [`TenantKey`], if there is one.
pub fn decide(kept: Option<&IdempotencyRecord>, fingerprint: &Fingerprint, now: Timestamp) -> Submission {
    match kept.filter(|record| record.is_live(now)) {
        None => Submission::New,
        Some(record) if record.fingerprint == *fingerprint => Submission::Replay(record.request_id),
        Some(_) => Submission::Conflict,
    }
}
