//! Quota: sends go through lanes, all other calls straight to the store. Users known to be over their limit are refused by
//! the denial cache, without either.

use std::sync::Arc;
use std::time::Duration;

use weir_core::quota::{Quota, QuotaLimits};
use weir_core::{IdempotencyKey, UserId};
use weir_store::denial_cache::DenialCache;
use weir_store::limit_changes::LimitChange;
use weir_store::quota::{QuotaStore, SendMessage, SendOutcome};
use weir_store::{Error, Lanes, Result};

use super::events::{SendDecided, SendDeniedFromCache};
use super::metrics::QuotaMetrics;
use super::send_keys::{HashKeySource, send_key};
use crate::engines::{Engines, within};
use crate::settings::Settings;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::near_limits::{LimitDecision, NearLimits};

pub struct QuotaService {
    store: Arc<dyn QuotaStore>,
    lanes: Lanes<SendMessage, SendOutcome>,
    denials: Arc<DenialCache>,
    hash_key: HashKeySource,
    timeout: Duration,
    metrics: QuotaMetrics,
    near_limits: Arc<NearLimits>,
}

impl QuotaService {
    /// Starts the lanes.
    #[must_use]
    pub(crate) fn start(
        engines: &Engines,
        settings: &Settings,
        hash_key: HashKeySource,
        metrics: &Metrics,
    ) -> Self {
        let store = Arc::clone(&engines.store.quota);
        let lanes = engines.start_lanes("quota", metrics.lane("quota"), {
            let store = Arc::clone(&store);
            move |batch| {
                let store = Arc::clone(&store);
                async move { store.send_batch(batch).await }
            }
        });
        let denials = DenialCache::new(
            Arc::clone(&engines.store.limit_changes),
            Arc::clone(&engines.store.steady_clock),
        );
        let (near_limits, metrics) = (Arc::clone(&metrics.near_limits), metrics.quota.clone());
        Self { store, lanes, denials, hash_key, timeout: settings.http.timeout, metrics, near_limits }
    }

    pub(crate) fn denials(&self) -> Arc<DenialCache> {
        Arc::clone(&self.denials)
    }

    /// Creates or replaces a user's limits. The count starts again, unless it is to be kept.
    pub async fn configure(&self, user: &UserId, limits: QuotaLimits, keeps_count: bool) -> Result<Quota> {
        let configure = async {
            if keeps_count {
                self.store.change_limits(user, limits).await
            } else {
                self.store.configure(user, limits).await
            }
        };
        let configured = within(self.timeout, configure).await;
        // Also after an error, which may hide a commit.
        self.denials.invalidate(&LimitChange::User(user.clone()));
        configured
    }

    /// Returns a user's quota in the present window.
    pub async fn find(&self, user: &UserId) -> Result<Option<Quota>> {
        within(self.timeout, self.store.find(user)).await.map_err(Error::before_commit)
    }

    /// Returns users after `after`, in the order of their ids, each with the quota in the present window.
    pub async fn list(&self, after: Option<&UserId>, limit: usize) -> Result<Vec<(UserId, Quota)>> {
        within(self.timeout, self.store.list(after, limit)).await.map_err(Error::before_commit)
    }

    /// Removes a user's limits. Returns false if the user had none.
    pub async fn remove(&self, user: &UserId) -> Result<bool> {
        let removed = within(self.timeout, self.store.remove(user)).await;
        self.denials.invalidate(&LimitChange::User(user.clone()));
        removed
    }

    /// Decides one send. Fails when the lane is full or the store does not answer in time.
    pub async fn send(&self, send: SendMessage) -> Result<SendOutcome> {
        if let Some(denied) = self.denials.get(&send.user) {
            SendDeniedFromCache.emit(&self.metrics);
            self.remember(&send.user, &denied);
            return Ok(denied);
        }
        let (user, query) = (send.user.clone(), self.denials.begin_query());
        // The lane enforces the timeout.
        let outcome = self.lanes.submit(user.as_str(), send).await;
        if let Ok(denied @ SendOutcome::Denied { .. }) = &outcome {
            self.denials.record(query, &user, denied);
        }
        self.record(&user, &outcome);
        outcome
    }

    fn record(&self, user: &UserId, outcome: &Result<SendOutcome>) {
        SendDecided { outcome }.emit(&self.metrics);
        if let Ok(outcome) = outcome {
            self.remember(user, outcome);
        }
    }

    /// Remembers a user who is near the limit, for operators.
    fn remember(&self, user: &UserId, outcome: &SendOutcome) {
        let (limits, remaining, at, until, is_denied) = match outcome {
            SendOutcome::Accepted { limits, grant, at, .. } => {
                (limits, grant.remaining, *at, grant.reset_at, false)
            }
            SendOutcome::Denied { limits, denial, at } => (limits, 0, *at, at.plus(denial.retry_after), true),
            _ => return,
        };
        self.near_limits.record(&LimitDecision {
            capability: "quota",
            limit_name: "quota",
            key: user.as_str(),
            limit: limits.rate_limit(),
            remaining,
            is_denied,
            at,
            until: Some(until),
        });
    }

    /// Decides a send that may be repeated with the same key. A key that was used is answered even over the limit, so the denial
    /// cache is not asked. It is not told of a denial either: with Redis, sends without a key may have places left.
    pub async fn send_once(&self, mut send: SendMessage, key: &IdempotencyKey) -> Result<SendOutcome> {
        let hash_key = (self.hash_key)().await?;
        send.key = Some(send_key(&hash_key, &send.user, key, &send.message));
        let user = send.user.clone();
        let outcome = self.lanes.submit(user.as_str(), send).await;
        self.record(&user, &outcome);
        outcome
    }

    /// Accepts no more sends, waits for those in flight, and closes the store, which saves counts that are only in memory.
    pub async fn drain(&self) {
        self.lanes.drain().await;
        self.store.close().await;
    }
}
