//! Concurrent callers, workers and servers.
//!
//! A case uses two servers if the engine supports that, otherwise one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use weir_core::RequestId;
use weir_core::request::state::{Callback, RequestStatus, TransitionError};
use weir_store::request::{
    CallbackOutcome, CancelOutcome, ClaimOrder, DownstreamCapacity, Job, JobReport, RequestStore, Submit,
    SubmitOutcome, TenantCapacity,
};

use super::fixtures::{
    DOWNSTREAM, TENANT, URL, accept_batch, callback_report, claim, claim_named, create_dead_requests,
    dead_ids, get_request, not_called, outage, outcome_letters, policy, replay_one, replay_some,
    request_audit, resubmission, room, single_attempt_policy, status, submission, submission_for,
    submissions, submit_and_claim, success, tenant, webhooks, within,
};
use crate::HasRequests;
use crate::fixtures::{limits, run_concurrently};

type Stores = Vec<Arc<dyn RequestStore>>;

/// One server, or two if the engine supports that.
struct Servers<H> {
    h: H,
    other: Option<H>,
}

impl<H: HasRequests> Servers<H> {
    async fn open() -> Self {
        let h = H::open().await;
        let other = h.second_server().await;
        let servers = Self { h, other };
        for store in servers.stores() {
            open_connections(&store).await;
        }
        servers
    }

    fn stores(&self) -> Stores {
        [Some(&self.h), self.other.as_ref()].into_iter().flatten().map(H::requests).collect()
    }

    /// The store that the n-th caller uses.
    fn store(&self, n: usize) -> Arc<dyn RequestStore> {
        let stores = self.stores();
        Arc::clone(&stores[n % stores.len()])
    }
}

/// Lets an engine open its connections before many callers need one at the same time. On a busy machine that may exceed a
/// call's timeout, which no case here tests.
async fn open_connections(store: &Arc<dyn RequestStore>) {
    let mut successes = 0;
    while successes < 3 {
        let calls = (0..16).map(|_| {
            let store = Arc::clone(store);
            async move { store.audit_requests().await.is_ok() }
        });
        let all = run_concurrently(calls).await.into_iter().all(|is_ok| is_ok);
        successes = if all { successes + 1 } else { 0 };
    }
}

async fn submit_concurrently(
    stores: &Stores,
    batches: Vec<Vec<Submit>>,
    limits: Option<weir_core::quota::QuotaLimits>,
) -> Vec<Vec<SubmitOutcome>> {
    let calls = batches.into_iter().enumerate().map(|(n, batch)| {
        let store = Arc::clone(&stores[n % stores.len()]);
        let batch = within(batch, limits);
        async move { store.submit_batch(batch.into()).await.expect("submit_batch must succeed") }
    });
    run_concurrently(calls).await
}

fn receipt_id(outcome: &SubmitOutcome) -> RequestId {
    match outcome {
        SubmitOutcome::Accepted(receipt) | SubmitOutcome::Replayed(receipt) => receipt.id,
        other => panic!("accepted or replayed, not {other:?}"),
    }
}

fn count(outcomes: &[SubmitOutcome], letter: char) -> usize {
    outcome_letters(outcomes).chars().filter(|other| *other == letter).count()
}

/// A hundred callers concurrently submit the same request, spread over the servers: only one request is created.
async fn expect_one_request<H: HasRequests>(h: &H, stores: &Stores) {
    let sent = submission(h, "k");
    let batches = (0..100).map(|_| vec![resubmission(h, &sent)]).collect();
    let outcomes = submit_concurrently(stores, batches, None).await.concat();
    assert_eq!((count(&outcomes, 'A'), count(&outcomes, 'R')), (1, 99));
    let ids: BTreeSet<_> = outcomes.iter().map(receipt_id).collect();
    assert_eq!(ids.len(), 1, "all callers get the id of the same request");
    assert_eq!(claim(h, 10).await.len(), 1, "the request has one job");
    assert_eq!(request_audit(h).await.accepted, 1);
}

pub async fn a_hundred_identical_submissions_create_one_request<H: HasRequests>() {
    let h = H::open().await;
    open_connections(&h.requests()).await;
    expect_one_request(&h, &vec![h.requests()]).await;
}

pub async fn a_hundred_identical_submissions_to_two_servers_create_one_request<H: HasRequests>() {
    let servers = Servers::<H>::open().await;
    expect_one_request(&servers.h, &servers.stores()).await;
}

pub async fn an_expired_key_is_reused_once<H: HasRequests>() {
    let servers = Servers::<H>::open().await;
    let h = &servers.h;
    let sent = submission(h, "k");
    accept_batch(h, vec![sent.clone()]).await;
    h.clock().advance(super::fixtures::DAY);
    let batches = (0..40).map(|_| vec![resubmission(h, &sent)]).collect();
    let outcomes = submit_concurrently(&servers.stores(), batches, None).await.concat();
    assert_eq!((count(&outcomes, 'A'), count(&outcomes, 'R')), (1, 39));
    assert!(
        outcomes.iter().all(|outcome| receipt_id(outcome) != sent.id),
        "the key must not name the old request"
    );
    assert_eq!(request_audit(h).await.accepted, 2);
}

pub async fn different_payloads_under_one_key_leave_one_request<H: HasRequests>() {
    let servers = Servers::<H>::open().await;
    let h = &servers.h;
    let batches = (0..40).map(|n| vec![submission_for(h, TENANT, "k", &format!("what {}", n / 2))]).collect();
    let outcomes = submit_concurrently(&servers.stores(), batches, None).await.concat();
    assert_eq!((count(&outcomes, 'A'), count(&outcomes, 'C')), (1, 38), "{}", outcome_letters(&outcomes));
    assert_eq!(count(&outcomes, 'R'), 1, "the caller with the same content");
    assert_eq!(request_audit(h).await.accepted, 1);
}

pub async fn batches_naming_keys_in_any_order_all_succeed<H: HasRequests>() {
    let servers = Servers::<H>::open().await;
    let h = &servers.h;
    let sent = submissions(h, "k", 20);
    let batches = (0..20).map(|n| {
        let mut batch: Vec<_> = sent.iter().map(|sent| resubmission(h, sent)).collect();
        batch.rotate_left(n);
        if n % 2 == 0 {
            batch.reverse();
        }
        batch
    });
    let batches: Vec<_> = batches.collect();
    let outcomes = submit_concurrently(&servers.stores(), batches.clone(), None).await;
    let mut ids: BTreeMap<String, BTreeSet<RequestId>> = BTreeMap::new();
    for (sent, outcome) in batches.concat().iter().zip(outcomes.concat()) {
        ids.entry(sent.key.to_string()).or_default().insert(receipt_id(&outcome));
    }
    assert_eq!(count(&outcomes.concat(), 'A'), 20, "each is accepted once");
    assert!(ids.values().all(|ids| ids.len() == 1), "all callers get the same id: {ids:?}");
    assert_eq!(request_audit(h).await.in_flight, 20);
}

pub async fn a_tenants_limit_holds_for_all_servers_together<H: HasRequests>() {
    let servers = Servers::<H>::open().await;
    let h = &servers.h;
    let batches = (0..24)
        .map(|n| {
            let of_tenant = |tenant: &str, m: usize| submission_for(h, tenant, &format!("{n}-{m}"), "what");
            let mut batch = vec![
                of_tenant("a", 0),
                of_tenant("b", 0),
                of_tenant("a", 1),
                of_tenant("b", 1),
                of_tenant("a", 2),
            ];
            if n % 2 == 0 {
                batch.reverse();
            }
            batch
        })
        .collect::<Vec<_>>();
    let outcomes =
        submit_concurrently(&servers.stores(), batches.clone(), Some(limits(30, 1))).await.concat();
    for tenant in ["a", "b"] {
        let of_tenant = batches.concat().into_iter().zip(&outcomes);
        let accepted = of_tenant.filter(|(sent, outcome)| {
            sent.tenant.as_str() == tenant && matches!(outcome, SubmitOutcome::Accepted(_))
        });
        assert_eq!(accepted.count(), 30, "exactly the limit of {tenant}");
    }
    assert_eq!(request_audit(h).await.accepted, 60);
}

/// The last token of each job, and whether a worker holds it.
#[derive(Clone, Default)]
struct ActiveJobs(Arc<Mutex<BTreeMap<RequestId, (u64, bool)>>>);

impl ActiveJobs {
    fn record_claimed(&self, jobs: &[Job]) {
        let mut active = self.0.lock();
        for job in jobs {
            let (token, is_held) = active.insert(job.id, (job.token, true)).unwrap_or_default();
            assert!(!is_held, "{} is held by two workers", job.id);
            assert!(job.token > token, "tokens only grow");
        }
    }

    fn record_released(&self, jobs: &[Job]) {
        let mut active = self.0.lock();
        for job in jobs {
            active.insert(job.id, (job.token, false));
        }
    }
}

/// Claims and reports until no job is left. Every third report says that the downstream was not called.
async fn work(store: Arc<dyn RequestStore>, active_jobs: ActiveJobs, room: DownstreamCapacity) -> usize {
    let (mut completed, mut n) = (0, 0);
    loop {
        let claimed = store.claim_jobs(std::slice::from_ref(&room), &ClaimOrder::default(), &policy()).await;
        let claimed = claimed.expect("claim_jobs must succeed");
        active_jobs.record_claimed(&claimed.jobs);
        if claimed.jobs.is_empty() && claimed.next_due_in.is_none() {
            let books = store.audit_requests().await.expect("audit_requests must succeed");
            assert_eq!(books.jobs, 0, "without a time to wait for, no job is left");
            return completed;
        }
        tokio::task::yield_now().await;
        active_jobs.record_released(&claimed.jobs);
        let answer = |job| {
            n += 1;
            if n % 3 == 0 { not_called(job, Duration::ZERO) } else { success(job) }
        };
        let reports: Vec<JobReport> = claimed.jobs.iter().map(answer).collect();
        for outcome in store.report_batch(reports, &policy()).await.expect("report_batch must succeed") {
            completed +=
                usize::from(outcome.expect("the holder's report counts") == RequestStatus::Completed);
        }
    }
}

pub async fn parallel_workers_share_no_job_and_complete_each_once<H: HasRequests>() {
    let servers = Servers::<H>::open().await;
    let h = &servers.h;
    let batch = submissions(h, "k", 300).into_iter();
    let submissions: Vec<_> =
        batch.map(|submission| Submit { callback_url: Some(URL.to_owned()), ..submission }).collect();
    accept_batch(h, submissions.clone()).await;
    let active_jobs = ActiveJobs::default();
    let workers = (0..8).map(|n| work(servers.store(n), active_jobs.clone(), room(DOWNSTREAM, 7)));
    let completed: usize = run_concurrently(workers).await.into_iter().sum();
    assert_eq!(completed, 300, "every request was completed by one worker");
    assert_eq!(request_audit(h).await.completed, 300);
    let ids: Vec<_> = submissions.iter().map(|sent| sent.id).collect();
    assert_eq!(webhooks(h).await, ids, "each has one webhook");
}

pub async fn parallel_claims_by_name_have_one_winner<H: HasRequests>() {
    let servers = Servers::<H>::open().await;
    let h = &servers.h;
    let ids: Vec<_> =
        accept_batch(h, submissions(h, "k", 30)).await.iter().map(|receipt| receipt.id).collect();
    let claims = (0..12).map(|n| {
        let (store, mut ids) = (servers.store(n), ids.clone());
        ids.rotate_left(n);
        if n % 2 == 0 {
            ids.reverse();
        }
        async move {
            let claimed = if n % 3 == 0 {
                store.claim_jobs(&[room(DOWNSTREAM, 5)], &ClaimOrder::default(), &policy()).await
            } else {
                store.claim_named(&ids, &TenantCapacity::default(), &policy()).await
            };
            claimed.expect("the claim must succeed").jobs
        }
    });
    let jobs = run_concurrently(claims).await.concat();
    // Jobs that two claims tried to lock at the same moment may be left for the next claim.
    let jobs = [jobs, claim_named(h, &ids).await.jobs].concat();
    let claimed: BTreeSet<_> = jobs.iter().map(|job| job.id).collect();
    assert_eq!((jobs.len(), claimed.len()), (30, 30), "each is claimed once");
    assert!(jobs.iter().all(|job| (job.attempt, job.token) == (1, 1)));
}

pub async fn a_worker_and_a_callback_end_a_request_once<H: HasRequests>() {
    let servers = Servers::<H>::open().await;
    let h = &servers.h;
    for n in 0..5 {
        let sent = Submit { callback_url: Some(URL.to_owned()), ..submission(h, &format!("k{n}")) };
        let job = submit_and_claim(h, sent).await;
        let ends = (0..12).map(|n| {
            let (store, job) = (servers.store(n / 2), job.clone());
            async move {
                if n % 2 == 0 {
                    let outcomes = store.report_batch(vec![success(&job)], &policy()).await;
                    outcomes.expect("report_batch must succeed").remove(0)
                } else {
                    let outcome = store.call_back(job.id, callback_report(Callback::Failed)).await;
                    match outcome.expect("call_back must succeed") {
                        CallbackOutcome::Applied(status) => Ok(status),
                        CallbackOutcome::TransitionError(refused) => Err(refused),
                        CallbackOutcome::Unknown => panic!("the request is known"),
                    }
                }
            }
        });
        let outcomes = run_concurrently(ends).await;
        let end = status(h, job.id).await;
        let taken: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.ok()).collect();
        assert_eq!(taken, [end], "exactly one report or callback ended it");
        assert!(outcomes.iter().all(|o| o.is_ok() || *o == Err(TransitionError::Final(end))), "{outcomes:?}");
        assert_eq!(webhooks(h).await, [job.id], "there is one webhook");
    }
    request_audit(h).await;
}

pub async fn a_request_is_cancelled_or_ends_otherwise_but_never_both<H: HasRequests>() {
    let servers = Servers::<H>::open().await;
    let h = &servers.h;
    for n in 0..8 {
        let sent = Submit { callback_url: Some(URL.to_owned()), ..submission(h, &format!("k{n}")) };
        let job = submit_and_claim(h, sent).await;
        let ends = (0..12).map(|n| {
            let (store, job) = (servers.store(n / 4), job.clone());
            async move {
                match n % 4 {
                    0 => {
                        let outcomes = store.report_batch(vec![success(&job)], &policy()).await;
                        outcomes.expect("report_batch must succeed").remove(0).ok()
                    }
                    1 => match store.call_back(job.id, callback_report(Callback::Failed)).await {
                        Ok(CallbackOutcome::Applied(status)) => Some(status),
                        other => other.map(|_refused| None).expect("call_back must succeed"),
                    },
                    2 => {
                        let purged = store.purge_requests(Duration::from_secs(60), 10).await;
                        purged.map(|_none_is_old| None).expect("purge_requests must succeed")
                    }
                    _ => {
                        let cancelled =
                            store.cancel_request(job.id).await.expect("cancel_request must succeed");
                        (cancelled == CancelOutcome::Cancelled).then_some(RequestStatus::Cancelled)
                    }
                }
            }
        });
        let taken: Vec<_> = run_concurrently(ends).await.into_iter().flatten().collect();
        let end = status(h, job.id).await;
        assert_eq!(taken, [end], "exactly one of them ended it");
        let expected = if end == RequestStatus::Cancelled { vec![] } else { vec![job.id] };
        assert_eq!(webhooks(h).await, expected, "a webhook of a result, and none of a cancellation");
    }
    request_audit(h).await;
}

pub async fn a_cancellation_and_a_claim_leave_no_job<H: HasRequests>() {
    let servers = Servers::<H>::open().await;
    let h = &servers.h;
    let mut ids: Vec<_> =
        accept_batch(h, submissions(h, "k", 30)).await.iter().map(|receipt| receipt.id).collect();
    ids.extend(create_dead_requests(h, submissions(h, "d", 10)).await.iter().map(|job| job.id));
    let calls = (0..10).map(|n| {
        let (store, mut ids) = (servers.store(n / 2), ids.clone());
        ids.rotate_left(n * 4);
        async move {
            match n % 5 {
                0 | 1 => {
                    for id in ids {
                        store.cancel_request(id).await.expect("cancel_request must succeed");
                    }
                }
                2 => {
                    let claimed =
                        store.claim_jobs(&[room(DOWNSTREAM, 20)], &ClaimOrder::default(), &policy()).await;
                    let jobs = claimed.expect("claim_jobs must succeed").jobs;
                    let reports = jobs.iter().map(|job| not_called(job, Duration::ZERO)).collect();
                    store
                        .report_batch(reports, &policy())
                        .await
                        .map(drop)
                        .expect("report_batch must succeed");
                }
                3 => {
                    let claimed = store.claim_named(&ids, &TenantCapacity::default(), &policy()).await;
                    claimed.map(drop).expect("claim_named must succeed");
                }
                _ => drop(replay_some(&*store, 5).await),
            }
        }
    });
    run_concurrently(calls).await;
    let books = request_audit(h).await;
    assert_eq!(books.cancelled + books.dead + books.in_flight, 40, "{books:?}");
    for id in ids {
        servers.store(1).cancel_request(id).await.expect("cancel_request must succeed");
    }
    let books = request_audit(h).await;
    assert_eq!((books.in_flight, books.jobs), (0, 0), "{books:?}");
    assert_eq!(books.cancelled + books.dead, 40, "{books:?}");
}

pub async fn an_erasure_beside_everything_else_leaves_nothing_and_keeps_the_books<H: HasRequests>() {
    let servers = Servers::<H>::open().await;
    let h = &servers.h;
    let of = |tenant: &str, prefix: &str, count: usize| -> Vec<Submit> {
        (0..count).map(|n| submission_for(h, tenant, &format!("{prefix}-{n}"), "what")).collect()
    };
    let mut ids: Vec<_> =
        accept_batch(h, of("gone", "k", 40)).await.iter().map(|receipt| receipt.id).collect();
    let called: Vec<_> = claim_named(h, &ids[..10]).await.jobs;
    ids.extend(create_dead_requests(h, of("gone", "d", 20)).await.iter().map(|job| job.id));
    let kept: Vec<_> = accept_batch(h, of("kept", "k", 10)).await.iter().map(|receipt| receipt.id).collect();
    h.requests().begin_erasure(&tenant("gone"), 10).await.expect("begin_erasure must succeed");
    let calls = (0..12).map(|n| {
        let (store, ids, called) = (servers.store(n / 2), ids.clone(), called.clone());
        async move {
            match n % 6 {
                0 | 1 => {
                    for _ in 0..6 {
                        store.erase_some(7, 0).await.expect("erase_some must succeed");
                    }
                }
                2 => drop(replay_some(&*store, 20).await),
                3 => {
                    let reports = called.iter().map(outage).collect();
                    let reported = store.report_batch(reports, &single_attempt_policy()).await;
                    reported.map(drop).expect("report_batch must succeed");
                }
                4 => {
                    for id in ids.iter().step_by(3) {
                        store.cancel_request(*id).await.expect("cancel_request must succeed");
                        let report = callback_report(Callback::Completed);
                        store.call_back(*id, report).await.expect("call_back must succeed");
                    }
                }
                _ => {
                    let claimed =
                        store.claim_named(&ids[20..30], &TenantCapacity::default(), &policy()).await;
                    let reports =
                        claimed.expect("claim_named must succeed").jobs.iter().map(success).collect();
                    store
                        .report_batch(reports, &policy())
                        .await
                        .map(drop)
                        .expect("report_batch must succeed");
                }
            }
        }
    });
    run_concurrently(calls).await;
    request_audit(h).await;
    while servers.store(1).erase_some(50, 0).await.expect("erase_some must succeed").is_some() {}
    let books = request_audit(h).await;
    assert_eq!((books.erased, books.in_flight, books.jobs), (60, 10, 10), "{books:?}");
    assert_eq!(dead_ids(h).await, []);
    for id in &ids {
        assert_eq!(h.requests().find_request(*id).await.expect("an answer"), None);
    }
    assert!(claim_named(h, &ids).await.jobs.is_empty(), "a broker may still have their ids");
    assert_eq!(claim_named(h, &kept).await.jobs.len(), 10, "another tenant's stay");
}

pub async fn a_dead_letter_is_replayed_or_discarded_once<H: HasRequests>() {
    let servers = Servers::<H>::open().await;
    let h = &servers.h;
    let ids: Vec<_> =
        create_dead_requests(h, submissions(h, "k", 20)).await.iter().map(|job| job.id).collect();
    let calls = (0..8).map(|n| {
        let (store, ids) = (servers.store(n / 2), ids.clone());
        async move {
            if n % 2 == 0 {
                return replay_some(&*store, 5).await.len();
            }
            let mut changed = 0;
            for id in ids.iter().skip(n) {
                let one = if n % 4 == 1 {
                    replay_one(&*store, *id).await
                } else {
                    store.discard_request(*id).await.expect("discard_request must succeed")
                };
                changed += usize::from(one);
            }
            changed
        }
    });
    let changed: usize = run_concurrently(calls).await.into_iter().sum();
    assert_eq!(changed + dead_ids(h).await.len(), 20, "each letter is replayed or discarded once");
    let books = request_audit(h).await;
    assert_eq!(claim(h, 100).await.len() as u64, books.in_flight, "{books:?}");
    assert_eq!((books.accepted, books.in_flight + books.dead), (20, 20));
}

pub async fn a_job_claimed_while_the_broker_takes_it_stays_claimed<H: HasRequests>() {
    let servers = Servers::<H>::open().await;
    let h = &servers.h;
    let batch = submissions(h, "k", 40)
        .into_iter()
        .map(|submission| Submit { needs_broker: true, ..submission })
        .collect();
    let ids: Vec<_> = accept_batch(h, batch).await.iter().map(|receipt| receipt.id).collect();
    let calls = (0..20).map(|n| {
        let (store, ids) = (servers.store(n / 2), ids.clone());
        async move {
            if n % 2 == 0 {
                store.mark_enqueued(&ids).await.expect("mark_enqueued must succeed");
                return 0;
            }
            let claimed = store.claim_jobs(&[room(DOWNSTREAM, 5)], &ClaimOrder::default(), &policy()).await;
            claimed.expect("claim_jobs must succeed").jobs.len()
        }
    });
    let claimed: usize = run_concurrently(calls).await.into_iter().sum();
    let rest = claim(h, 100).await.len();
    assert_eq!(claimed + rest, 40);
    for id in ids {
        let request = get_request(h, id).await;
        assert_eq!((request.status, request.attempts), (RequestStatus::InProgress, 1));
    }
}

/// Calls each kind of operation once, chosen by `n`.
async fn run_mixed_load(store: &dyn RequestStore, batch: Vec<Submit>, n: usize) {
    store.submit_batch(batch.into()).await.expect("submit_batch must succeed");
    let claimed = store.claim_jobs(&[room(DOWNSTREAM, 6)], &ClaimOrder::default(), &policy()).await;
    let jobs = claimed.expect("claim_jobs must succeed").jobs;
    let reports = jobs.iter().enumerate().map(|(m, job)| match (n + m) % 4 {
        0 | 1 => success(job),
        2 => super::fixtures::rejection(job),
        _ => outage(job),
    });
    let outcomes = store
        .report_batch(reports.collect(), &single_attempt_policy())
        .await
        .expect("report_batch must succeed");
    assert!(outcomes.iter().all(Result::is_ok), "the holder's reports count: {outcomes:?}");
    match n % 4 {
        0 => drop(replay_some(store, 3).await),
        1 => {
            let letters = store.dead_requests(None, 1, usize::MAX).await.expect("dead_requests must succeed");
            for letter in letters {
                store.discard_request(letter.request.id).await.expect("discard_request must succeed");
            }
        }
        2 => store.purge_requests(Duration::ZERO, 4).await.map(drop).expect("purge_requests must succeed"),
        _ => {
            let books = store.audit_requests().await.expect("audit_requests must succeed");
            assert_eq!(
                (books.difference(), books.jobs),
                (0, books.in_flight),
                "the books balance under load: {books:?}"
            );
        }
    }
}

pub async fn everything_at_once_keeps_the_books<H: HasRequests>() {
    let servers = Servers::<H>::open().await;
    let h = &servers.h;
    let clock = h.clock().clone();
    let calls = (0..8).map(|n| {
        let (store, clock) = (servers.store(n), clock.clone());
        let mut batches: Vec<_> = (0..10).map(|m| submissions(h, &format!("{n}-{m}"), 5)).collect();
        async move {
            for (m, batch) in batches.drain(..).enumerate() {
                run_mixed_load(&*store, batch, n + m).await;
                clock.advance(Duration::from_millis(2));
            }
        }
    });
    run_concurrently(calls).await;
    let counted = request_audit(h).await;
    assert_eq!(counted.accepted, 400);
    assert!(counted.completed > 0 && counted.failed > 0 && counted.purged > 0, "{counted:?}");
    h.clock().advance(super::fixtures::DAY);
    let active_jobs = ActiveJobs::default();
    let left = work(servers.store(1), active_jobs, room(DOWNSTREAM, 50)).await;
    assert_eq!(left as u64, counted.in_flight, "the remaining requests can be completed");
    assert_eq!(request_audit(h).await.in_flight, 0);
}
