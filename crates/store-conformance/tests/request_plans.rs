//! Random histories through the batch plans of request, on rows in memory: without any engine, the plans must give the
//! same answers as the model.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use weir_core::quota::Quota;
use weir_core::request::idempotency::IdempotencyRecord;
use weir_core::request::retry::{FailureCause, RetryDecision};
use weir_core::request::state::{Callback, RequestStatus, TransitionError, WorkerReport};
use weir_core::{IdempotencyKey, RequestId, RequestType, Timestamp};
use weir_store::request::{
    CallbackOutcome, CallbackReport, CancelOutcome, ClaimOrder, ClaimPlan, ClaimRow, ClaimedJobs,
    DownstreamCapacity, IdempotencyEntries, IdempotencyEntry, JobChange, JobReport, JobRow, Request,
    RequestRow, Submit, SubmitOutcome, SubmitReceipt, TurnClaim, TurnGrant, plan_callback, plan_cancel,
    plan_claim, plan_replay, plan_report, plan_submit, stored_progress,
};
use weir_store_conformance::START;
use weir_store_conformance::fixtures::limits;
use weir_store_conformance::request::fixtures::{
    URL, callback_report, fingerprint, policy, room, sealed, tenant, trace, within,
};
use weir_store_conformance::request::model::Model;

/// A request as stored in a table.
struct Row {
    request: Request,
    downstream: String,
    /// When its job may be claimed, and whether it is leased; `None` once the request is final.
    job: Option<(Timestamp, bool)>,
    token: u64,
}

/// The tables of an engine, without any rules of its own.
#[derive(Default)]
struct Tables {
    requests: BTreeMap<RequestId, Row>,
    keys: HashMap<(String, String), IdempotencyRecord>,
    windows: HashMap<String, (u32, Timestamp)>,
    dead: BTreeMap<RequestId, Timestamp>,
    webhooks: Vec<RequestId>,
}

impl Tables {
    fn submit(&mut self, batch: &[Submit], now: Timestamp) -> Vec<SubmitOutcome> {
        let (mut keys, mut windows) = (IdempotencyEntries::new(), HashMap::new());
        for submit in batch {
            let (tenant_name, key) = (submit.tenant.as_str(), submit.key.as_str());
            if let Some(record) = self.keys.get(&(tenant_name.to_owned(), key.to_owned()))
                && let Some(Row { request, .. }) = self.requests.get(&record.request_id)
            {
                let receipt = SubmitReceipt {
                    id: request.id,
                    status: request.status,
                    accepted_at: request.accepted_at,
                    window: None,
                };
                keys.insert((tenant_name, key), IdempotencyEntry { record: *record, receipt });
            }
            if let Some(limits) = submit.limits {
                let window = match self.windows.get(tenant_name) {
                    Some((count, at)) => Quota { current_count: *count, ..Quota::new(limits, *at) },
                    None => Quota::new(limits, now),
                };
                windows.insert(tenant_name, window);
            }
        }
        let plan = plan_submit(batch, &mut keys, &mut windows, now);
        for (tenant_name, window) in plan.windows {
            self.windows.insert(tenant_name.to_owned(), (window.current_count, window.last_refresh));
        }
        for new in &plan.accepted {
            let Submit { tenant, key, .. } = new.submit;
            self.keys.insert((tenant.as_str().to_owned(), key.as_str().to_owned()), new.record);
            let row = Row {
                request: request(new.submit, new.progress.status, now),
                downstream: new.submit.downstream.clone(),
                job: Some((new.progress.due, false)),
                token: new.progress.last_token,
            };
            assert!(self.requests.insert(new.submit.id, row).is_none(), "an id is used once");
        }
        plan.outcomes
    }

    fn job(&self, id: RequestId) -> Option<JobRow> {
        let Row { request, downstream, job, token } = self.requests.get(&id)?;
        let (claimable_at, is_leased) = (*job)?;
        let progress = stored_progress(request.status, request.attempts, claimable_at, is_leased, *token);
        let has_callback = request.callback_url.is_some();
        Some(JobRow { id, downstream: downstream.clone(), has_callback, progress })
    }

    fn row(&self, id: RequestId) -> Option<RequestRow> {
        let job = self.job(id).map(RequestRow::Job);
        job.or_else(|| Some(RequestRow::Final(self.requests.get(&id)?.request.status)))
    }

    fn claim(&mut self, ids: impl IntoIterator<Item = RequestId>, now: Timestamp) -> ClaimedJobs {
        let claim_row = |id| {
            let (job, Row { request, .. }) = (self.job(id)?, self.requests.get(&id)?);
            Some(ClaimRow {
                job,
                tenant: request.tenant.clone(),
                request_type: request.request_type.clone(),
                payload: request.payload.clone(),
                trace: request.trace.clone(),
                accepted_at: request.accepted_at,
            })
        };
        let rows: Vec<ClaimRow> = ids.into_iter().filter_map(claim_row).collect();
        let ClaimPlan { claimed, changed } = plan_claim(rows, &policy(), now);
        self.save(changed, now);
        claimed
    }

    /// Claims by turns, as engines do.
    fn claim_due(&mut self, rooms: &[DownstreamCapacity], now: Timestamp) -> ClaimedJobs {
        let waiting = |downstream: &str| {
            let of_room = self.requests.iter().filter(|(_, row)| row.downstream == *downstream);
            let mut waiting: Vec<_> =
                of_room.filter_map(|(id, row)| Some((row.job?.0, *id, &row.request.tenant))).collect();
            waiting.sort_unstable();
            waiting
        };
        let has_room = rooms.iter().filter(|room| room.jobs > 0);
        let next = has_room.filter_map(|room| Some(waiting(&room.downstream).first()?.0)).min();
        let mut plan = TurnClaim::new(rooms, &ClaimOrder::default());
        for (index, scan) in plan.scans().into_iter().enumerate() {
            let tenants: BTreeMap<String, bool> = waiting(&scan.downstream)
                .into_iter()
                .rev()
                .map(|(at, _, tenant)| (tenant.as_str().to_owned(), at <= now))
                .collect();
            plan.found(index, scan.limit, tenants);
        }
        let mut found = Vec::new();
        loop {
            let grants = plan.grants();
            if grants.is_empty() {
                break;
            }
            for TurnGrant { downstream, tenant, jobs, taken } in grants {
                let due = waiting(&downstream).into_iter().filter(|(at, ..)| *at <= now);
                let due = due.filter(|(_, _, of)| of.as_str() == tenant).skip(taken).take(jobs);
                for (at, id, _) in due {
                    plan.claimed(&downstream, &tenant, 1);
                    found.push((at, id));
                }
            }
        }
        found.sort_unstable();
        let claimed = self.claim(found.into_iter().map(|(_, id)| id), now);
        let next = next.filter(|_| claimed.jobs.is_empty() && claimed.exhausted.is_empty());
        ClaimedJobs { next_due_in: next.map(|at| at.since(now)), ..claimed }
    }

    fn report(
        &mut self,
        batch: Vec<JobReport>,
        now: Timestamp,
    ) -> Vec<Result<RequestStatus, TransitionError>> {
        let rows = batch.iter().filter_map(|report| Some((report.id, self.row(report.id)?)));
        let plan = plan_report(batch.clone(), &mut rows.collect(), &policy(), now);
        self.save(plan.changed, now);
        plan.outcomes
    }

    fn call_back(&mut self, id: RequestId, report: CallbackReport, now: Timestamp) -> CallbackOutcome {
        let (outcome, changed) = plan_callback(report, self.row(id));
        self.save(changed, now);
        outcome
    }

    fn cancel(&mut self, id: RequestId, now: Timestamp) -> CancelOutcome {
        let (outcome, changed) = plan_cancel(self.row(id));
        self.save(changed, now);
        outcome
    }

    fn replay(&mut self, id: RequestId, now: Timestamp) -> bool {
        if self.dead.remove(&id).is_none() {
            return false;
        }
        let row = self.requests.get_mut(&id).expect("a dead letter has a record");
        let progress = plan_replay(row.token, now);
        (row.job, row.token) = (Some((progress.due, progress.lease.is_some())), progress.last_token);
        (row.request.status, row.request.attempts) = (progress.status, progress.attempts);
        (row.request.failure, row.request.updated_at) = (None, now);
        true
    }

    fn save(&mut self, changed: impl IntoIterator<Item = JobChange>, now: Timestamp) {
        for change in changed {
            let row = self.requests.get_mut(&change.row.id).expect("a changed row was loaded");
            row.job = change.claimable_at().map(|at| (at, change.is_leased()));
            row.token = change.row.progress.last_token;
            (row.request.status, row.request.attempts) = (change.status(), change.row.progress.attempts);
            row.request.updated_at = now;
            if change.is_dead() {
                self.dead.insert(change.row.id, now);
            }
            if change.needs_webhook() {
                self.webhooks.push(change.row.id);
            }
            if let Some(outcome) = change.outcome {
                (row.request.result, row.request.failure) = (outcome.result, outcome.failure);
            }
        }
    }
}

fn request(submit: &Submit, status: RequestStatus, now: Timestamp) -> Request {
    Request {
        id: submit.id,
        tenant: submit.tenant.clone(),
        request_type: submit.request_type.clone(),
        status,
        attempts: 0,
        payload: submit.payload.clone(),
        result: None,
        failure: None,
        callback_url: submit.callback_url.clone(),
        trace: submit.trace.clone(),
        accepted_at: now,
        updated_at: now,
    }
}

/// One step of a history. A request is named by its age: 0 is the last one that was accepted.
#[derive(Clone, Debug)]
enum Step {
    Submit(Vec<(u8, u8, u8, bool, bool)>, Option<u32>),
    Claim(usize, usize),
    ClaimNamed(Vec<u8>),
    WorkerReport(Vec<(u8, bool, u8, u64)>),
    CallBack(u8, bool),
    Replay(u8),
    Cancel(u8),
    Advance(u64),
    AdvanceToNext,
}

fn step() -> impl Strategy<Value = Step> {
    let submission = (0..2_u8, 0..6_u8, 0..2_u8, any::<bool>(), any::<bool>());
    let report = (0..8_u8, prop::bool::weighted(0.1), 0..8_u8, 0..9_000_u64);
    prop_oneof![
        4 => (vec(submission, 0..6), prop::option::of(1..6_u32)).prop_map(|(batch, most)| Step::Submit(batch, most)),
        4 => (0..5_usize, 0..5_usize).prop_map(|(a, b)| Step::Claim(a, b)),
        1 => vec(0..8_u8, 0..4).prop_map(Step::ClaimNamed),
        5 => vec(report, 0..5).prop_map(Step::WorkerReport),
        1 => (0..8_u8, any::<bool>()).prop_map(|(id, is_done)| Step::CallBack(id, is_done)),
        1 => (0..8_u8).prop_map(Step::Replay),
        1 => (0..8_u8).prop_map(Step::Cancel),
        2 => prop_oneof![4 => 1..100_000_u64, 1 => Just(86_400_000)].prop_map(Step::Advance),
        4 => Just(Step::AdvanceToNext),
    ]
}

/// The tables and the model, on the same clock.
struct Comparison {
    tables: Tables,
    model: Model,
    now: Timestamp,
    ids: u32,
}

impl Comparison {
    /// The request accepted `ago` requests before the last; an unknown id if there are not that many.
    fn id(&self, ago: u8) -> RequestId {
        let ids = self.model.ids();
        let unknown = || RequestId::new(self.now, [255; 10]);
        ids.iter().rev().nth(usize::from(ago)).copied().unwrap_or_else(unknown)
    }

    fn submit(
        &mut self,
        (tenant_name, key, what, has_callback, needs_broker): (u8, u8, u8, bool, bool),
    ) -> Submit {
        self.ids += 1;
        let mut distinct = [0; 10];
        distinct[6..].copy_from_slice(&self.ids.to_be_bytes());
        Submit {
            id: RequestId::new(self.now, distinct),
            tenant: tenant(&format!("tenant {tenant_name}")),
            key: IdempotencyKey::parse(format!("key {key}")).expect("a key"),
            request_type: RequestType::parse("payment").expect("a type"),
            fingerprint: fingerprint(&format!("what {what}")),
            plain: None,
            payload: sealed(&format!("what {what}")),
            downstream: format!("downstream {}", key % 2),
            callback_url: has_callback.then(|| URL.to_owned()),
            trace: needs_broker.then(|| trace(RequestId::new(self.now, distinct))),
            needs_broker,
            limits: None,
        }
    }

    fn report(&self, (ago, is_stale, kind, millis): (u8, bool, u8, u64)) -> JobReport {
        let id = self.id(ago);
        let wait = Duration::from_millis(millis);
        let retry = |retry_after| RetryDecision::Retry { cause: FailureCause::TimedOut, retry_after };
        let (report, result) = match kind {
            0 | 1 => (WorkerReport::Called(RetryDecision::Complete), Some(sealed("result"))),
            2 => (WorkerReport::Called(RetryDecision::Fail(FailureCause::Rejected(400))), None),
            3 => (WorkerReport::Called(retry(Some(wait))), None),
            4 | 5 => (WorkerReport::Called(retry(None)), None),
            6 => (WorkerReport::Called(RetryDecision::AwaitCallback), None),
            _ => (WorkerReport::NotCalled { after: wait }, None),
        };
        let token = self.model.token(id).saturating_sub(u64::from(is_stale));
        let detail = (millis % 2 == 0).then(|| "detail".to_owned());
        JobReport { id, token, report, result, detail, random: 0 }
    }

    fn apply(&mut self, step: Step) {
        let now = self.now;
        match step {
            Step::Submit(batch, most) => {
                let batch = batch.into_iter().map(|submission| self.submit(submission)).collect();
                let batch = within(batch, most.map(|most| limits(most, 1)));
                let model: Vec<_> = batch.iter().map(|submit| self.model.submit(submit, now)).collect();
                assert_eq!(self.tables.submit(&batch, now), model);
            }
            Step::Claim(a, b) => {
                let rooms = [room("downstream 0", a), room("downstream 1", b)];
                let claimed = self.tables.claim_due(&rooms, now);
                self.model.check_claim(&rooms, &claimed, &policy(), now);
            }
            Step::ClaimNamed(mut named) => {
                named.sort_unstable();
                named.dedup();
                let mut ids: Vec<_> = named.into_iter().map(|ago| self.id(ago)).collect();
                ids.dedup();
                let claimed = self.tables.claim(ids.iter().copied(), now);
                self.model.check_named_claim(&ids, &claimed, &policy(), now);
            }
            Step::WorkerReport(batch) => {
                let batch: Vec<_> = batch.into_iter().map(|report| self.report(report)).collect();
                let tables = self.tables.report(batch.clone(), now);
                let model: Vec<_> =
                    batch.into_iter().map(|report| self.model.report(report, &policy(), now)).collect();
                assert_eq!(tables, model);
            }
            Step::CallBack(ago, is_done) => {
                let id = self.id(ago);
                let report = callback_report(if is_done { Callback::Completed } else { Callback::Failed });
                let tables = self.tables.call_back(id, report.clone(), now);
                assert_eq!(tables, self.model.call_back(id, report, now));
            }
            Step::Replay(ago) => {
                let id = self.id(ago);
                assert_eq!(self.tables.replay(id, now), self.model.replay(id, now));
            }
            Step::Cancel(ago) => {
                let id = self.id(ago);
                assert_eq!(self.tables.cancel(id, now), self.model.cancel(id, now));
            }
            Step::Advance(millis) => self.now = now.plus(Duration::from_millis(millis)),
            Step::AdvanceToNext => self.now = self.model.next_due(now).unwrap_or(now),
        }
    }

    fn compare(&self) {
        assert_eq!(self.tables.requests.keys().copied().collect::<Vec<_>>(), self.model.ids());
        for (id, row) in &self.tables.requests {
            assert_eq!(Some(&row.request), self.model.find(*id).as_ref());
            assert_eq!(row.job.is_none(), row.request.status.is_final());
        }
        let dead: Vec<_> =
            self.model.dead().into_iter().map(|letter| (letter.request.id, letter.died_at)).collect();
        assert_eq!(self.tables.dead.clone().into_iter().collect::<Vec<_>>(), dead);
        let mut webhooks = self.tables.webhooks.clone();
        webhooks.sort_unstable();
        assert_eq!(webhooks, self.model.webhooks());
    }
}

proptest! {
    #[test]
    fn batch_plans_on_rows_in_memory_match_the_model(steps in vec(step(), 0..80)) {
        let mut comparison = Comparison { tables: Tables::default(), model: Model::default(), now: START, ids: 0 };
        for step in steps {
            comparison.apply(step);
        }
        comparison.compare();
    }
}
