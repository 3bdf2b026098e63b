//! Request at the store: its commands and outcomes, and the trait engines implement.
//!
//! A request is three rows, written in one commit: the record that callers read, the record of its idempotency key, and a
//! job. The job exists until the request is final and says when the request may be claimed and with which token. Records
//! are found by id and tenant and stay for ninety days; jobs are found by downstream and time, and their table has only
//! unfinished work.
//!
//! Payloads, results, failure messages and callback URLs are encrypted and opaque here; idempotency keys and fingerprints are
//! keyed hashes.
//!
//! Engines load, lock and save rows; plans decide batches: [`plan_submit`], [`plan_claim`], [`plan_report`],
//! [`plan_callback`], [`plan_cancel`] and [`plan_replay`].

mod hash_keys;
mod job;
mod plan_callback;
mod plan_cancel;
mod plan_claim;
mod plan_report;
mod plan_submit;
mod tenants;
mod turns;

pub use self::hash_keys::{HashKeys, PlainKeysRefused, ResealedRequest, SealedHashKey, SealedNames};
pub use self::job::{AttemptOutcome, JobChange, JobRow, RequestRow, plan_replay, stored_progress};
pub use self::plan_callback::plan_callback;
pub use self::plan_cancel::plan_cancel;
pub use self::plan_claim::{ClaimPlan, ClaimRow, plan_claim};
pub use self::plan_report::{ReportPlan, plan_report};
pub use self::plan_submit::{IdempotencyEntries, IdempotencyEntry, NewRequest, SubmitPlan, plan_submit};
pub use self::tenants::{ExpressCounts, TenantCapacity, TenantRule, TenantRules};
pub use self::turns::{TurnClaim, TurnGrant, TurnScan};

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use weir_core::quota::{Quota, QuotaLimits};
use weir_core::request::canary::Percent;
use weir_core::request::canonical::Fingerprint;
use weir_core::request::retry::RetryPolicy;
use weir_core::request::state::{Callback, RequestStatus, TransitionError, WorkerReport};
use weir_core::request::turn::Turn;
use weir_core::{IdempotencyKey, RequestId, RequestType, TenantId, Timestamp, TraceContext};

use crate::{Batch, Result};

/// The topic of outgoing webhooks. Key and payload of a message are the id of a final request.
pub const WEBHOOKS_TOPIC: &str = "request-webhooks";

/// Encrypted bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sealed {
    pub key_id: String,
    /// Nonce and ciphertext.
    pub bytes: Vec<u8>,
}

/// An encryption key that a server has registered, without the key itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SealingKey {
    /// Stored with everything the key encrypts.
    pub name: String,
    /// Distinguishes keys of the same name, for operators.
    pub digest: String,
    /// A known value, encrypted: a server that can decrypt it has the key.
    pub check: Sealed,
}

/// The result of scanning some requests for one that is encrypted with a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SealedSearch {
    Found(RequestId),
    /// None up to and including this request; there may be more requests.
    NoneUpTo(RequestId),
    /// None, and there are no more requests.
    None,
}

/// An idempotency key and a fingerprint without a keyed hash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlainKey {
    pub key: IdempotencyKey,
    pub fingerprint: Fingerprint,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Submit {
    /// The id of the request if it is accepted.
    pub id: RequestId,
    pub tenant: TenantId,
    /// The caller's key, or a keyed hash of it.
    pub key: IdempotencyKey,
    pub request_type: RequestType,
    /// Detects different submissions under the same key. Keyed if the key is.
    pub fingerprint: Fingerprint,
    /// What the caller's key and fingerprint were stored as before [`RequestStore::begin_hashing`], while rows of then may be
    /// in use: a live row of that form answers the submission, too.
    pub plain: Option<PlainKey>,
    pub payload: Sealed,
    pub downstream: String,
    pub callback_url: Option<String>,
    /// The trace that the request belongs to.
    pub trace: Option<TraceContext>,
    /// Whether the job goes through a broker: the request is `PENDING_ENQUEUE` until the broker has it.
    pub needs_broker: bool,
    /// The tenant's limits of new requests; `None` if there are none.
    pub limits: Option<QuotaLimits>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SubmitOutcome {
    Accepted(SubmitReceipt),
    /// It was submitted before; the receipt has the present status.
    Replayed(SubmitReceipt),
    /// The key was used for a different submission.
    Conflict,
    /// The tenant has submitted as many new requests as its limit allows.
    Limited {
        limits: QuotaLimits,
        /// The time until the next window begins.
        retry_after: Duration,
    },
}

impl SubmitOutcome {
    /// The outcome with what is left of the tenant's limits, if it is a receipt.
    #[must_use]
    pub const fn with_window(self, window: Option<TenantWindow>) -> Self {
        match self {
            Self::Accepted(receipt) => Self::Accepted(SubmitReceipt { window, ..receipt }),
            Self::Replayed(receipt) => Self::Replayed(SubmitReceipt { window, ..receipt }),
            other => other,
        }
    }
}

/// The answer to a submitter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubmitReceipt {
    pub id: RequestId,
    pub status: RequestStatus,
    pub accepted_at: Timestamp,
    /// What is left of the tenant's limits after this submission, if it has any.
    pub window: Option<TenantWindow>,
}

/// What is left of a tenant's limits of new requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TenantWindow {
    pub limits: QuotaLimits,
    pub remaining: u32,
    /// The time until the next window begins.
    pub reset_after: Duration,
}

impl TenantWindow {
    /// The window of a tenant as it counts at `now`.
    #[must_use]
    pub fn at(window: &Quota, now: Timestamp) -> Self {
        let window = window.as_of(now);
        let reset_after = window.reset_at().since(now);
        // A window that has passed begins again with the next new request.
        let reset_after = if reset_after.is_zero() { window.limits.window() } else { reset_after };
        Self { limits: window.limits, remaining: window.remaining(), reset_after }
    }
}

/// A request's record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub id: RequestId,
    pub tenant: TenantId,
    pub request_type: RequestType,
    pub status: RequestStatus,
    /// Attempts started.
    pub attempts: u32,
    pub payload: Sealed,
    /// The downstream's response, once the request is completed.
    pub result: Option<Sealed>,
    /// Why the request or its last attempt failed.
    pub failure: Option<Failure>,
    pub callback_url: Option<String>,
    /// The trace that the request belongs to; `None` if a server of an earlier version accepted it.
    pub trace: Option<TraceContext>,
    pub accepted_at: Timestamp,
    pub updated_at: Timestamp,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// For programs.
    pub code: String,
    /// For people.
    pub message: String,
}

/// A request that a worker has claimed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    pub id: RequestId,
    pub tenant: TenantId,
    pub request_type: RequestType,
    /// The downstream chosen when the request was accepted.
    pub downstream: String,
    pub payload: Sealed,
    /// Fences reports of earlier claims.
    pub token: u64,
    /// The number of this attempt, from 1 on.
    pub attempt: u32,
    /// As in [`Request`].
    pub trace: Option<TraceContext>,
    pub accepted_at: Timestamp,
}

/// The result of a claim.
#[derive(Clone, Debug, Default)]
pub struct ClaimedJobs {
    /// Leased to the worker for as long as the policy says.
    pub jobs: Vec<Job>,
    /// Requests that had no attempt left and are dead letters now.
    pub exhausted: Vec<RequestId>,
    /// How many of the jobs were taken from a worker that has not reported, so that their downstream may be called again.
    pub taken_over: usize,
    /// If the claim is empty: the time until the next job is due.
    pub next_due_in: Option<Duration>,
    /// Where the next claim of a downstream goes on, for those that were claimed from.
    pub turns: BTreeMap<String, Turn>,
    /// Whether due jobs were left although there was capacity, because not all tenants could be looked at.
    pub is_partial: bool,
    /// Whether due jobs were left because their tenants have as many calls as they may have.
    pub is_held_back: bool,
}

/// How a claim chooses among the jobs that are due.
#[derive(Clone, Debug, Default)]
pub struct ClaimOrder {
    pub tenants: TenantCapacity,
    /// Where the claim of a downstream begins: what the claim before has returned.
    pub turns: BTreeMap<String, Turn>,
}

/// How many jobs of a downstream a worker can take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DownstreamCapacity {
    pub downstream: String,
    pub jobs: usize,
}

/// A worker's report on a claimed job.
#[derive(Clone, Debug)]
pub struct JobReport {
    pub id: RequestId,
    pub token: u64,
    pub report: WorkerReport,
    /// The downstream's response, if it completes the request.
    pub result: Option<Sealed>,
    /// Details beyond the cause, for people.
    pub detail: Option<String>,
    /// Spreads the backoff before the next attempt.
    pub random: u64,
}

/// The contents of a downstream's callback.
#[derive(Clone, Debug)]
pub struct CallbackReport {
    pub callback: Callback,
    pub result: Option<Sealed>,
    pub failure: Option<Failure>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallbackOutcome {
    /// The request is now final.
    Applied(RequestStatus),
    /// The request is final already, or no call to the downstream has started.
    TransitionError(TransitionError),
    Unknown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelOutcome {
    Cancelled,
    /// The request had ended before, with this status.
    AlreadyFinal(RequestStatus),
    Unknown,
}

/// Which requests a list has: those that match all that is given. Without anything, all of every tenant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestFilter {
    pub tenant: Option<TenantId>,
    pub status: Option<RequestStatus>,
    pub request_type: Option<RequestType>,
}

impl RequestFilter {
    /// The requests of one tenant, optionally of one status.
    #[must_use]
    pub fn of_tenant(tenant: &TenantId, status: Option<RequestStatus>) -> Self {
        Self { tenant: Some(tenant.clone()), status, request_type: None }
    }

    /// Whether it leaves out requests that no index leaves out, so that many may have to be scanned for a page.
    #[must_use]
    pub const fn needs_scan(&self) -> bool {
        self.status.is_some() || self.request_type.is_some()
    }
}

/// A request that has not ended, and its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnfinishedRequest {
    /// Without payload and result.
    pub request: Request,
    /// When the job is due or, if a worker has claimed it, when the lease ends.
    pub claimable_at: Timestamp,
    /// Whether a worker has claimed it. A lease that is over counts as none once the job is claimed again.
    pub is_leased: bool,
}

/// A request whose attempts have all failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadRequest {
    pub request: Request,
    pub died_at: Timestamp,
}

/// The unfinished jobs of one downstream. Each count stops at the limit of its call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobCounts {
    pub downstream: String,
    /// Jobs that are due and that no worker has.
    pub waiting: u64,
    /// Jobs that a worker has claimed.
    pub running: u64,
    /// Jobs that are due later: for their next attempt, for the breaker, or because a callback is awaited.
    pub parked: u64,
    /// For how long the first of the waiting jobs has been due.
    pub oldest_waiting: Option<Duration>,
}

/// Some requests of a tenant whose data is erased.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ErasedBatch {
    pub tenant: TenantId,
    /// The requests that were erased. Those that were changed at the same moment are left for the next batch.
    pub requests: Vec<RequestId>,
    /// Set with the last batch: how many requests of the tenant were erased altogether.
    pub total: Option<u64>,
}

/// A tenant's limit of new requests per minute that an operator has set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantLimit {
    pub tenant: TenantId,
    /// `None` means no limit, whatever the settings say.
    pub limits: Option<QuotaLimits>,
}

/// The most tenants with a limit of their own. Servers hold all of them in memory.
pub const TENANT_LIMITS_MAX: usize = 10_000;

/// A request whose job is not with a broker yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingRequest {
    pub id: RequestId,
    /// How long it has been waiting.
    pub age: Duration,
}

/// The request tables' totals, read in one snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestAudit {
    pub accepted: u64,
    pub completed: u64,
    /// Requests that the downstream rejected.
    pub failed: u64,
    /// Dead letters, including discarded ones.
    pub dead: u64,
    pub cancelled: u64,
    pub in_flight: u64,
    pub purged: u64,
    /// Requests that were erased with all data of their tenants.
    pub erased: u64,
    /// Rows of the job table. Must equal `in_flight`.
    pub jobs: u64,
}

impl RequestAudit {
    /// Requests that are missing (positive) or extra (negative); 0 if the totals balance.
    #[must_use]
    pub fn difference(&self) -> i128 {
        let found = [
            self.completed,
            self.failed,
            self.dead,
            self.cancelled,
            self.in_flight,
            self.purged,
            self.erased,
        ];
        i128::from(self.accepted) - found.into_iter().map(i128::from).sum::<i128>()
    }
}

/// The switches that apply on every server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rollout {
    /// Whether requests are accepted and processed.
    pub processing_enabled: bool,
    /// Whether new submissions are accepted. Without it, what was accepted is processed all the same.
    pub accepting_enabled: bool,
    /// Whether requests stuck in `PENDING_ENQUEUE` are published to the broker again.
    pub reconciler_enabled: bool,
    /// The share of tenants that may submit.
    pub canary: Percent,
}

/// A change of switches; `None` leaves one unchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RolloutChange {
    /// Whether requests are accepted and processed.
    pub processing_enabled: Option<bool>,
    /// Whether new submissions are accepted.
    pub accepting_enabled: Option<bool>,
    /// Whether requests stuck in `PENDING_ENQUEUE` are published to the broker again.
    pub reconciler_enabled: Option<bool>,
    /// The share of tenants that may submit.
    pub canary: Option<Percent>,
}

/// A claim takes no further job once its payloads have this many bytes: they are held in memory and must be read within
/// the timeout of a claim.
pub const CLAIM_BYTES_MAX: usize = 8 << 20;

/// The most requests that a list filtered by status or type scans. The status is not indexed, since every transition of a
/// request would update the index.
pub const LIST_SCAN_MAX: usize = 10_000;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestPage {
    pub requests: Vec<Request>,
    /// Set if the scan stopped at [`LIST_SCAN_MAX`] before the page was full: where the next page continues.
    pub next_before: Option<RequestId>,
}

#[async_trait]
pub trait RequestStore: Send + Sync + 'static {
    /// Decides submissions in order and in one commit. New requests count against their tenant's limits, if they have any;
    /// replays do not. The batch grows until the engine takes it.
    async fn submit_batch(&self, batch: Batch<Submit>) -> Result<Vec<SubmitOutcome>>;
    /// Finds a request of any tenant.
    async fn find_request(&self, id: RequestId) -> Result<Option<Request>>;
    /// Returns the existing ones of these requests, of any tenant and in any order, without payloads and results.
    async fn find_summaries(&self, ids: &[RequestId]) -> Result<Vec<Request>>;
    /// Lists requests older than `before` that match, newest first, without payloads and results, which may be large. With a
    /// status or a type, at most [`LIST_SCAN_MAX`] requests are scanned.
    async fn list_requests(
        &self,
        filter: &RequestFilter,
        before: Option<RequestId>,
        limit: usize,
    ) -> Result<RequestPage>;
    /// Lists unfinished requests of a downstream, those first whose jobs have been due for longest.
    async fn unfinished_requests(&self, downstream: &str, limit: usize) -> Result<Vec<UnfinishedRequest>>;

    /// Claims due jobs up to the capacity of each downstream and to about [`CLAIM_BYTES_MAX`]. Tenants take turns, and of each
    /// tenant the longest due come first.
    async fn claim_jobs(
        &self,
        room: &[DownstreamCapacity],
        order: &ClaimOrder,
        policy: &RetryPolicy,
    ) -> Result<ClaimedJobs>;
    /// Claims due express jobs (see [`weir_core::request::turn`]), the last accepted first: those before it may be of many
    /// tenants, and get their turns.
    async fn claim_express(
        &self,
        room: &[DownstreamCapacity],
        tenants: &TenantCapacity,
        policy: &RetryPolicy,
    ) -> Result<ClaimedJobs>;
    /// Claims the jobs of these requests if they are due and not leased, and their tenants have capacity. For workers that receive
    /// jobs from a broker.
    async fn claim_named(
        &self,
        ids: &[RequestId],
        tenants: &TenantCapacity,
        policy: &RetryPolicy,
    ) -> Result<ClaimedJobs>;
    /// The downstreams that have waiting jobs.
    async fn job_downstreams(&self) -> Result<Vec<String>>;
    /// Counts the jobs of these downstreams, in their order. Scans at most `limit` waiting and `limit` other jobs of each.
    async fn count_jobs(&self, downstreams: &[String], limit: usize) -> Result<Vec<JobCounts>>;
    /// Applies workers' reports in one commit and returns each request's new status. A report whose lease is lost changes
    /// nothing. Requests that become final and have a callback URL are enqueued on [`WEBHOOKS_TOPIC`] in the same commit.
    async fn report_batch(
        &self,
        batch: Vec<JobReport>,
        policy: &RetryPolicy,
    ) -> Result<Vec<std::result::Result<RequestStatus, TransitionError>>>;
    /// Applies a downstream's callback.
    async fn call_back(&self, id: RequestId, report: CallbackReport) -> Result<CallbackOutcome>;
    /// Cancels a request. Its job ends whoever has claimed it, so that nothing that a worker or the downstream reports counts, and
    /// no webhook is enqueued.
    async fn cancel_request(&self, id: RequestId) -> Result<CancelOutcome>;
    /// Returns when there may be jobs to claim: at once if this process accepted requests since the last call, and after
    /// `at_most` at the latest.
    async fn wait_for_jobs(&self, at_most: Duration);
    /// As [`wait_for_jobs`](Self::wait_for_jobs), for express jobs.
    async fn wait_for_express_jobs(&self, at_most: Duration);

    /// Requests that have been `PENDING_ENQUEUE` for at least `older_than`, the oldest first.
    async fn pending_requests(&self, older_than: Duration, limit: usize) -> Result<Vec<PendingRequest>>;
    /// Marks the requests whose jobs the broker has: `PENDING_ENQUEUE` becomes `ACCEPTED`.
    async fn mark_enqueued(&self, ids: &[RequestId]) -> Result<()>;

    /// Lists dead letters in order of id, after `after`. A payload of more than `payload_max` bytes is left out: part of an
    /// encrypted payload cannot be decrypted, and a list of full ones might not fit into memory.
    async fn dead_requests(
        &self,
        after: Option<RequestId>,
        limit: usize,
        payload_max: usize,
    ) -> Result<Vec<DeadRequest>>;
    /// Restarts those of these requests that are dead letters, in one commit, and returns their ids in order.
    async fn replay_requests(&self, ids: &[RequestId]) -> Result<Vec<RequestId>>;
    /// Removes a dead letter from the list; the request stays failed. Returns `false` if the request is none.
    async fn discard_request(&self, id: RequestId) -> Result<bool>;
    async fn count_dead_requests(&self) -> Result<u64>;

    /// Deletes up to `limit` final requests that were accepted longer than `keep` ago, and up to `limit` expired idempotency
    /// keys. Returns how many rows were deleted.
    async fn purge_requests(&self, keep: Duration, limit: usize) -> Result<u64>;
    /// The switches as changed over the API; `None` if none was ever changed.
    async fn rollout(&self) -> Result<Option<Rollout>>;
    /// Changes switches for every server and returns the result. Switches never changed before start from `default`.
    async fn change_rollout(&self, change: RolloutChange, default: Rollout) -> Result<Rollout>;
    async fn audit_requests(&self) -> Result<RequestAudit>;

    /// Begins to erase what a tenant has submitted until now, whatever its state. Returns how many requests there are; counts at
    /// most `count_max`.
    async fn begin_erasure(&self, tenant: &TenantId, count_max: usize) -> Result<u64>;
    /// Erases up to `limit` requests of a tenant whose erasure has begun, with their jobs, dead letters and dead webhooks; then, up
    /// to `limit` at a time, the idempotency keys from before it began. Workers that are calling the requests lose them, and
    /// webhooks that wait find nothing to send. The tenant is the one whose erasure began first, after `passed_over` others.
    /// Returns `None` if nothing is to be erased, or another server is at it.
    async fn erase_some(&self, limit: usize, passed_over: usize) -> Result<Option<ErasedBatch>>;

    /// The limits that operators have set for tenants.
    async fn tenant_limits(&self) -> Result<Vec<TenantLimit>>;
    /// Sets the limit of a tenant. Returns `false`, and sets nothing, if there are [`TENANT_LIMITS_MAX`] others.
    async fn put_tenant_limit(&self, limit: &TenantLimit) -> Result<bool>;
    /// Removes the limit of a tenant, so that the one of the settings applies. Returns `false` if there is none.
    async fn delete_tenant_limit(&self, tenant: &TenantId) -> Result<bool>;

    /// The registered keys in order of name and digest, each with the time of its last registration.
    async fn sealing_keys(&self) -> Result<Vec<(SealingKey, Timestamp)>>;
    /// Registers a key, or updates the time of one with the same name and digest.
    async fn register_sealing_key(&self, key: &SealingKey) -> Result<()>;
    async fn remove_sealing_key(&self, name: &str, digest: &str) -> Result<()>;
    /// Scans up to `limit` requests after `after`, the oldest first, for one whose payload or result is encrypted with the key
    /// of this name. Key names are not indexed, so a full search takes long.
    async fn find_sealed_with(
        &self,
        name: &str,
        after: Option<RequestId>,
        limit: usize,
    ) -> Result<SealedSearch>;
    /// The request of any tenant that was accepted last.
    async fn newest_request(&self) -> Result<Option<Request>>;

    /// Whether idempotency keys are stored as keyed hashes, and the sealed key of these hashes.
    async fn hash_keys(&self) -> Result<HashKeys>;
    /// Begins to store idempotency keys as keyed hashes, unless that has begun: from then on no server can store one in another
    /// form, not even one of an earlier version, and all servers use the key that was given first.
    async fn begin_hashing(&self, key: &SealedHashKey) -> Result<()>;
    /// Stores the key of the hashes, unless there is one, and leaves the form in which requests are stored as it is.
    async fn prepare_hash_key(&self, key: &SealedHashKey) -> Result<()>;
    /// Stores the key of the hashes sealed with one more request key. Does nothing if it is stored so already, or if there is
    /// none yet.
    async fn add_hash_key(&self, key: &SealedHashKey) -> Result<()>;
    /// Removes one form of the key of the hashes, unless it is the last.
    async fn remove_hash_key(&self, name: &str, digest: &str) -> Result<()>;
    /// The names of the keys that requests are sealed with, in order of id, after `after`.
    async fn sealed_names(&self, after: Option<RequestId>, limit: usize) -> Result<Vec<SealedNames>>;
    /// Replaces sealed fields of a request. A field that was changed or sealed again meanwhile stays as it is.
    async fn reseal_request(&self, resealed: &ResealedRequest) -> Result<()>;
}
