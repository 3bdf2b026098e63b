//! Request at the store: its commands and outcomes, and the trait an engine implements.
//!
//! A request is three rows, written in one commit: the record that callers read, the idempotency record that its key is
//! remembered by, and a job. The job is there until the request is final; it says when the request may be claimed and
//! with which token. Records are found by id and by tenant, jobs by downstream and time: the one table keeps everything
//! for ninety days, the other holds only what is still to be done.
//!
//! Payloads and results come sealed and are opaque here.
//!
//! Engines load rows, lock them and save them; what becomes of a batch is decided by its plan: [`plan_submit`],
//! [`plan_claim`], [`plan_report`], [`plan_callback`] and [`plan_replay`].

mod job;
mod plan_callback;
mod plan_claim;
mod plan_report;
mod plan_submit;

pub use self::job::{AttemptOutcome, JobChange, JobRow, RequestRow, plan_replay, stored_progress};
pub use self::plan_callback::plan_callback;
pub use self::plan_claim::{ClaimPlan, ClaimRow, plan_claim};
pub use self::plan_report::{ReportPlan, plan_report};
pub use self::plan_submit::{IdempotencyEntries, IdempotencyEntry, NewRequest, SubmitPlan, plan_submit};

use std::time::Duration;

use async_trait::async_trait;
use weir_core::quota::QuotaLimits;
use weir_core::request::canary::Percent;
use weir_core::request::canonical::Fingerprint;
use weir_core::request::retry::RetryPolicy;
use weir_core::request::state::{Callback, RequestStatus, TransitionError, WorkerReport};
use weir_core::{IdempotencyKey, RequestId, RequestType, TenantId, Timestamp};

use crate::{Batch, Result};

/// The topic of outgoing webhooks: key and payload of a message are the id of a request that is final.
pub const WEBHOOKS_TOPIC: &str = "request-webhooks";

/// Bytes that only whoever has the key can read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sealed {
    /// The name of the key.
    pub key_id: String,
    /// Nonce and ciphertext.
    pub bytes: Vec<u8>,
}

/// A key that a server seals with, as it has registered it. The key itself is not in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SealingKey {
    /// Its name, which stands beside what it sealed.
    pub name: String,
    /// Tells it from others of the same name, for people.
    pub digest: String,
    /// A known value, sealed: whoever can open it has the key.
    pub check: Sealed,
}

/// What a look at some requests for those sealed with a key has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SealedSearch {
    /// One of them is sealed with it.
    Found(RequestId),
    /// None up to this one; there may be more.
    NoneUpTo(RequestId),
    /// None, and there are no more.
    None,
}

/// One submission.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Submit {
    /// The id it gets if it becomes a request.
    pub id: RequestId,
    /// Who sent it.
    pub tenant: TenantId,
    /// The tenant's name for it.
    pub key: IdempotencyKey,
    /// What kind of work it is.
    pub request_type: RequestType,
    /// What it asks for, to tell it from others under the same key.
    pub fingerprint: Fingerprint,
    /// What it asks for.
    pub payload: Sealed,
    /// Which downstream does it.
    pub downstream: String,
    /// Who is told when it is final.
    pub callback_url: Option<String>,
    /// Whether a broker has to take its job: then it is `PENDING_ENQUEUE` until that has.
    pub needs_broker: bool,
}

/// What became of a [`Submit`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SubmitOutcome {
    /// It is a request now.
    Accepted(SubmitReceipt),
    /// It was sent before; this is how that request stands now.
    Replayed(SubmitReceipt),
    /// Its key was used for something else.
    Conflict,
    /// Its tenant has sent as many new ones as it may; the next window begins after this time.
    Limited {
        /// What the tenant may send.
        limits: QuotaLimits,
        /// How long to wait.
        retry_after: Duration,
    },
}

/// What a submitter is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubmitReceipt {
    /// The request.
    pub id: RequestId,
    /// Where it stands.
    pub status: RequestStatus,
    /// When it was accepted.
    pub accepted_at: Timestamp,
}

/// A request, as its record tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Its name.
    pub id: RequestId,
    /// Whose it is.
    pub tenant: TenantId,
    /// What kind of work it is.
    pub request_type: RequestType,
    /// Where it stands.
    pub status: RequestStatus,
    /// Calls begun.
    pub attempts: u32,
    /// What it asks for.
    pub payload: Sealed,
    /// What the downstream answered, once it is completed.
    pub result: Option<Sealed>,
    /// Why it failed, or why its last attempt did.
    pub failure: Option<Failure>,
    /// Who is told when it is final.
    pub callback_url: Option<String>,
    /// When it was accepted.
    pub accepted_at: Timestamp,
    /// When it last changed.
    pub updated_at: Timestamp,
}

/// Why a request failed.
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
    /// The request.
    pub id: RequestId,
    /// Whose it is.
    pub tenant: TenantId,
    /// What kind of work it is.
    pub request_type: RequestType,
    /// Which downstream does it, as it was when the request was accepted.
    pub downstream: String,
    /// What it asks for.
    pub payload: Sealed,
    /// What its report is known by.
    pub token: u64,
    /// Which attempt this is, from 1 on.
    pub attempt: u32,
    /// When the request was accepted.
    pub accepted_at: Timestamp,
}

/// What a claim brought.
#[derive(Clone, Debug, Default)]
pub struct ClaimedJobs {
    /// To be worked on until the policy's lease ends.
    pub jobs: Vec<Job>,
    /// Those that had no attempt left and are dead letters now.
    pub exhausted: Vec<RequestId>,
    /// With neither: how long until a job will be due, if there is one.
    pub next_due_in: Option<Duration>,
}

/// How many jobs of one downstream a worker has room for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DownstreamCapacity {
    /// The downstream.
    pub downstream: String,
    /// How many.
    pub jobs: usize,
}

/// What came of one job.
#[derive(Clone, Debug)]
pub struct JobReport {
    /// The request.
    pub id: RequestId,
    /// The token of the claim.
    pub token: u64,
    /// What the worker has to say.
    pub report: WorkerReport,
    /// What the downstream answered, where that completes the request.
    pub result: Option<Sealed>,
    /// More than the cause says, for people.
    pub detail: Option<String>,
    /// Spreads the wait before another attempt.
    pub random: u64,
}

/// What a downstream says in its callback.
#[derive(Clone, Debug)]
pub struct CallbackReport {
    /// Done or not.
    pub callback: Callback,
    /// What it answers.
    pub result: Option<Sealed>,
    /// Why not.
    pub failure: Option<Failure>,
}

/// What became of a callback.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallbackOutcome {
    /// The request is final now.
    Applied(RequestStatus),
    /// It could not be taken: the request is final already, or nobody has begun to call.
    TransitionError(TransitionError),
    /// There is no such request.
    Unknown,
}

/// A request whose attempts were all in vain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadRequest {
    /// The request.
    pub request: Request,
    /// Since when it is dead.
    pub died_at: Timestamp,
}

/// A request whose job no broker has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingRequest {
    /// The request.
    pub id: RequestId,
    /// For how long it has waited.
    pub age: Duration,
}

/// The books of request, read in one snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestAudit {
    /// Requests ever accepted.
    pub accepted: u64,
    /// Requests that are completed.
    pub completed: u64,
    /// Requests that the downstream did not want.
    pub failed: u64,
    /// Requests that are dead letters, discarded ones included.
    pub dead: u64,
    /// Requests that are still to be done.
    pub in_flight: u64,
    /// Requests that were purged.
    pub purged: u64,
    /// Jobs: as many as there are requests in flight.
    pub jobs: u64,
}

impl RequestAudit {
    /// What is missing (positive) or too much (negative); 0 when the books balance.
    #[must_use]
    pub fn difference(&self) -> i128 {
        let found = [self.completed, self.failed, self.dead, self.in_flight, self.purged];
        i128::from(self.accepted) - found.into_iter().map(i128::from).sum::<i128>()
    }
}

/// What is switched on, on every server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rollout {
    /// Whether requests are accepted and worked on.
    pub processing_enabled: bool,
    /// Whether stranded ones are given to the broker again.
    pub reconciler_enabled: bool,
    /// How many of a hundred tenants may submit.
    pub canary: Percent,
}

/// What to switch on or off; what is left out stays as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RolloutChange {
    /// Whether requests are accepted and worked on.
    pub processing_enabled: Option<bool>,
    /// Whether stranded ones are given to the broker again.
    pub reconciler_enabled: Option<bool>,
    /// How many of a hundred tenants may submit.
    pub canary: Option<Percent>,
}

/// Payloads in one claim, in bytes: the first job always, no further one once so many are there. They are held in memory,
/// and have to come within the time a claim may take.
pub const CLAIM_BYTES_MAX: usize = 8 << 20;

/// How many of a tenant's requests are looked through for those of one status. No index has the status: every change of a
/// request would be a change of the index.
pub const LIST_SCAN_MAX: usize = 10_000;

/// A part of a list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestPage {
    /// As many as were asked for, or all that were found.
    pub requests: Vec<Request>,
    /// Where to go on, when not all were looked at and fewer were found than asked for.
    pub next_before: Option<RequestId>,
}

/// Where requests live.
#[async_trait]
pub trait RequestStore: Send + Sync + 'static {
    /// Takes submissions, in order, one commit for all. New ones count against the limits of their tenant, if there are
    /// any; replays do not. The batch grows until the engine takes it.
    async fn submit_batch(
        &self,
        batch: Batch<Submit>,
        limits: Option<QuotaLimits>,
    ) -> Result<Vec<SubmitOutcome>>;
    /// A request of whatever tenant.
    async fn find_request(&self, id: RequestId) -> Result<Option<Request>>;
    /// Those of these requests that are there, in any order and of whatever tenants, without payloads and results.
    async fn find_summaries(&self, ids: &[RequestId]) -> Result<Vec<Request>>;
    /// A tenant's requests, the newest first, those older than `before`; of one status if that is given. They come
    /// without payloads and results, which may be large. Those of one status are looked for among [`LIST_SCAN_MAX`].
    async fn list_requests(
        &self,
        tenant: &TenantId,
        status: Option<RequestStatus>,
        before: Option<RequestId>,
        limit: usize,
    ) -> Result<RequestPage>;

    /// Claims jobs that are due, the longest due first, as many of each downstream as there is room for and about as many
    /// as [`CLAIM_BYTES_MAX`] allows.
    async fn claim_jobs(&self, room: &[DownstreamCapacity], policy: &RetryPolicy) -> Result<ClaimedJobs>;
    /// Claims these requests' jobs, if they are due and nobody has them: for workers that a broker tells what to do.
    async fn claim_named(&self, ids: &[RequestId], policy: &RetryPolicy) -> Result<ClaimedJobs>;
    /// The downstreams that jobs wait for.
    async fn job_downstreams(&self) -> Result<Vec<String>>;
    /// Takes workers' reports, one commit for all, and says of each where its request stands now. What a late worker
    /// reports changes nothing. A request that is final and has a callback URL is put on [`WEBHOOKS_TOPIC`] in the same commit.
    async fn report_batch(
        &self,
        batch: Vec<JobReport>,
        policy: &RetryPolicy,
    ) -> Result<Vec<std::result::Result<RequestStatus, TransitionError>>>;
    /// Takes a downstream's callback.
    async fn call_back(&self, id: RequestId, report: CallbackReport) -> Result<CallbackOutcome>;
    /// Returns when there may be something to claim: at once when this process accepted something since the last call,
    /// at the latest after `at_most`.
    async fn wait_for_jobs(&self, at_most: Duration);

    /// Requests that no broker has had for at least `older_than`, the oldest first.
    async fn pending_requests(&self, older_than: Duration, limit: usize) -> Result<Vec<PendingRequest>>;
    /// The broker has these jobs: those that were `PENDING_ENQUEUE` are `ACCEPTED`.
    async fn mark_enqueued(&self, ids: &[RequestId]) -> Result<()>;

    /// Dead letters in order of id, after the one named `after`. A payload that takes more than `payload_max` bytes comes
    /// as none: a part of what was sealed does not open, and a list of all of it might be larger than memory.
    async fn dead_requests(
        &self,
        after: Option<RequestId>,
        limit: usize,
        payload_max: usize,
    ) -> Result<Vec<DeadRequest>>;
    /// Lets a dead letter start again; false when it is none.
    async fn replay_request(&self, id: RequestId) -> Result<bool>;
    /// Lets up to `limit` dead letters start again, and says which.
    async fn replay_requests(&self, limit: usize) -> Result<Vec<RequestId>>;
    /// Takes a dead letter off the list; the request stays failed. False when it is none.
    async fn discard_request(&self, id: RequestId) -> Result<bool>;
    /// How many dead letters there are.
    async fn count_dead_requests(&self) -> Result<u64>;

    /// Deletes up to `limit` requests that are final and were accepted longer than `keep` ago, and up to `limit` keys
    /// that have expired. Says how many rows went.
    async fn purge_requests(&self, keep: Duration, limit: usize) -> Result<u64>;
    /// What was switched on or off while running; `None` when nothing was.
    async fn rollout(&self) -> Result<Option<Rollout>>;
    /// Switches on or off, for every server, and says what holds now. What nobody has switched yet is as in `default`.
    async fn change_rollout(&self, change: RolloutChange, default: Rollout) -> Result<Rollout>;
    /// Reads the books.
    async fn audit_requests(&self) -> Result<RequestAudit>;

    /// The keys that servers have registered, by name and digest, each with when that was.
    async fn sealing_keys(&self) -> Result<Vec<(SealingKey, Timestamp)>>;
    /// Registers a key. One of the same name and digest is registered again, with the present time.
    async fn register_sealing_key(&self, key: &SealingKey) -> Result<()>;
    /// Forgets a key of this name and digest.
    async fn remove_sealing_key(&self, name: &str, digest: &str) -> Result<()>;
    /// Looks through up to `limit` requests, the oldest first, those after the one named `after`, for one whose payload or
    /// result is sealed with the key of this name. No index has the names of keys, so this is for whoever has time.
    async fn find_sealed_with(
        &self,
        name: &str,
        after: Option<RequestId>,
        limit: usize,
    ) -> Result<SealedSearch>;
    /// The request that was accepted last, of whatever tenant.
    async fn newest_request(&self) -> Result<Option<Request>>;
}
