//! The service of request: submissions go through lanes, everything else directly to the store. Payloads and results are
//! encrypted here before they are stored, and decrypted for callers who may see them.

mod cached;
pub(crate) mod dead_letters;
pub(crate) mod hub;
pub(crate) mod key_check;
pub(crate) mod operators;
pub(crate) mod rollout;
pub(crate) mod tenants;
#[cfg(test)]
mod watch_tests;

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use weir_core::request::canonical::Fingerprint;
use weir_core::request::state::{Callback, RequestStatus};
use weir_core::{Clock, IdempotencyKey, RequestId, RequestType, TenantId, Timestamp, TraceContext};
use weir_store::request::{
    CallbackOutcome, CallbackReport, CancelOutcome, Failure, PlainKeysRefused, Request, RequestFilter,
    RequestPage, RequestStore, Sealed, Submit, SubmitOutcome,
};
use weir_store::{Error, Lanes, Result};

use self::hub::{StatusHub, StatusSubscription};
use self::rollout::RolloutSwitches;
use self::tenants::TenantLimits;
use super::encryption::{Keyring, OpenError, SealedField};
use super::events::{RequestCalledBack, RequestCancelled, StatusRead, SubmissionDecided, TextUnreadable};
use super::settings::RequestSettings;
use super::stored_form::{StoredForm, StoredKey};
use crate::engines::{Engines, within};
use crate::request::metrics::AcceptMetrics;
use crate::settings::Settings;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::request_context::inherit;

/// How often a waiting call polls a store that other servers change, too: their changes are not published here.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// How many waiting calls read the store at the same time.
const CONCURRENT_POLLS: usize = 16;
/// The budget for payloads of concurrent submissions, in KiB; each uses at least 1. Lanes bound only their number.
const PAYLOAD_BUDGET_KIB: usize = 64 << 10;

pub struct RequestService {
    store: Arc<dyn RequestStore>,
    lanes: Lanes<Submit, SubmitOutcome>,
    keys: Arc<Keyring>,
    form: Arc<StoredForm>,
    clock: Arc<dyn Clock>,
    hub: Arc<StatusHub>,
    rollout: Arc<RolloutSwitches>,
    tenant_limits: TenantLimits,
    polls: Semaphore,
    payload_budget: Semaphore,
    metrics: AcceptMetrics,
    settings: RequestSettings,
    needs_broker: bool,
    /// Whether other processes change requests in the same store.
    is_shared: bool,
    timeout: Duration,
}

/// Shown instead of a text that cannot be decrypted.
const UNREADABLE_TEXT: &str = "(cannot be decrypted)";

/// How often a submission is repeated because its batch had keys that were not hashed. The next batch may have some, too, that were
/// prepared before this server knew.
const PLAIN_REFUSALS_MAX: u32 = 5;

fn is_plain_key_refused(error: &Error) -> bool {
    error.cause().is_some_and(|cause| cause.is::<PlainKeysRefused>())
}

/// A valid submission.
#[derive(Clone, Debug)]
pub struct Submission {
    pub tenant: TenantId,
    pub key: IdempotencyKey,
    pub request_type: RequestType,
    /// The JSON as it was sent.
    pub payload: Bytes,
    /// Tells apart submissions under the same key.
    pub fingerprint: Fingerprint,
    /// Receives a webhook when the request is final.
    pub callback_url: Option<String>,
    /// The trace of the call that submits it.
    pub trace: Option<TraceContext>,
}

/// Why a submission was not decided.
#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    #[error("an operator has switched request off")]
    Disabled,
    #[error("an operator lets no new requests in")]
    NotAccepting,
    #[error("the rollout has not reached the tenant")]
    NotInRollout,
    #[error(transparent)]
    Store(#[from] Error),
}

/// A valid callback of a downstream.
#[derive(Clone, Debug)]
pub struct DownstreamCallback {
    pub callback: Callback,
    /// Only of completed requests.
    pub result: Option<Bytes>,
    /// Only of failed requests.
    pub failure: Option<Failure>,
}

impl RequestService {
    /// Starts the lanes. Submissions under one key are always in one lane.
    #[must_use]
    pub fn start(engines: &Engines, settings: &Settings, keys: Arc<Keyring>, metrics: &Metrics) -> Self {
        let (store, timeout) = (engines.requests(), settings.http.timeout);
        let lanes = engines.start_lanes("request", metrics.lane("request"), {
            let store = Arc::clone(&store);
            let broker = engines.request_broker();
            move |batch| {
                let (store, broker) = (Arc::clone(&store), broker.clone());
                async move {
                    let mut outcomes = store.submit_batch(batch).await?;
                    if let Some(broker) = broker {
                        broker.publish_accepted(&mut outcomes).await;
                    }
                    Ok(outcomes)
                }
            }
        });
        let rollout = Arc::new(RolloutSwitches::new(Arc::clone(&store), settings.request.rollout, timeout));
        tokio::spawn({
            // Loads the cache for the first submission.
            let rollout = Arc::clone(&rollout);
            async move { rollout.get().await }
        });
        let tenant_limits = TenantLimits::new(Arc::clone(&store), settings.request.tenant_limit, timeout);
        let formats = settings.store.formats;
        let form = Arc::new(StoredForm::new(Arc::clone(&store), Arc::clone(&keys), formats, timeout));
        Self {
            store,
            lanes,
            keys,
            form,
            clock: Arc::clone(&engines.store.wall_clock),
            hub: Arc::default(),
            rollout,
            tenant_limits,
            polls: Semaphore::new(CONCURRENT_POLLS),
            payload_budget: Semaphore::new(PAYLOAD_BUDGET_KIB),
            metrics: metrics.request.accept.clone(),
            settings: settings.request.clone(),
            needs_broker: engines.kafka.is_some(),
            is_shared: engines.store.is_shared,
            timeout,
        }
    }

    /// Publishes changes of requests in this process.
    #[must_use]
    pub const fn hub(&self) -> &Arc<StatusHub> {
        &self.hub
    }

    #[must_use]
    pub const fn rollout(&self) -> &Arc<RolloutSwitches> {
        &self.rollout
    }

    /// The form in which the store has keys and texts.
    #[must_use]
    pub(crate) const fn form(&self) -> &Arc<StoredForm> {
        &self.form
    }

    /// The time for signatures and ids.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Decides one submission.
    /// Fails when the rollout leaves its tenant out, the lane is full, or the store does not answer.
    pub async fn submit(&self, submission: Submission) -> Result<SubmitOutcome, SubmitError> {
        let started = Instant::now();
        let outcome = self.try_submit(&submission).await;
        let (Submission { tenant, key, .. }, latency) = (&submission, started.elapsed());
        SubmissionDecided { tenant, key, outcome: &outcome, latency }.emit(&self.metrics);
        outcome
    }

    async fn try_submit(&self, submission: &Submission) -> Result<SubmitOutcome, SubmitError> {
        let rollout = self.rollout.get().await?;
        if !rollout.processing_enabled {
            return Err(SubmitError::Disabled);
        }
        if !rollout.accepting_enabled {
            return Err(SubmitError::NotAccepting);
        }
        if !rollout.canary.includes(&submission.tenant) {
            return Err(SubmitError::NotInRollout);
        }
        let kib = u32::try_from(submission.payload.len().div_ceil(1 << 10)).unwrap_or(u32::MAX).max(1);
        let budget = self.payload_budget.try_acquire_many(kib);
        let _budget = budget.map_err(|_used_up| Error::Overloaded { lane: "request payloads" })?;
        let lane = format!("{}\0{}", submission.tenant, submission.key);
        let mut refusals = 0;
        loop {
            // No timeout here: the lane has one.
            let outcome = self.lanes.submit(&lane, self.prepare(submission.clone()).await?).await;
            if !outcome.as_ref().is_err_and(is_plain_key_refused) || refusals == PLAIN_REFUSALS_MAX {
                return Ok(outcome?);
            }
            // Nothing was done with the batch: another server has begun to store hashed keys a moment ago.
            self.form.forget();
            refusals += 1;
        }
    }

    async fn prepare(&self, submission: Submission) -> Result<Submit> {
        let Submission { tenant, key, request_type, payload, fingerprint, callback_url, trace } = submission;
        let id = RequestId::new(self.clock.now(), rand::random());
        let payload = self.seal(id, SealedField::Payload, &payload)?;
        let callback_url = match callback_url {
            Some(url) => Some(self.form.of_text(id, SealedField::CallbackUrl, url).await?),
            None => None,
        };
        let StoredKey { key, fingerprint, plain } = self.form.of_key(&tenant, key, fingerprint).await?;
        let downstream = self.settings.downstream_name(&request_type).to_owned();
        let limits = self.tenant_limits.of(&tenant).await?.limits;
        let needs_broker = self.needs_broker;
        Ok(Submit {
            id,
            tenant,
            key,
            request_type,
            fingerprint,
            plain,
            payload,
            downstream,
            callback_url,
            trace,
            needs_broker,
            limits,
        })
    }

    /// Finds a request of a tenant.
    pub async fn find(&self, tenant: &TenantId, id: RequestId) -> Result<Option<Request>> {
        let request = within(self.timeout, self.store.find_request(id)).await?;
        Ok(request.filter(|request| request.tenant == *tenant))
    }

    /// As [`RequestService::find`], for a caller that asks for the present status: measured against the objective.
    pub async fn find_now(&self, tenant: &TenantId, id: RequestId) -> Result<Option<Request>> {
        let started = Instant::now();
        let found = self.find(tenant, id).await;
        StatusRead { latency: started.elapsed() }.emit(&self.metrics);
        found
    }

    /// Lists requests that match, the newest first.
    pub async fn list(
        &self,
        filter: &RequestFilter,
        before: Option<RequestId>,
        limit: usize,
    ) -> Result<RequestPage> {
        within(self.timeout, self.store.list_requests(filter, before, limit)).await
    }

    /// Decrypts the result of a request.
    /// Fails when the key is missing or the row was changed.
    pub fn result(&self, request: &Request) -> Result<Option<Vec<u8>>, OpenError> {
        let open = |sealed| self.keys.open(request.id, SealedField::Result, sealed);
        request.result.as_ref().map(open).transpose()
    }

    /// Decrypts the failure message and the callback URL of a request, for those who may see them. One that cannot be decrypted
    /// does not hide the rest of the request.
    #[must_use]
    pub fn open_texts(&self, mut request: Request) -> Request {
        let open = |field, text: &str| {
            self.keys.open_text(request.id, field, text).unwrap_or_else(|error| {
                TextUnreadable { id: request.id, field, error: &error }.emit();
                UNREADABLE_TEXT.to_owned()
            })
        };
        let message =
            request.failure.as_ref().map(|failure| open(SealedField::FailureMessage, &failure.message));
        request.callback_url = request.callback_url.as_deref().map(|url| open(SealedField::CallbackUrl, url));
        if let (Some(failure), Some(message)) = (&mut request.failure, message) {
            failure.message = message;
        }
        request
    }

    /// Returns the request once its status differs from `last_status`, or `None` at the deadline or when the server stops.
    pub async fn next_change(
        &self,
        subscription: &mut StatusSubscription,
        last_status: RequestStatus,
        deadline: tokio::time::Instant,
        closing: &CancellationToken,
    ) -> Result<Option<Request>> {
        loop {
            tokio::select! {
                // The published status is not used: two changes may be published in the wrong order.
                _status = subscription.next_status() => {}
                () = tokio::time::sleep(POLL_INTERVAL), if self.is_shared => {}
                () = tokio::time::sleep_until(deadline) => {
                    return self.find_if_changed(subscription.id(), last_status).await;
                }
                () = closing.cancelled() => return Ok(None),
            }
            // The semaphore is never closed.
            let _permit = self.polls.acquire().await;
            match within(self.timeout, self.store.find_request(subscription.id())).await {
                Ok(Some(request)) if request.status == last_status => {}
                Ok(changed) => return Ok(changed),
                Err(error) => {
                    // The next call must read the store again for the same change.
                    subscription.mark_unread();
                    return Err(error);
                }
            }
        }
    }

    /// Reads the store once more at the deadline, for a change that was not published here.
    async fn find_if_changed(&self, id: RequestId, last_status: RequestStatus) -> Result<Option<Request>> {
        let request = within(self.timeout, self.store.find_request(id)).await?;
        Ok(request.filter(|request| request.status != last_status))
    }

    /// Ends a request with a downstream's callback.
    pub async fn call_back(&self, id: RequestId, callback: DownstreamCallback) -> Result<CallbackOutcome> {
        let DownstreamCallback { callback, result, failure } = callback;
        let result = result.map(|result| self.seal(id, SealedField::Result, &result)).transpose()?;
        let failure = match failure {
            Some(Failure { code, message }) => {
                let message = self.form.of_text(id, SealedField::FailureMessage, message).await?;
                Some(Failure { code, message })
            }
            None => None,
        };
        let report = CallbackReport { callback, result, failure };
        let (store, hub) = (Arc::clone(&self.store), Arc::clone(&self.hub));
        let finished = self.metrics.finished.clone();
        let call_back = async move {
            // The record is read meanwhile, for the log line alone.
            let ids = [id];
            let (outcome, found) = tokio::join!(store.call_back(id, report), store.find_summaries(&ids));
            let outcome = outcome?;
            if let CallbackOutcome::Applied(status) = outcome {
                RequestCalledBack { id, status, request: found.unwrap_or_default().first() }.emit(&finished);
                hub.publish(id, status);
            }
            Ok(outcome)
        };
        self.change(call_back).await
    }

    /// Cancels a request of a tenant. Whoever is calling its downstream goes on, and what comes of it is thrown away.
    pub async fn cancel(&self, tenant: &TenantId, id: RequestId) -> Result<CancelOutcome> {
        let Some(request) = self.find(tenant, id).await? else { return Ok(CancelOutcome::Unknown) };
        let (store, hub) = (Arc::clone(&self.store), Arc::clone(&self.hub));
        let finished = self.metrics.finished.clone();
        let cancel = async move {
            let outcome = store.cancel_request(id).await?;
            if outcome == CancelOutcome::Cancelled {
                RequestCancelled { request: &request }.emit(&finished);
                hub.publish(id, RequestStatus::Cancelled);
            }
            Ok(outcome)
        };
        self.change(cancel).await
    }

    /// Runs a change within the timeout of a call. A change that takes longer is not cancelled, so that its publication to
    /// waiting callers is not lost.
    async fn change<T: Send + 'static>(
        &self,
        change: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        let change = tokio::spawn(inherit(change));
        let change = async { change.await.unwrap_or_else(|panic| Err(Error::failed("request", panic))) };
        within(self.timeout, change).await
    }

    /// Refuses new submissions and waits for those in the lanes.
    pub async fn drain(&self) {
        self.lanes.drain().await;
    }

    fn seal(&self, id: RequestId, field: SealedField, plain: &[u8]) -> Result<Sealed> {
        self.keys.seal(id, field, plain).map_err(|error| Error::failed("seal", error))
    }
}
