//! Helpers for the cases of request.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use weir_core::quota::QuotaLimits;
use weir_core::request::canary::Percent;
use weir_core::request::canonical::Fingerprint;
use weir_core::request::retry::{FailureCause, RetryBackoff, RetryDecision, RetryPolicy};
use weir_core::request::state::{Callback, RequestStatus, TransitionError, WorkerReport};
use weir_core::{
    Clock, IdempotencyKey, RequestId, RequestType, SpanId, TenantId, Timestamp, TraceContext, TraceId,
    TraceParent,
};
use weir_queue::Settlement;
use weir_store::request::{
    CallbackOutcome, CallbackReport, CancelOutcome, ClaimOrder, ClaimedJobs, DeadRequest, DownstreamCapacity,
    Failure, Job, JobReport, Request, RequestAudit, RequestStore, Rollout, RolloutChange, Sealed, Submit,
    SubmitOutcome, SubmitReceipt, TenantCapacity, WEBHOOKS_TOPIC,
};

use crate::HasRequests;
use crate::fixtures::{EMPTY_ROUNDS, VISIBILITY};

/// The tenant of cases that do not test tenants.
pub const TENANT: &str = "acme";

/// The downstream of cases that do not test downstreams.
pub const DOWNSTREAM: &str = "echo";

/// The callback URL of cases that test webhooks.
pub const URL: &str = "https://example.com/hook?a=1&b=%20";

/// How long an idempotency key is valid.
pub const DAY: Duration = Duration::from_secs(86_400);

/// The suite's policy: 3 attempts, backoff from 1 s to 5 s, leases of 10 s, an hour for the callback.
pub fn policy() -> RetryPolicy {
    let backoff = RetryBackoff::new(Duration::from_secs(1), Duration::from_secs(5));
    RetryPolicy {
        max_attempts: NonZeroU32::new(3).expect("3 is not 0"),
        backoff: backoff.expect("the suite's backoff is valid"),
        lease: Duration::from_secs(10),
        callback_within: Duration::from_secs(3_600),
    }
}

/// [`policy`] with one attempt, so that the first failure is final.
pub fn single_attempt_policy() -> RetryPolicy {
    RetryPolicy { max_attempts: NonZeroU32::MIN, ..policy() }
}

/// The current time of the engine's clock.
pub fn now<H: HasRequests>(h: &H) -> Timestamp {
    h.clock().now()
}

pub fn tenant(text: &str) -> TenantId {
    TenantId::parse(text).expect("the suite's tenants are valid")
}

/// A new id, greater than all before it, also within one millisecond.
pub fn next_id<H: HasRequests>(h: &H) -> RequestId {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let mut random = [0; 10];
    random[2..].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_be_bytes());
    RequestId::new(now(h), random)
}

/// The text as plain bytes in place of an encrypted payload.
pub fn sealed(text: &str) -> Sealed {
    Sealed { key_id: "key-1".to_owned(), bytes: text.as_bytes().to_vec() }
}

/// A fingerprint that depends only on the text.
pub fn fingerprint(text: &str) -> Fingerprint {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    let part = hasher.finish().to_be_bytes();
    let mut whole = [0; 32];
    whole.iter_mut().zip(part.iter().cycle()).for_each(|(byte, part)| *byte = *part);
    Fingerprint::from_bytes(whole)
}

/// A trace that depends only on the id of its request.
pub fn trace(id: RequestId) -> TraceContext {
    let number = id.as_uuid().as_u128();
    let parent = TraceParent::begin(TraceId::from_number(number), SpanId::from_number(7));
    TraceContext { parent, state: number.is_multiple_of(2).then(|| format!("vendor={number}").into()) }
}

/// A submission of a tenant under `key` with `content` as payload and fingerprint.
pub fn submission_for<H: HasRequests>(h: &H, tenant_name: &str, key: &str, content: &str) -> Submit {
    let id = next_id(h);
    Submit {
        id,
        trace: Some(trace(id)),
        tenant: tenant(tenant_name),
        key: IdempotencyKey::parse(key).expect("the suite's keys are valid"),
        request_type: RequestType::parse("payment").expect("the suite's types are valid"),
        fingerprint: fingerprint(content),
        plain: None,
        payload: sealed(content),
        downstream: DOWNSTREAM.to_owned(),
        callback_url: None,
        needs_broker: false,
        limits: None,
    }
}

/// A submission of [`TENANT`] whose content is its key.
pub fn submission<H: HasRequests>(h: &H, key: &str) -> Submit {
    submission_for(h, TENANT, key, key)
}

/// `count` submissions of [`TENANT`], with keys named after `prefix`.
pub fn submissions<H: HasRequests>(h: &H, prefix: &str, count: usize) -> Vec<Submit> {
    (0..count).map(|n| submission(h, &format!("{prefix}-{n}"))).collect()
}

/// The same submission sent again, which the server gives a new id.
pub fn resubmission<H: HasRequests>(h: &H, submit: &Submit) -> Submit {
    Submit { id: next_id(h), ..submit.clone() }
}

/// The batch with these limits of its tenants.
pub fn within(batch: Vec<Submit>, limits: Option<QuotaLimits>) -> Vec<Submit> {
    batch.into_iter().map(|submit| Submit { limits, ..submit }).collect()
}

/// Submits a batch with optional limits.
pub async fn submit_batch<H: HasRequests>(
    h: &H,
    batch: Vec<Submit>,
    limits: impl Into<Option<QuotaLimits>>,
) -> Vec<SubmitOutcome> {
    let (count, limits) = (batch.len(), limits.into());
    let outcomes = h.requests().submit_batch(within(batch, limits).into()).await;
    let outcomes = outcomes.expect("submit_batch must succeed");
    assert_eq!(outcomes.len(), count, "one outcome for each submission");
    outcomes
}

/// Submits one request without limits.
pub async fn submit_one<H: HasRequests>(h: &H, submit: Submit) -> SubmitOutcome {
    submit_batch(h, vec![submit], None).await.remove(0)
}

/// Submits a batch that must be accepted as a whole.
pub async fn accept_batch<H: HasRequests>(h: &H, batch: Vec<Submit>) -> Vec<SubmitReceipt> {
    let outcomes = submit_batch(h, batch, None).await.into_iter();
    outcomes
        .map(|outcome| match outcome {
            SubmitOutcome::Accepted(receipt) => receipt,
            other => panic!("a new submission must be accepted, not {other:?}"),
        })
        .collect()
}

/// Submits a request that must be accepted. Returns its id.
pub async fn accept_one<H: HasRequests>(h: &H, submit: Submit) -> RequestId {
    accept_batch(h, vec![submit]).await.remove(0).id
}

/// Each outcome as a letter: Accepted, Replayed, Conflict, Limited.
pub fn outcome_letters(outcomes: &[SubmitOutcome]) -> String {
    let letter = |outcome: &SubmitOutcome| match outcome {
        SubmitOutcome::Accepted(_) => 'A',
        SubmitOutcome::Replayed(_) => 'R',
        SubmitOutcome::Conflict => 'C',
        SubmitOutcome::Limited { .. } => 'L',
    };
    outcomes.iter().map(letter).collect()
}

/// Loads a request, which must exist.
pub async fn get_request<H: HasRequests>(h: &H, id: RequestId) -> Request {
    h.requests().find_request(id).await.expect("find_request must succeed").expect("the request is there")
}

pub async fn status<H: HasRequests>(h: &H, id: RequestId) -> RequestStatus {
    get_request(h, id).await.status
}

pub fn room(downstream: &str, jobs: usize) -> DownstreamCapacity {
    DownstreamCapacity { downstream: downstream.to_owned(), jobs }
}

/// Claims due jobs of [`DOWNSTREAM`]. Returns the whole result.
pub async fn claim_jobs<H: HasRequests>(h: &H, jobs: usize) -> ClaimedJobs {
    let room = [room(DOWNSTREAM, jobs)];
    let claimed = h
        .requests()
        .claim_jobs(&room, &ClaimOrder::default(), &policy())
        .await
        .expect("claim_jobs must succeed");
    assert!(claimed.jobs.len() + claimed.exhausted.len() <= jobs, "no more jobs than requested");
    claimed
}

/// Claims due jobs of [`DOWNSTREAM`], none of which may be exhausted.
pub async fn claim<H: HasRequests>(h: &H, jobs: usize) -> Vec<Job> {
    let claimed = claim_jobs(h, jobs).await;
    assert!(claimed.exhausted.is_empty(), "no request is exhausted: {:?}", claimed.exhausted);
    claimed.jobs
}

/// Claims the job that is due, which must be the only one.
pub async fn claim_one<H: HasRequests>(h: &H) -> Job {
    let mut jobs = claim(h, 10).await;
    assert_eq!(jobs.len(), 1, "exactly one job is due");
    jobs.remove(0)
}

/// Claims these requests by id. Returns the whole result.
pub async fn claim_named<H: HasRequests>(h: &H, ids: &[RequestId]) -> ClaimedJobs {
    h.requests()
        .claim_named(ids, &TenantCapacity::default(), &policy())
        .await
        .expect("claim_named must succeed")
}

/// Submits a request and claims it.
pub async fn submit_and_claim<H: HasRequests>(h: &H, submit: Submit) -> Job {
    let id = accept_one(h, submit).await;
    let mut claimed = claim_named(h, &[id]).await;
    assert_eq!(claimed.jobs.len(), 1, "accepted requests are claimable");
    claimed.jobs.remove(0)
}

/// Asserts that no job is claimable now.
pub async fn expect_nothing_due<H: HasRequests>(h: &H, why: &str) {
    let claimed = claim_jobs(h, 100).await;
    assert!(
        claimed.jobs.is_empty() && claimed.exhausted.is_empty(),
        "{why}, but this was claimed: {claimed:?}"
    );
}

/// A report of the worker that holds the job.
pub fn job_report(job: &Job, report: WorkerReport) -> JobReport {
    JobReport { id: job.id, token: job.token, report, result: None, detail: None, random: 0 }
}

/// Reports that the downstream completed the job.
pub fn success(job: &Job) -> JobReport {
    JobReport {
        result: Some(sealed("result")),
        ..job_report(job, WorkerReport::Called(RetryDecision::Complete))
    }
}

/// Reports that the downstream rejected the job.
pub fn rejection(job: &Job) -> JobReport {
    job_report(job, WorkerReport::Called(RetryDecision::Fail(FailureCause::Rejected(422))))
}

/// Reports that the downstream failed, without `Retry-After`.
pub fn outage(job: &Job) -> JobReport {
    outage_for(job, None)
}

/// Reports that the downstream failed.
pub fn outage_for(job: &Job, retry_after: Option<Duration>) -> JobReport {
    job_report(
        job,
        WorkerReport::Called(RetryDecision::Retry { cause: FailureCause::ServerError(503), retry_after }),
    )
}

/// Reports that the downstream will call back.
pub fn awaits_callback(job: &Job) -> JobReport {
    job_report(job, WorkerReport::Called(RetryDecision::AwaitCallback))
}

/// Reports that the downstream was not called.
pub fn not_called(job: &Job, after: Duration) -> JobReport {
    job_report(job, WorkerReport::NotCalled { after })
}

pub async fn report_batch<H: HasRequests>(
    h: &H,
    batch: Vec<JobReport>,
) -> Vec<Result<RequestStatus, TransitionError>> {
    let count = batch.len();
    let outcomes = h.requests().report_batch(batch, &policy()).await.expect("report_batch must succeed");
    assert_eq!(outcomes.len(), count, "one outcome for each report");
    outcomes
}

pub async fn report_one<H: HasRequests>(h: &H, report: JobReport) -> Result<RequestStatus, TransitionError> {
    report_batch(h, vec![report]).await.remove(0)
}

pub fn callback_report(callback: Callback) -> CallbackReport {
    match callback {
        Callback::Completed => {
            CallbackReport { callback, result: Some(sealed("called back")), failure: None }
        }
        Callback::Failed => {
            let failure = Failure { code: "NO_FUNDS".to_owned(), message: "the account is empty".to_owned() };
            CallbackReport { callback, result: None, failure: Some(failure) }
        }
    }
}

pub async fn call_back<H: HasRequests>(h: &H, id: RequestId, report: CallbackReport) -> CallbackOutcome {
    h.requests().call_back(id, report).await.expect("call_back must succeed")
}

pub async fn cancel<H: HasRequests>(h: &H, id: RequestId) -> CancelOutcome {
    h.requests().cancel_request(id).await.expect("cancel_request must succeed")
}

/// Submits requests and lets their only attempt fail. Returns their jobs as last claimed.
pub async fn create_dead_requests<H: HasRequests>(h: &H, batch: Vec<Submit>) -> Vec<Job> {
    let ids: Vec<RequestId> = accept_batch(h, batch).await.iter().map(|receipt| receipt.id).collect();
    let jobs = claim_named(h, &ids).await.jobs;
    assert_eq!(jobs.len(), ids.len(), "accepted requests are claimable");
    let reports = jobs.iter().map(outage).collect();
    let outcomes = h
        .requests()
        .report_batch(reports, &single_attempt_policy())
        .await
        .expect("report_batch must succeed");
    assert!(
        outcomes.iter().all(|outcome| *outcome == Ok(RequestStatus::FailedRetryExhausted)),
        "{outcomes:?}"
    );
    jobs
}

pub async fn dead_requests<H: HasRequests>(
    h: &H,
    after: Option<RequestId>,
    limit: usize,
) -> Vec<DeadRequest> {
    h.requests().dead_requests(after, limit, usize::MAX).await.expect("dead_requests must succeed")
}

/// Restarts up to `limit` dead letters, the first by id. Returns the ids of those that were.
pub async fn replay_some(store: &dyn RequestStore, limit: usize) -> Vec<RequestId> {
    let letters = store.dead_requests(None, limit, 0).await.expect("dead_requests must succeed");
    let ids: Vec<RequestId> = letters.iter().map(|letter| letter.request.id).collect();
    store.replay_requests(&ids).await.expect("replay_requests must succeed")
}

/// Restarts one dead letter. Returns whether it was one.
pub async fn replay_one(store: &dyn RequestStore, id: RequestId) -> bool {
    !store.replay_requests(&[id]).await.expect("replay_requests must succeed").is_empty()
}

/// Erases all that a tenant has submitted until now, a few requests at a time. Returns the ids of the requests.
pub async fn erase<H: HasRequests>(h: &H, tenant: &TenantId) -> Vec<RequestId> {
    h.requests().begin_erasure(tenant, 1_000).await.expect("begin_erasure must succeed");
    let mut erased = Vec::new();
    while let Some(batch) = h.requests().erase_some(3, 0).await.expect("erase_some must succeed") {
        assert_eq!(batch.tenant, *tenant);
        assert!(batch.requests.len() <= 3, "no more than the limit");
        erased.extend(batch.requests);
    }
    erased
}

/// The ids of all dead letters.
pub async fn dead_ids<H: HasRequests>(h: &H) -> Vec<RequestId> {
    dead_requests(h, None, usize::MAX).await.iter().map(|letter| letter.request.id).collect()
}

/// Audits the requests: the books must balance, and every request in flight must have one job.
pub async fn request_audit<H: HasRequests>(h: &H) -> RequestAudit {
    let books = h.requests().audit_requests().await.expect("audit_requests must succeed");
    assert_eq!(books.difference(), 0, "the books must balance: {books:?}");
    assert_eq!(books.jobs, books.in_flight, "every request in flight has one job: {books:?}");
    crate::books::expect_counts(h).await;
    books
}

/// Drains the topic [`WEBHOOKS_TOPIC`]. Returns the ids of the requests, sorted.
pub async fn webhooks<H: HasRequests>(h: &H) -> Vec<RequestId> {
    let (queue, mut ids, mut empty) = (h.queue(), Vec::new(), 0);
    while empty < EMPTY_ROUNDS {
        let claim = queue.claim(WEBHOOKS_TOPIC, 100, VISIBILITY).await.expect("claim must succeed");
        if claim.messages.is_empty() {
            empty += 1;
            continue;
        }
        for message in &claim.messages {
            assert_eq!(message.payload, message.key.as_bytes(), "key and payload are the id");
            ids.push(RequestId::parse(&message.key).expect("the key is an id"));
        }
        let positions = claim.messages.iter().map(|message| message.position).collect();
        let settlement = Settlement { done: positions, ..Settlement::default() };
        assert!(queue.settle(&claim.receipt, settlement).await.expect("settle must succeed"));
    }
    ids.sort_unstable();
    ids
}

/// The rollout before any change.
pub const DEFAULT_ROLLOUT: Rollout = Rollout {
    processing_enabled: true,
    accepting_enabled: true,
    reconciler_enabled: true,
    canary: Percent::ALL,
};

/// A change that sets every switch.
pub fn rollout_change(rollout: Rollout) -> RolloutChange {
    RolloutChange {
        processing_enabled: Some(rollout.processing_enabled),
        accepting_enabled: Some(rollout.accepting_enabled),
        reconciler_enabled: Some(rollout.reconciler_enabled),
        canary: Some(rollout.canary),
    }
}

/// Applies a change. Returns the new rollout.
pub async fn change_rollout<H: HasRequests>(h: &H, change: RolloutChange) -> Rollout {
    h.requests().change_rollout(change, DEFAULT_ROLLOUT).await.expect("change_rollout must succeed")
}
