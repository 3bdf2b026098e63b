//! The naive engine of request: everything in memory, one command at a time, every change by the rule in `weir-core`.
//!
//! Where the trait leaves the choice to the engine (which of several equally due jobs, which dead letters), the model checks
//! that the engine's choice is allowed and then applies it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use weir_core::quota::Quota;
use weir_core::request::idempotency::{IdempotencyRecord, SubmissionDecision, TenantKey, decide};
use weir_core::request::retry::{FailureCause, RetryPolicy};
use weir_core::request::state::{
    ClaimOutcome, RequestProgress, RequestStatus, TransitionError, WorkerReport,
};
use weir_core::{RequestId, TenantId, Timestamp, Verdict};
use weir_store::request::{
    CallbackOutcome, CallbackReport, CancelOutcome, ClaimedJobs, DeadRequest, DownstreamCapacity, Failure,
    Job, JobReport, PendingRequest, Request, RequestAudit, Sealed, Submit, SubmitOutcome, SubmitReceipt,
    TenantWindow,
};

/// All requests that were submitted and not purged.
#[derive(Debug, Default)]
pub struct Model {
    rows: BTreeMap<RequestId, Row>,
    keys: BTreeMap<TenantKey, IdempotencyRecord>,
    windows: BTreeMap<TenantId, Quota>,
    webhooks: Vec<RequestId>,
    accepted: u64,
    purged: u64,
    erased: u64,
}

#[derive(Debug)]
struct Row {
    request: Request,
    downstream: String,
    progress: RequestProgress,
    died_at: Option<Timestamp>,
}

impl Row {
    fn claimable_at(&self) -> Timestamp {
        self.progress.lease.map_or(self.progress.due, |lease| lease.until)
    }

    fn is_due(&self, now: Timestamp) -> bool {
        !self.progress.status.is_final() && self.claimable_at() <= now
    }

    /// Copies status and attempts from the progress to the request. Returns whether a webhook is due.
    fn apply_progress(&mut self, now: Timestamp) -> bool {
        let status = self.progress.status;
        (self.request.status, self.request.attempts) = (status, self.progress.attempts);
        self.request.updated_at = now;
        if status == RequestStatus::FailedRetryExhausted {
            self.died_at = Some(now);
        }
        status.has_outcome() && self.request.callback_url.is_some()
    }

    fn receipt(&self) -> SubmitReceipt {
        SubmitReceipt {
            id: self.request.id,
            status: self.request.status,
            accepted_at: self.request.accepted_at,
            window: None,
        }
    }
}

fn failure(cause: FailureCause, detail: Option<String>) -> Option<Failure> {
    let message = detail.unwrap_or_else(|| cause.to_string());
    Some(Failure { code: cause.code().to_owned(), message })
}

impl Model {
    pub fn submit(&mut self, submit: &Submit, now: Timestamp) -> SubmitOutcome {
        let outcome = self.decide(submit, now);
        let left = submit.limits.map(|limits| {
            let new = Quota::new(limits, now);
            TenantWindow::at(&Quota { limits, ..*self.windows.get(&submit.tenant).unwrap_or(&new) }, now)
        });
        outcome.with_window(left)
    }

    fn decide(&mut self, submit: &Submit, now: Timestamp) -> SubmitOutcome {
        let name = TenantKey { tenant: submit.tenant.clone(), key: submit.key.clone() };
        let record = self.keys.get(&name).filter(|record| self.rows.contains_key(&record.request_id));
        match decide(record, &submit.fingerprint, now) {
            SubmissionDecision::Replay(id) => return SubmitOutcome::Replayed(self.rows[&id].receipt()),
            SubmissionDecision::Conflict => return SubmitOutcome::Conflict,
            SubmissionDecision::New => {}
        }
        if let Some(limits) = submit.limits {
            let new = Quota::new(limits, now);
            let window = self.windows.entry(submit.tenant.clone()).or_insert(new);
            window.limits = limits;
            if let Verdict::Denied(denial) = window.send(now) {
                return SubmitOutcome::Limited { limits, retry_after: denial.retry_after };
            }
        }
        self.accepted += 1;
        self.keys.insert(name, IdempotencyRecord::new(submit.fingerprint, submit.id, now));
        let row = accept(submit, now);
        let receipt = row.receipt();
        self.rows.insert(submit.id, row);
        SubmitOutcome::Accepted(receipt)
    }

    /// Checks the result of a claim against the jobs that are due, and applies it.
    pub fn check_claim(
        &mut self,
        room: &[DownstreamCapacity],
        claimed: &ClaimedJobs,
        policy: &RetryPolicy,
        now: Timestamp,
    ) {
        for DownstreamCapacity { downstream, jobs } in room {
            let of_room = |id: &RequestId| self.rows[id].downstream == *downstream;
            let at = |id: &RequestId| self.rows[id].claimable_at();
            let claimed_jobs = claimed.jobs.iter().map(|job| job.id).filter(of_room);
            let taken: Vec<RequestId> =
                claimed_jobs.clone().chain(claimed.exhausted.iter().copied().filter(of_room)).collect();
            let due: Vec<&Row> = self.due(downstream, now).collect();
            assert_eq!(taken.len(), due.len().min(*jobs), "as many jobs as there is capacity for");
            let mut shares = Vec::new();
            for tenant in due.iter().map(|row| &row.request.tenant).collect::<BTreeSet<_>>() {
                let of_tenant = due.iter().filter(|row| row.request.tenant == *tenant);
                let mut of_tenant: Vec<Timestamp> = of_tenant.map(|row| row.claimable_at()).collect();
                of_tenant.sort_unstable();
                let is_of_tenant = |id: &&RequestId| self.rows[*id].request.tenant == *tenant;
                let jobs = claimed_jobs.clone().filter(|id| is_of_tenant(&id));
                assert!(jobs.map(|id| at(&id)).is_sorted(), "of each tenant the longest due first");
                let mut its: Vec<Timestamp> = taken.iter().filter(is_of_tenant).map(at).collect();
                its.sort_unstable();
                let has_more = its.len() < of_tenant.len();
                assert_eq!(its, of_tenant[..its.len()], "of each tenant the first due");
                shares.push((its.len(), has_more));
            }
            let most = shares.iter().map(|(count, _)| *count).max().unwrap_or_default();
            let left_out = shares.iter().filter(|(_, has_more)| *has_more).map(|(count, _)| *count).min();
            assert!(left_out.is_none_or(|least| least + 1 >= most), "all have had equal turns: {shares:?}");
        }
        if claimed.jobs.is_empty() && claimed.exhausted.is_empty() {
            assert_eq!(claimed.next_due_in, self.next(room, now), "how long to wait");
        }
        self.apply_claim(claimed, policy, now);
    }

    /// Checks the result of a claim by name against the jobs that are due, and applies it.
    pub fn check_named_claim(
        &mut self,
        ids: &[RequestId],
        claimed: &ClaimedJobs,
        policy: &RetryPolicy,
        now: Timestamp,
    ) {
        let is_due = |id: &RequestId| self.rows.get(id).is_some_and(|row| row.is_due(now));
        let mut due: Vec<_> = ids.iter().copied().filter(is_due).collect();
        due.sort_unstable();
        due.dedup();
        let mut taken: Vec<_> = claimed.jobs.iter().map(|job| job.id).collect();
        taken.extend(&claimed.exhausted);
        taken.sort_unstable();
        assert_eq!(taken, due, "exactly those that are due, once each");
        self.apply_claim(claimed, policy, now);
    }

    fn due<'a>(&'a self, downstream: &'a str, now: Timestamp) -> impl Iterator<Item = &'a Row> {
        self.rows.values().filter(move |row| row.downstream == downstream && row.is_due(now))
    }

    fn next(&self, room: &[DownstreamCapacity], now: Timestamp) -> Option<Duration> {
        let has_room =
            |row: &&Row| room.iter().any(|room| room.jobs > 0 && room.downstream == row.downstream);
        let waiting = self.rows.values().filter(|row| !row.progress.status.is_final()).filter(has_room);
        waiting.map(Row::claimable_at).min().map(|at| at.since(now))
    }

    fn apply_claim(&mut self, claimed: &ClaimedJobs, policy: &RetryPolicy, now: Timestamp) {
        for job in &claimed.jobs {
            let row = self.rows.get_mut(&job.id).expect("it is due");
            let Ok(ClaimOutcome::Granted(lease)) = row.progress.claim(policy, now) else {
                panic!("{} has no attempt left", job.id)
            };
            row.apply_progress(now);
            let request = &row.request;
            let expected = Job {
                id: request.id,
                tenant: request.tenant.clone(),
                request_type: request.request_type.clone(),
                downstream: row.downstream.clone(),
                payload: request.payload.clone(),
                token: lease.token,
                attempt: request.attempts,
                trace: request.trace.clone(),
                accepted_at: request.accepted_at,
            };
            assert_eq!(*job, expected);
        }
        for id in &claimed.exhausted {
            let row = self.rows.get_mut(id).expect("it is due");
            let Ok(ClaimOutcome::Exhausted(cause)) = row.progress.claim(policy, now) else {
                panic!("{id} has an attempt left")
            };
            row.request.failure = failure(cause, None);
            if row.apply_progress(now) {
                self.webhooks.push(*id);
            }
        }
    }

    pub fn report(
        &mut self,
        report: JobReport,
        policy: &RetryPolicy,
        now: Timestamp,
    ) -> Result<RequestStatus, TransitionError> {
        let JobReport { id, token, report, result, detail, random } = report;
        let row = self.rows.get_mut(&id).ok_or(TransitionError::LeaseLost)?;
        let status = row.progress.report(token, report, policy, now, random)?;
        if let WorkerReport::Called(decision) = report {
            row.request.failure = decision.cause().and_then(|cause| failure(cause, detail));
            row.request.result = result;
        }
        if row.apply_progress(now) {
            self.webhooks.push(id);
        }
        Ok(status)
    }

    pub fn call_back(&mut self, id: RequestId, report: CallbackReport, now: Timestamp) -> CallbackOutcome {
        let Some(row) = self.rows.get_mut(&id) else { return CallbackOutcome::Unknown };
        match row.progress.call_back(report.callback) {
            Err(refused) => CallbackOutcome::TransitionError(refused),
            Ok(status) => {
                (row.request.result, row.request.failure) = (report.result, report.failure);
                if row.apply_progress(now) {
                    self.webhooks.push(id);
                }
                CallbackOutcome::Applied(status)
            }
        }
    }

    pub fn cancel(&mut self, id: RequestId, now: Timestamp) -> CancelOutcome {
        let Some(row) = self.rows.get_mut(&id) else { return CancelOutcome::Unknown };
        match row.progress.cancel() {
            Err(_) => CancelOutcome::AlreadyFinal(row.request.status),
            Ok(()) => {
                let (code, message) = ("CANCELLED".to_owned(), "the request was cancelled".to_owned());
                (row.request.result, row.request.failure) = (None, Some(Failure { code, message }));
                assert!(!row.apply_progress(now), "a cancelled request has no webhook");
                CancelOutcome::Cancelled
            }
        }
    }

    /// Marks a pending request as enqueued at the broker.
    pub fn mark_enqueued(&mut self, id: RequestId, now: Timestamp) {
        if let Some(row) = self.rows.get_mut(&id)
            && row.progress.status == RequestStatus::PendingEnqueue
        {
            row.progress.enqueued().expect("it is pending");
            row.apply_progress(now);
        }
    }

    /// Requests that are pending for the broker, by id.
    pub fn pending(&self, now: Timestamp) -> Vec<PendingRequest> {
        let rows = self.rows.values().filter(|row| row.request.status == RequestStatus::PendingEnqueue);
        rows.map(|row| PendingRequest { id: row.request.id, age: now.since(row.request.accepted_at) })
            .collect()
    }

    /// Replays a dead letter. Returns false if there is none with this id.
    pub fn replay(&mut self, id: RequestId, now: Timestamp) -> bool {
        if !self.discard(id) {
            return false;
        }
        let row = self.rows.get_mut(&id).expect("it was on the list");
        row.progress.replay(now).expect("it is a dead letter");
        row.request.failure = None;
        row.apply_progress(now);
        true
    }

    /// Discards a dead letter. Returns false if there is none with this id.
    pub fn discard(&mut self, id: RequestId) -> bool {
        self.rows.get_mut(&id).is_some_and(|row| row.died_at.take().is_some())
    }

    pub fn dead(&self) -> Vec<DeadRequest> {
        let letter = |row: &Row| Some(DeadRequest { request: row.request.clone(), died_at: row.died_at? });
        self.rows.values().filter_map(letter).collect()
    }

    /// Deletes old final requests and expired keys. Returns how many of both.
    pub fn purge(&mut self, keep: Duration, now: Timestamp) -> u64 {
        let before = (self.rows.len(), self.keys.len());
        // The age of requests is compared in milliseconds.
        let millis = |at: Timestamp| at.as_micros().div_euclid(1_000);
        let old = Timestamp::from_micros(
            now.as_micros().saturating_sub(i64::try_from(keep.as_micros()).unwrap_or(i64::MAX)),
        );
        self.rows.retain(|_, row| {
            !row.request.status.is_final() || millis(row.request.accepted_at) >= millis(old)
        });
        self.keys.retain(|_, record| record.is_live(now));
        let exhausted_at = (before.0 - self.rows.len()) as u64;
        self.purged += exhausted_at;
        exhausted_at + (before.1 - self.keys.len()) as u64
    }

    /// Erases all requests and keys of a tenant. Returns how many requests.
    pub fn erase(&mut self, tenant: &TenantId) -> u64 {
        let before = self.rows.len();
        self.rows.retain(|_, row| row.request.tenant != *tenant);
        self.keys.retain(|name, _| name.tenant != *tenant);
        let erased = (before - self.rows.len()) as u64;
        self.erased += erased;
        erased
    }

    pub fn find(&self, id: RequestId) -> Option<Request> {
        self.rows.get(&id).map(|row| row.request.clone())
    }

    /// A tenant's requests, the newest first.
    pub fn list(
        &self,
        tenant: &TenantId,
        status: Option<RequestStatus>,
        before: Option<RequestId>,
    ) -> Vec<Request> {
        let rows = self.rows.values().rev().map(|row| &row.request);
        rows.filter(|request| request.tenant == *tenant)
            .filter(|request| status.is_none_or(|status| request.status == status))
            .filter(|request| before.is_none_or(|before| request.id < before))
            .map(|request| {
                let payload = Sealed { bytes: Vec::new(), ..request.payload.clone() };
                Request { payload, result: None, ..request.clone() }
            })
            .collect()
    }

    /// The ids of all requests, the newest last.
    pub fn ids(&self) -> Vec<RequestId> {
        self.rows.keys().copied().collect()
    }

    /// The last token of a request.
    pub fn token(&self, id: RequestId) -> u64 {
        self.rows.get(&id).map_or(1, |row| row.progress.last_token)
    }

    /// The next time after `now` at which a job becomes claimable.
    pub fn next_due(&self, now: Timestamp) -> Option<Timestamp> {
        let waiting = self.rows.values().filter(|row| !row.progress.status.is_final());
        waiting.map(Row::claimable_at).filter(|at| *at > now).min()
    }

    /// The requests whose webhook is enqueued, sorted.
    pub fn webhooks(&self) -> Vec<RequestId> {
        let mut ids = self.webhooks.clone();
        ids.sort_unstable();
        ids
    }

    pub fn books(&self) -> RequestAudit {
        let mut books = RequestAudit {
            accepted: self.accepted,
            purged: self.purged,
            erased: self.erased,
            ..RequestAudit::default()
        };
        for row in self.rows.values() {
            match row.request.status {
                RequestStatus::Completed => books.completed += 1,
                RequestStatus::FailedPermanent => books.failed += 1,
                RequestStatus::FailedRetryExhausted => books.dead += 1,
                RequestStatus::Cancelled => books.cancelled += 1,
                RequestStatus::Accepted | RequestStatus::PendingEnqueue | RequestStatus::InProgress => {
                    books.in_flight += 1
                }
            }
        }
        books.jobs = books.in_flight;
        books
    }
}

fn accept(submit: &Submit, now: Timestamp) -> Row {
    let mut progress = RequestProgress::accepted(now);
    if submit.needs_broker {
        progress.enqueue_pending().expect("it is accepted");
    }
    let request = Request {
        id: submit.id,
        tenant: submit.tenant.clone(),
        request_type: submit.request_type.clone(),
        status: progress.status,
        attempts: 0,
        payload: submit.payload.clone(),
        result: None,
        failure: None,
        callback_url: submit.callback_url.clone(),
        trace: submit.trace.clone(),
        accepted_at: now,
        updated_at: now,
    };
    Row { request, downstream: submit.downstream.clone(), progress, died_at: None }
}
