//! Request: submissions go through lanes, the rest straight to the store. What callers entrust to it is sealed here,
//! before it goes to the store, and opened here, for those who may see it.

pub(crate) mod dead;
pub(crate) mod hub;
pub(crate) mod key_check;
pub(crate) mod rollout;
#[cfg(test)]
mod watch_tests;

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use weir_core::request::canonical::Fingerprint;
use weir_core::request::state::{Callback, RequestStatus};
use weir_core::{Clock, IdempotencyKey, RequestId, RequestType, TenantId, Timestamp};
use weir_store::request::{
    CallbackOutcome, CallbackReport, Failure, Request, RequestPage, RequestStore, Sealed, Submit,
    SubmitOutcome,
};
use weir_store::{Error, Lanes, Result};

use self::hub::{StatusHub, Subscription};
use self::rollout::Switches;
use super::encryption::{Keyring, OpenError, SealedField};
use super::settings::RequestSettings;
use crate::engines::{Engines, within};
use crate::request::metrics::AcceptMetrics;
use crate::settings::Settings;
use crate::telemetry::metrics::Metrics;

/// How often whoever waits for a change asks a store that other servers change too: nobody else tells of what they do.
const POLL: Duration = Duration::from_millis(250);
/// How many of those who wait ask at the same time.
const POLLS_AT_ONCE: usize = 16;
/// Payloads of submissions under way, in kibibytes; each counts as one at least. Lanes bound their number alone.
const UNDER_WAY_KIB: usize = 64 << 10;

/// Request.
pub struct RequestService {
    store: Arc<dyn RequestStore>,
    lanes: Lanes<Submit, SubmitOutcome>,
    keys: Arc<Keyring>,
    clock: Arc<dyn Clock>,
    hub: Arc<StatusHub>,
    switches: Arc<Switches>,
    polls: Semaphore,
    under_way: Semaphore,
    metrics: AcceptMetrics,
    settings: RequestSettings,
    needs_broker: bool,
    /// Whether other processes may change requests.
    is_shared: bool,
    timeout: Duration,
    dead_counted: tokio::sync::Mutex<Option<Instant>>,
}

/// One submission, checked.
#[derive(Clone, Debug)]
pub struct Submission {
    /// Who sent it.
    pub tenant: TenantId,
    /// The tenant's name for it.
    pub key: IdempotencyKey,
    /// What kind of work it is.
    pub request_type: RequestType,
    /// What it asks for, as it was sent.
    pub payload: Bytes,
    /// What it asks for, to tell it from others under the same key.
    pub fingerprint: Fingerprint,
    /// Who is told when it is final.
    pub callback_url: Option<String>,
}

/// Why a submission was not looked at.
#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    /// An operator has switched processing off.
    #[error("processing is switched off")]
    SwitchedOff,
    /// The rollout has not reached the tenant.
    #[error("the rollout has not reached the tenant")]
    NotReached,
    /// Something broke.
    #[error(transparent)]
    Broken(#[from] Error),
}

/// What a downstream says in its callback.
#[derive(Clone, Debug)]
pub struct CalledBack {
    /// Done or not.
    pub callback: Callback,
    /// What it answers.
    pub result: Option<Bytes>,
    /// Why not.
    pub failure: Option<Failure>,
}

impl RequestService {
    /// Starts the lanes. Submissions under one key are always in one lane.
    #[must_use]
    pub fn start(engines: &Engines, settings: &Settings, keys: Arc<Keyring>, metrics: &Metrics) -> Self {
        let (store, timeout) = (engines.requests(), settings.http.timeout);
        let lanes = engines.start_lanes("request", metrics.lane("request"), {
            let (store, limits) = (Arc::clone(&store), settings.request.tenant_limit);
            let broker = engines.request_broker();
            move |batch| {
                let (store, broker) = (Arc::clone(&store), broker.clone());
                async move {
                    let mut outcomes = store.submit_batch(batch, limits).await?;
                    if let Some(broker) = broker {
                        broker.publish_accepted(&mut outcomes).await;
                    }
                    Ok(outcomes)
                }
            }
        });
        let switches = Arc::new(Switches::new(Arc::clone(&store), settings.request.rollout, timeout));
        tokio::spawn({
            // So that the first submission finds them read.
            let switches = Arc::clone(&switches);
            async move { switches.get().await }
        });
        Self {
            store,
            lanes,
            keys,
            clock: Arc::clone(&engines.store.wall_clock),
            hub: Arc::default(),
            switches,
            polls: Semaphore::new(POLLS_AT_ONCE),
            under_way: Semaphore::new(UNDER_WAY_KIB),
            metrics: metrics.request.accept.clone(),
            settings: settings.request.clone(),
            needs_broker: engines.kafka.is_some(),
            is_shared: engines.store.is_shared,
            timeout,
            dead_counted: tokio::sync::Mutex::default(),
        }
    }

    /// Where changes are told and heard.
    #[must_use]
    pub const fn hub(&self) -> &Arc<StatusHub> {
        &self.hub
    }

    /// What is switched on.
    #[must_use]
    pub const fn switches(&self) -> &Arc<Switches> {
        &self.switches
    }

    /// The present, as far as signatures and ids need it.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Decides one submission.
    /// Fails when the rollout leaves its tenant out, the lane is full, or the store does not answer.
    pub async fn submit(&self, submission: Submission) -> Result<SubmitOutcome, SubmitError> {
        let started = Instant::now();
        let outcome = self.try_submit(submission).await;
        let word = match &outcome {
            Ok(SubmitOutcome::Accepted(_)) => "accepted",
            Ok(SubmitOutcome::Replayed(_)) => "replayed",
            Ok(SubmitOutcome::Conflict) => "conflict",
            Ok(SubmitOutcome::Limited { .. }) => "limited",
            Err(SubmitError::SwitchedOff | SubmitError::NotReached) => "switched_off",
            Err(SubmitError::Broken(_)) => "failed",
        };
        self.metrics.record(word, started.elapsed());
        outcome
    }

    async fn try_submit(&self, submission: Submission) -> Result<SubmitOutcome, SubmitError> {
        let rollout = self.switches.get().await?;
        if !rollout.processing_enabled {
            return Err(SubmitError::SwitchedOff);
        }
        if !rollout.canary.reaches(&submission.tenant) {
            return Err(SubmitError::NotReached);
        }
        let kib = u32::try_from(submission.payload.len().div_ceil(1 << 10)).unwrap_or(u32::MAX).max(1);
        let held = self.under_way.try_acquire_many(kib);
        let _held = held.map_err(|_full| Error::Overloaded { lane: "request payloads" })?;
        let lane = format!("{}\0{}", submission.tenant, submission.key);
        // The lane itself answers in time.
        Ok(self.lanes.submit(&lane, self.prepare(submission)?).await?)
    }

    fn prepare(&self, submission: Submission) -> Result<Submit> {
        let Submission { tenant, key, request_type, payload, fingerprint, callback_url } = submission;
        let id = RequestId::new(self.clock.now(), rand::random());
        let payload = self.seal(id, SealedField::Payload, &payload)?;
        let downstream = self.settings.downstream_name(&request_type).to_owned();
        let needs_broker = self.needs_broker;
        Ok(Submit {
            id,
            tenant,
            key,
            request_type,
            fingerprint,
            payload,
            downstream,
            callback_url,
            needs_broker,
        })
    }

    /// A tenant's request.
    pub async fn find(&self, tenant: &TenantId, id: RequestId) -> Result<Option<Request>> {
        let request = within(self.timeout, self.store.find_request(id)).await?;
        Ok(request.filter(|request| request.tenant == *tenant))
    }

    /// A tenant's requests, the newest first.
    pub async fn list(
        &self,
        tenant: &TenantId,
        status: Option<RequestStatus>,
        before: Option<RequestId>,
        limit: usize,
    ) -> Result<RequestPage> {
        within(self.timeout, self.store.list_requests(tenant, status, before, limit)).await
    }

    /// What the downstream answered.
    /// Fails when it does not open: its key was taken away, or somebody changed the row.
    pub fn result(&self, request: &Request) -> Result<Option<Vec<u8>>, OpenError> {
        let open = |sealed| self.keys.open(request.id, SealedField::Result, sealed);
        request.result.as_ref().map(open).transpose()
    }

    /// The request once its status is another than `seen`. None when it is the same until then, or the server stops.
    pub async fn next_change(
        &self,
        waiting: &mut Subscription,
        seen: RequestStatus,
        until: tokio::time::Instant,
        closing: &CancellationToken,
    ) -> Result<Option<Request>> {
        loop {
            tokio::select! {
                // Whatever is told is looked up: two changes may be told in another order than they were made in.
                _told = waiting.changed() => {}
                () = tokio::time::sleep(POLL), if self.is_shared => {}
                () = tokio::time::sleep_until(until) => return self.changed_by_now(waiting.id(), seen).await,
                () = closing.cancelled() => return Ok(None),
            }
            // Never closed.
            let _turn = self.polls.acquire().await;
            match within(self.timeout, self.store.find_request(waiting.id())).await {
                Ok(Some(request)) if request.status == seen => {}
                Ok(changed) => return Ok(changed),
                Err(error) => {
                    // What was told is still to be looked up by whoever goes on waiting.
                    waiting.tell_again();
                    return Err(error);
                }
            }
        }
    }

    /// The last look of one who has waited in vain. What nobody was told of is seen here at the latest.
    async fn changed_by_now(&self, id: RequestId, seen: RequestStatus) -> Result<Option<Request>> {
        let request = within(self.timeout, self.store.find_request(id)).await?;
        Ok(request.filter(|request| request.status != seen))
    }

    /// Takes a downstream's callback.
    pub async fn call_back(&self, id: RequestId, said: CalledBack) -> Result<CallbackOutcome> {
        let CalledBack { callback, result, failure } = said;
        let result = result.map(|result| self.seal(id, SealedField::Result, &result)).transpose()?;
        let report = CallbackReport { callback, result, failure };
        let (store, hub) = (Arc::clone(&self.store), Arc::clone(&self.hub));
        let call_back = async move {
            let outcome = store.call_back(id, report).await?;
            if let CallbackOutcome::Applied(status) = outcome {
                hub.changed(id, status);
            }
            Ok(outcome)
        };
        self.change(call_back).await
    }

    /// Changes a request within the time that a call may take. When it takes longer it goes on, so that those who wait for the
    /// request are told in any case.
    async fn change<T: Send + 'static>(
        &self,
        change: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        let change = tokio::spawn(change);
        let change = async { change.await.unwrap_or_else(|panic| Err(Error::failed("request", panic))) };
        within(self.timeout, change).await
    }

    /// Takes no new submissions and waits for those under way.
    pub async fn drain(&self) {
        self.lanes.drain().await;
    }

    fn seal(&self, id: RequestId, part: SealedField, plain: &[u8]) -> Result<Sealed> {
        self.keys.seal(id, part, plain).map_err(|error| Error::failed("seal", error))
    }
}
