//! Random histories against the engine and the model: both must give the same answers.
//!
//! A failure prints its seed; `WEIR_CONFORMANCE_SEED` repeats that history.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use weir_core::request::retry::{FailureCause, RetryDecision};
use weir_core::request::state::{Callback, RequestStatus, WorkerReport};
use weir_core::{RequestId, Timestamp};
use weir_store::request::{
    ClaimOrder, DownstreamCapacity, JobReport, RequestFilter, RequestStore, Submit, TenantCapacity,
};

use super::fixtures::{
    DAY, URL, callback_report, erase, next_id, now, policy, replay_one, replay_some, request_audit, room,
    sealed, submission_for, tenant, webhooks, within,
};
use super::model::Model;
use crate::HasRequests;
use crate::fixtures::{TICK, limits};
use crate::quota::history::seed;

const HISTORIES: usize = 12;
const STEPS: usize = 60;

pub async fn random_histories_match_the_model<H: HasRequests>() {
    let h = H::open().await;
    let seed = Seed(seed());
    let rng = Rng::with_seed(seed.0);
    let mut comparison = Comparison { h: &h, engine: h.requests(), model: Model::default(), rng, history: 0 };
    for history in 0..HISTORIES {
        comparison.history = history;
        for _ in 0..STEPS {
            comparison.step().await;
        }
        comparison.compare_all().await;
    }
    assert_eq!(webhooks(&h).await, comparison.model.webhooks(), "the enqueued webhooks");
}

/// Prints the seed when a history fails, wherever the panic comes from.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("to repeat this history: WEIR_CONFORMANCE_SEED={}", self.0);
        }
    }
}

/// An engine and the model, on the same clock.
struct Comparison<'h, H> {
    h: &'h H,
    engine: Arc<dyn RequestStore>,
    model: Model,
    rng: Rng,
    history: usize,
}

impl<H: HasRequests> Comparison<'_, H> {
    async fn step(&mut self) {
        match self.rng.u8(0..42) {
            0..8 => self.submit().await,
            8..14 => self.claim().await,
            14..16 => self.claim_named().await,
            16..24 => self.report().await,
            24..26 => self.call_back().await,
            26..28 => self.replay().await,
            28 => self.replay_some().await,
            29 => self.discard().await,
            30 => self.mark_enqueued().await,
            31 => self.purge().await,
            32..34 => self.read().await,
            34 => self.cancel().await,
            35 if self.rng.u8(0..4) == 0 => self.erase().await,
            _ => self.advance(),
        }
    }

    fn now(&self) -> Timestamp {
        now(self.h)
    }

    fn expect_equal<T: std::fmt::Debug + PartialEq>(&self, engine: &T, model: &T, what: &str) {
        assert_eq!(engine, model, "engine and model must agree in history {}: {what}", self.history);
    }

    /// The id of a recent request, or sometimes an unknown one.
    fn id(&mut self) -> RequestId {
        let ids = self.model.ids();
        if ids.is_empty() || self.rng.u8(0..20) == 0 {
            return next_id(self.h);
        }
        let recent = ids.len().min(12);
        ids[ids.len() - 1 - self.rng.usize(0..recent)]
    }

    fn submission(&mut self) -> Submit {
        let (history, rng) = (self.history, &mut self.rng);
        let tenant_name = format!("tenant {}", rng.u8(0..2));
        let (key, what) = (format!("{history} {}", rng.u8(0..30)), format!("what {}", rng.u8(0..8) / 7));
        let submit = submission_for(self.h, &tenant_name, &key, &what);
        Submit {
            downstream: format!("downstream {}", rng.u8(0..2)),
            callback_url: rng.bool().then(|| URL.to_owned()),
            needs_broker: rng.u8(0..3) == 0,
            trace: submit.trace.filter(|_| rng.bool()),
            ..submit
        }
    }

    async fn submit(&mut self) {
        let batch: Vec<Submit> = (0..self.rng.usize(0..8)).map(|_| self.submission()).collect();
        let limits = self.rng.bool().then(|| limits(self.rng.u32(1..20), 1));
        let batch = within(batch, limits);
        let engine = self.engine.submit_batch(batch.clone().into()).await.expect("submit_batch must succeed");
        let now = self.now();
        let model: Vec<_> = batch.iter().map(|submit| self.model.submit(submit, now)).collect();
        self.expect_equal(&engine.len(), &model.len(), "the number of outcomes");
        for ((submit, engine), model) in batch.iter().zip(&engine).zip(&model) {
            self.expect_equal(engine, model, &format!("{submit:?} within {limits:?}"));
        }
    }

    async fn claim(&mut self) {
        let room_of = |n: u8, jobs| room(&format!("downstream {n}"), jobs);
        let (a, b) = (self.rng.usize(0..5), self.rng.usize(0..5));
        let rooms: Vec<DownstreamCapacity> = vec![room_of(0, a), room_of(1, b)];
        let claimed = self
            .engine
            .claim_jobs(&rooms, &ClaimOrder::default(), &policy())
            .await
            .expect("claim_jobs must succeed");
        let now = self.now();
        self.model.check_claim(&rooms, &claimed, &policy(), now);
    }

    async fn claim_named(&mut self) {
        let ids: Vec<_> = (0..self.rng.usize(0..5)).map(|_| self.id()).collect();
        let claimed = self
            .engine
            .claim_named(&ids, &TenantCapacity::default(), &policy())
            .await
            .expect("claim_named must succeed");
        let now = self.now();
        self.model.check_named_claim(&ids, &claimed, &policy(), now);
    }

    fn report_of(&mut self, id: RequestId) -> JobReport {
        let token = self.model.token(id).saturating_sub(u64::from(self.rng.u8(0..8) == 0));
        let rng = &mut self.rng;
        let retry_after = rng.bool().then(|| Duration::from_millis(rng.u64(0..9_000)));
        let (report, result) = match rng.u8(0..8) {
            0..2 => (WorkerReport::Called(RetryDecision::Complete), Some(sealed("result"))),
            2 => (WorkerReport::Called(RetryDecision::Fail(FailureCause::Rejected(400))), None),
            3..6 => (
                WorkerReport::Called(RetryDecision::Retry { cause: FailureCause::TimedOut, retry_after }),
                None,
            ),
            6 => (WorkerReport::Called(RetryDecision::AwaitCallback), None),
            _ => {
                let after = Duration::from_millis(rng.u64(0..5_000));
                (WorkerReport::NotCalled { after }, None)
            }
        };
        let detail = rng.bool().then(|| "detail".to_owned());
        // Only the extremes: backoff is exact to the nanosecond, but time is stored in microseconds.
        let random = if rng.bool() { 0 } else { u64::MAX };
        JobReport { id, token, report, result, detail, random }
    }

    async fn report(&mut self) {
        let mut batch = Vec::new();
        for _ in 0..self.rng.usize(0..6) {
            let id = self.id();
            batch.push(self.report_of(id));
        }
        let engine = self.engine.report_batch(batch.clone(), &policy()).await;
        let engine = engine.expect("report_batch must succeed");
        let now = self.now();
        let mut model = Vec::new();
        for report in batch.clone() {
            model.push(self.model.report(report, &policy(), now));
        }
        self.expect_equal(&engine, &model, &format!("{batch:?}"));
    }

    async fn call_back(&mut self) {
        let id = self.id();
        let report = callback_report(if self.rng.bool() { Callback::Completed } else { Callback::Failed });
        let engine = self.engine.call_back(id, report.clone()).await.expect("call_back must succeed");
        let model = self.model.call_back(id, report, self.now());
        self.expect_equal(&engine, &model, &format!("call back {id}"));
    }

    async fn cancel(&mut self) {
        let id = self.id();
        let engine = self.engine.cancel_request(id).await.expect("cancel_request must succeed");
        let model = self.model.cancel(id, self.now());
        self.expect_equal(&engine, &model, &format!("cancel {id}"));
    }

    async fn erase(&mut self) {
        let tenant = tenant(&format!("tenant {}", self.rng.u8(0..2)));
        let engine = erase(self.h, &tenant).await;
        let model = self.model.erase(&tenant);
        self.expect_equal(&(engine.len() as u64), &model, &format!("erase {tenant}"));
    }

    /// Usually the id of a dead letter, if there is one.
    fn dead_id(&mut self) -> RequestId {
        let dead = self.model.dead();
        if dead.is_empty() || self.rng.u8(0..4) == 0 {
            return self.id();
        }
        dead[self.rng.usize(0..dead.len())].request.id
    }

    async fn replay(&mut self) {
        let id = self.dead_id();
        let engine = replay_one(&*self.engine, id).await;
        let model = self.model.replay(id, self.now());
        self.expect_equal(&engine, &model, &format!("replay {id}"));
    }

    async fn replay_some(&mut self) {
        let (limit, dead) = (self.rng.usize(0..4), self.model.dead().len());
        let replayed = replay_some(&*self.engine, limit).await;
        self.expect_equal(&replayed.len(), &limit.min(dead), "replay some");
        for id in replayed {
            let model = self.model.replay(id, self.now());
            self.expect_equal(&true, &model, &format!("replay some, {id}"));
        }
    }

    async fn discard(&mut self) {
        let id = self.dead_id();
        let engine = self.engine.discard_request(id).await.expect("discard_request must succeed");
        let model = self.model.discard(id);
        self.expect_equal(&engine, &model, &format!("discard {id}"));
    }

    async fn mark_enqueued(&mut self) {
        let ids: Vec<_> = (0..self.rng.usize(0..5)).map(|_| self.id()).collect();
        self.engine.mark_enqueued(&ids).await.expect("mark_enqueued must succeed");
        for id in ids {
            self.model.mark_enqueued(id, self.now());
        }
    }

    async fn purge(&mut self) {
        let keep = [Duration::ZERO, Duration::from_secs(5), DAY, 90 * DAY][self.rng.usize(0..4)];
        let engine = self.engine.purge_requests(keep, 1_000).await.expect("purge_requests must succeed");
        let model = self.model.purge(keep, self.now());
        self.expect_equal(&engine, &model, &format!("purge {keep:?}"));
    }

    async fn read(&mut self) {
        let id = self.id();
        let engine = self.engine.find_request(id).await.expect("find_request must succeed");
        self.expect_equal(&engine, &self.model.find(id), &format!("find {id}"));
        let tenant = tenant(&format!("tenant {}", self.rng.u8(0..2)));
        let status = self.rng.bool().then(|| RequestStatus::ALL[self.rng.usize(0..RequestStatus::ALL.len())]);
        let (before, limit) = (self.rng.bool().then_some(id), self.rng.usize(0..10));
        let engine =
            self.engine.list_requests(&RequestFilter::of_tenant(&tenant, status), before, limit).await;
        let mut model = self.model.list(&tenant, status, before);
        model.truncate(limit);
        self.expect_equal(
            &engine.expect("list_requests must succeed").requests,
            &model,
            &format!("list {tenant} {status:?}"),
        );
    }

    /// Moves the clock by a random time, to just before, at or just after the time of the next job, or rarely by a day.
    fn advance(&mut self) {
        let now = self.now();
        let to_next = self.model.next_due(now).map_or(Duration::ZERO, |due| due.since(now));
        let step = match self.rng.u8(0..20) {
            0 => DAY,
            1..5 => Duration::from_micros(self.rng.u64(1..2_000_000)),
            5..8 => Duration::from_secs(self.rng.u64(1..30)),
            8..11 => to_next.saturating_sub(TICK),
            11..13 => to_next + TICK,
            _ => to_next,
        };
        self.h.clock().advance(step);
    }

    /// Compares all requests, dead letters, pending requests and the books.
    async fn compare_all(&self) {
        for n in 0..2 {
            let tenant = tenant(&format!("tenant {n}"));
            let engine =
                self.engine.list_requests(&RequestFilter::of_tenant(&tenant, None), None, usize::MAX).await;
            let (engine, model) =
                (engine.expect("list_requests must succeed").requests, self.model.list(&tenant, None, None));
            self.expect_equal(&engine.len(), &model.len(), "the number of requests");
            engine
                .iter()
                .zip(&model)
                .for_each(|(engine, model)| self.expect_equal(engine, model, "all requests"));
        }
        let engine = self
            .engine
            .dead_requests(None, usize::MAX, usize::MAX)
            .await
            .expect("dead_requests must succeed");
        self.expect_equal(&engine, &self.model.dead(), "all dead letters");
        let count = self.engine.count_dead_requests().await.expect("count_dead_requests must succeed");
        self.expect_equal(&count, &(engine.len() as u64), "the number of dead letters");
        let pending = self.engine.pending_requests(Duration::ZERO, usize::MAX).await;
        let mut pending = pending.expect("pending_requests must succeed");
        assert!(pending.is_sorted_by(|a, b| a.age >= b.age), "the oldest first");
        pending.sort_unstable_by_key(|pending| pending.id);
        self.expect_equal(&pending, &self.model.pending(self.now()), "the requests pending for the broker");
        self.expect_equal(&request_audit(self.h).await, &self.model.books(), "the books");
    }
}
