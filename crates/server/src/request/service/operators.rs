//! Requests of every tenant, for operators: what has not ended and why, and cancelling many.

use std::collections::BTreeSet;

use futures_util::stream::{self, StreamExt, TryStreamExt};
use weir_core::request::state::RequestStatus;
use weir_core::{RequestId, RequestType, TenantId, Timestamp};
use weir_store::Result;
use weir_store::request::{CancelOutcome, Request, UnfinishedRequest};

use super::RequestService;
use crate::engines::within;
use crate::request::settings::RequestSettings;

/// The most unfinished requests of one downstream that are looked at.
pub(crate) const UNFINISHED_SCAN_MAX: usize = 10_000;
/// Cancellations at the same time: engines make one commit of those.
const CONCURRENT_CANCELS: usize = 16;

/// Why a request has not ended yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UnfinishedState {
    /// The broker has not confirmed it; the reconciler publishes it again.
    PendingEnqueue,
    /// It is due, and no worker has taken it.
    Waiting,
    /// A worker is calling the downstream.
    Running,
    /// The lease of its worker is over without a report.
    WorkerLost,
    /// The last attempt failed, and the next one is due later.
    Retrying,
    /// It was not called: its downstream's breaker is open, or its limits are reached.
    Deferred,
    /// The downstream has answered 202 and will call back.
    AwaitingCallback,
}

impl UnfinishedState {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::PendingEnqueue => "pendingEnqueue",
            Self::Waiting => "waiting",
            Self::Running => "running",
            Self::WorkerLost => "workerLost",
            Self::Retrying => "retrying",
            Self::Deferred => "deferred",
            Self::AwaitingCallback => "awaitingCallback",
        }
    }

    /// The state of a request that has not ended, by what is stored of it and its job.
    pub(crate) fn of(unfinished: &UnfinishedRequest, now: Timestamp) -> Self {
        let UnfinishedRequest { request, claimable_at, is_leased } = unfinished;
        match (is_leased, *claimable_at > now) {
            _ if request.status == RequestStatus::PendingEnqueue => Self::PendingEnqueue,
            (true, true) => Self::Running,
            (true, false) => Self::WorkerLost,
            (false, false) => Self::Waiting,
            (false, true) if request.failure.is_some() => Self::Retrying,
            (false, true) if request.attempts == 0 => Self::Deferred,
            (false, true) => Self::AwaitingCallback,
        }
    }
}

/// Which unfinished requests are meant. Those that match all that is given.
#[derive(Clone, Debug, Default)]
pub(crate) struct UnfinishedFilter {
    /// As the store has it: empty for the default downstream.
    pub(crate) downstream: Option<String>,
    pub(crate) tenant: Option<TenantId>,
    pub(crate) request_type: Option<RequestType>,
}

impl UnfinishedFilter {
    fn matches(&self, request: &Request) -> bool {
        self.tenant.as_ref().is_none_or(|tenant| request.tenant == *tenant)
            && self.request_type.as_ref().is_none_or(|wanted| request.request_type == *wanted)
    }

    const fn is_of_downstream_alone(&self) -> bool {
        self.tenant.is_none() && self.request_type.is_none()
    }
}

/// Unfinished requests, each with the name of its downstream.
#[derive(Clone, Debug, Default)]
pub(crate) struct UnfinishedList {
    pub(crate) requests: Vec<(String, UnfinishedRequest)>,
    /// Whether there may be more.
    pub(crate) is_partial: bool,
}

/// What became of a cancellation of many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CancelCounts {
    pub(crate) matched: u64,
    pub(crate) cancelled: u64,
    /// Whether there may be more that match.
    pub(crate) is_partial: bool,
}

impl RequestService {
    /// Finds a request of any tenant.
    pub(crate) async fn find_any(&self, id: RequestId) -> Result<Option<Request>> {
        within(self.timeout, self.store.find_request(id)).await
    }

    /// Lists what has not ended, the longest due first: up to `limit`, of the first [`UNFINISHED_SCAN_MAX`] of each downstream.
    pub(crate) async fn unfinished(&self, filter: &UnfinishedFilter, limit: usize) -> Result<UnfinishedList> {
        let scanned = if filter.is_of_downstream_alone() { limit + 1 } else { UNFINISHED_SCAN_MAX };
        let mut list = UnfinishedList::default();
        for downstream in self.downstream_names(filter).await? {
            let found = within(self.timeout, self.store.unfinished_requests(&downstream, scanned)).await?;
            list.is_partial |= found.len() >= scanned;
            let matching = found.into_iter().filter(|one| filter.matches(&one.request));
            list.requests.extend(matching.map(|one| (downstream.clone(), one)));
        }
        list.requests.sort_by_key(|(_, one)| (one.claimable_at, one.request.id));
        list.is_partial |= list.requests.len() > limit;
        list.requests.truncate(limit);
        Ok(list)
    }

    /// Those of the settings may have no jobs; those with jobs may be of earlier settings.
    async fn downstream_names(&self, filter: &UnfinishedFilter) -> Result<BTreeSet<String>> {
        if let Some(downstream) = &filter.downstream {
            return Ok(BTreeSet::from([downstream.clone()]));
        }
        let stored = within(self.timeout, self.store.job_downstreams()).await?;
        let own = self.settings.downstreams.keys().cloned();
        Ok(stored.into_iter().chain(own).chain([RequestSettings::DEFAULT_DOWNSTREAM.to_owned()]).collect())
    }

    /// Cancels the unfinished requests that match, or with `dry_run` only counts them.
    /// Fails when the store does not answer; requests cancelled before that stay so.
    pub(crate) async fn cancel_matching(
        &self,
        filter: &UnfinishedFilter,
        dry_run: bool,
    ) -> Result<CancelCounts> {
        let list = self.unfinished(filter, UNFINISHED_SCAN_MAX).await?;
        let matched = u64::try_from(list.requests.len()).unwrap_or(u64::MAX);
        let mut counts = CancelCounts { matched, cancelled: 0, is_partial: list.is_partial };
        if dry_run {
            return Ok(counts);
        }
        let cancel = |(_, one): (String, UnfinishedRequest)| async move {
            self.cancel(&one.request.tenant, one.request.id).await
        };
        let mut outcomes = stream::iter(list.requests).map(cancel).buffer_unordered(CONCURRENT_CANCELS);
        while let Some(outcome) = outcomes.try_next().await? {
            counts.cancelled += u64::from(outcome == CancelOutcome::Cancelled);
        }
        Ok(counts)
    }
}

#[cfg(test)]
mod tests {
    use weir_store::request::{Failure, Sealed};

    use super::*;

    #[test]
    fn the_reason_follows_from_the_record_and_the_job() {
        let now = Timestamp::from_seconds(1_000);
        let failure = Failure { code: "DOWNSTREAM_TIMEOUT".to_owned(), message: String::new() };
        let unfinished = |status, attempts, has_failed: bool, is_leased, due| UnfinishedRequest {
            request: Request {
                id: RequestId::new(now, [0; 10]),
                tenant: TenantId::parse("acme").unwrap(),
                request_type: RequestType::parse("pay").unwrap(),
                status,
                attempts,
                payload: Sealed { key_id: String::new(), bytes: Vec::new() },
                result: None,
                failure: has_failed.then(|| failure.clone()),
                callback_url: None,
                trace: None,
                accepted_at: now,
                updated_at: now,
            },
            claimable_at: Timestamp::from_seconds(due),
            is_leased,
        };
        use RequestStatus::{Accepted, InProgress, PendingEnqueue};
        for (one, state) in [
            (unfinished(PendingEnqueue, 0, false, false, 900), UnfinishedState::PendingEnqueue),
            (unfinished(Accepted, 0, false, false, 1_000), UnfinishedState::Waiting),
            (unfinished(InProgress, 2, true, false, 900), UnfinishedState::Waiting),
            (unfinished(InProgress, 1, false, true, 1_030), UnfinishedState::Running),
            (unfinished(InProgress, 1, false, true, 999), UnfinishedState::WorkerLost),
            (unfinished(InProgress, 2, true, false, 1_030), UnfinishedState::Retrying),
            (unfinished(InProgress, 0, false, false, 1_030), UnfinishedState::Deferred),
            (unfinished(InProgress, 1, false, false, 1_030), UnfinishedState::AwaitingCallback),
        ] {
            assert_eq!(UnfinishedState::of(&one, now), state, "{one:?}");
        }
    }
}
