//! Fair claims: tenants take turns, and express jobs need not wait for one.

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use weir_core::RequestId;
use weir_core::request::turn::EXPRESS_JOBS;
use weir_store::request::{
    CancelOutcome, ClaimOrder, ClaimedJobs, Job, Submit, TenantCapacity, TenantRule, TenantRules,
};

use super::fixtures::{
    DOWNSTREAM, accept_batch, accept_one, cancel, claim_named, create_dead_requests, erase,
    expect_nothing_due, not_called, outage, policy, report_batch, report_one, request_audit, room,
    submission_for, success, tenant,
};
use crate::HasRequests;

/// How many jobs of each tenant were claimed.
fn by_tenant<'a>(jobs: impl IntoIterator<Item = &'a Job>) -> BTreeMap<&'a str, usize> {
    let mut counts = BTreeMap::new();
    for job in jobs {
        *counts.entry(job.tenant.as_str()).or_default() += 1;
    }
    counts
}

fn submissions_of<H: HasRequests>(h: &H, tenant: &str, count: usize) -> Vec<Submit> {
    (0..count).map(|n| submission_for(h, tenant, &format!("{tenant}-{n}"), "content")).collect()
}

fn rules(of: &[(&str, u32, Option<usize>)]) -> Arc<TenantRules> {
    let rule = |(tenant, weight, concurrency): &(&str, u32, Option<usize>)| {
        let weight = NonZeroU32::new(*weight).expect("a weight is not 0");
        ((*tenant).to_owned(), TenantRule { weight, concurrency: *concurrency })
    };
    let named: HashMap<_, _> = of.iter().map(rule).collect();
    Arc::new(TenantRules { named, ..TenantRules::default() })
}

fn order(of: &[(&str, u32, Option<usize>)]) -> ClaimOrder {
    ClaimOrder { tenants: TenantCapacity::new(rules(of)), ..ClaimOrder::default() }
}

/// Claims as a worker does: the next claim goes on where this one ended.
async fn claim_in<H: HasRequests>(h: &H, order: &mut ClaimOrder, jobs: usize) -> ClaimedJobs {
    let claimed = h.requests().claim_jobs(&[room(DOWNSTREAM, jobs)], order, &policy()).await;
    let mut claimed = claimed.expect("claim_jobs must succeed");
    order.turns.append(&mut claimed.turns);
    claimed
}

async fn claim_express<H: HasRequests>(h: &H, jobs: usize) -> Vec<Job> {
    let claimed =
        h.requests().claim_express(&[room(DOWNSTREAM, jobs)], &TenantCapacity::default(), &policy()).await;
    claimed.expect("claim_express must succeed").jobs
}

pub async fn a_tenant_with_many_jobs_leaves_the_others_their_turns<H: HasRequests>() {
    let h = H::open().await;
    accept_batch(&h, submissions_of(&h, "big", 300)).await;
    h.clock().advance(Duration::from_secs(60));
    accept_batch(&h, [submissions_of(&h, "few", 3), submissions_of(&h, "some", 40)].concat()).await;
    let mut order = ClaimOrder::default();
    let claimed = claim_in(&h, &mut order, 30).await;
    let counts = BTreeMap::from([("big", 14), ("few", 3), ("some", 13)]);
    assert_eq!(
        by_tenant(&claimed.jobs),
        counts,
        "whoever has come first, and what one does not need is not lost"
    );
    let claimed = claim_in(&h, &mut order, 30).await;
    assert_eq!(by_tenant(&claimed.jobs), BTreeMap::from([("big", 15), ("some", 15)]));
    let claimed = claim_in(&h, &mut order, 400).await;
    assert_eq!(by_tenant(&claimed.jobs), BTreeMap::from([("big", 271), ("some", 12)]), "all that there is");
    expect_nothing_due(&h, "all are leased").await;
}

pub async fn every_one_of_many_tenants_has_its_turn<H: HasRequests>() {
    let h = H::open().await;
    let tenants: Vec<String> = (0..150).map(|n| format!("tenant {n:03}")).collect();
    accept_batch(&h, tenants.iter().flat_map(|tenant| submissions_of(&h, tenant, 2)).collect()).await;
    let mut order = ClaimOrder::default();
    for round in 0..2 {
        let mut served = Vec::new();
        for _ in 0..15 {
            let claimed = claim_in(&h, &mut order, 10).await;
            served.extend(claimed.jobs.iter().map(|job| job.tenant.as_str().to_owned()));
        }
        served.sort_unstable();
        assert_eq!(served, tenants, "each has had one turn in round {round}");
    }
}

pub async fn turns_are_as_long_as_the_weights_say<H: HasRequests>() {
    let h = H::open().await;
    for tenant in ["a", "b", "c"] {
        accept_batch(&h, submissions_of(&h, tenant, 60)).await;
    }
    let mut order = order(&[("b", 3, None), ("c", 6, None)]);
    let mut jobs = Vec::new();
    for _ in 0..10 {
        // Less than a turn of c: it goes on in the next claim.
        jobs.extend(claim_in(&h, &mut order, 4).await.jobs);
    }
    assert_eq!(by_tenant(&jobs), BTreeMap::from([("a", 4), ("b", 12), ("c", 24)]));
}

pub async fn a_tenant_has_no_more_calls_than_it_may_have<H: HasRequests>() {
    let h = H::open().await;
    accept_batch(&h, [submissions_of(&h, "a", 20), submissions_of(&h, "b", 20)].concat()).await;
    let mut order = order(&[("a", 1, Some(3))]);
    let claimed = claim_in(&h, &mut order, 10).await;
    assert_eq!(by_tenant(&claimed.jobs), BTreeMap::from([("a", 3), ("b", 7)]));
    order.tenants.start("a", 3);
    let claimed = claim_in(&h, &mut order, 50).await;
    assert_eq!((by_tenant(&claimed.jobs), claimed.is_held_back), (BTreeMap::from([("b", 13)]), true));
    let claimed = claim_in(&h, &mut order, 50).await;
    assert_eq!((claimed.jobs.len(), claimed.is_held_back), (0, true), "the rest has to wait");
    order.tenants.end("a", 1);
    assert_eq!(by_tenant(&claim_in(&h, &mut order, 50).await.jobs), BTreeMap::from([("a", 1)]));
}

pub async fn a_named_job_of_a_tenant_without_capacity_is_left<H: HasRequests>() {
    let h = H::open().await;
    let receipts = accept_batch(&h, submissions_of(&h, "a", 3)).await;
    let ids: Vec<RequestId> = receipts.iter().map(|receipt| receipt.id).collect();
    let tenants = TenantCapacity::new(rules(&[("a", 1, Some(2))]));
    let claimed =
        h.requests().claim_named(&ids, &tenants, &policy()).await.expect("claim_named must succeed");
    assert_eq!((claimed.jobs.len(), claimed.is_held_back), (2, true));
    assert_eq!(claim_named(&h, &ids).await.jobs.len(), 1, "it was not leased");
}

pub async fn a_job_that_was_put_off_has_its_turn_when_it_is_due<H: HasRequests>() {
    let h = H::open().await;
    let id = accept_one(&h, submission_for(&h, "quiet", "k", "k")).await;
    let job = claim_named(&h, &[id]).await.jobs.remove(0);
    accept_batch(&h, submissions_of(&h, "big", 50)).await;
    report_one(&h, outage(&job)).await.expect("the report is accepted");
    let mut order = ClaimOrder::default();
    assert_eq!(
        by_tenant(&claim_in(&h, &mut order, 4).await.jobs),
        BTreeMap::from([("big", 4)]),
        "it is not due"
    );
    h.clock().advance(Duration::from_secs(5));
    let counts = BTreeMap::from([("big", 2), ("quiet", 1)]);
    assert_eq!(by_tenant(&claim_in(&h, &mut order, 3).await.jobs), counts, "its next attempt");
    h.clock().advance(policy().lease);
    let counts = BTreeMap::from([("big", 2), ("quiet", 1)]);
    assert_eq!(by_tenant(&claim_in(&h, &mut order, 3).await.jobs), counts, "its worker has vanished");
}

pub async fn what_is_cancelled_or_erased_has_no_turn_and_a_replay_has_one<H: HasRequests>() {
    let h = H::open().await;
    let ids: Vec<RequestId> =
        accept_batch(&h, submissions_of(&h, "a", 20)).await.iter().map(|receipt| receipt.id).collect();
    let gone = accept_batch(&h, submissions_of(&h, "b", 6)).await[0].id;
    // One is parked, one is leased, two wait as express jobs.
    for id in [ids[0], ids[1], gone] {
        let job = claim_named(&h, &[id]).await.jobs.remove(0);
        if id != ids[1] {
            report_one(&h, outage(&job)).await.expect("the report is accepted");
        }
    }
    for id in &ids[..4] {
        assert_eq!(cancel(&h, *id).await, CancelOutcome::Cancelled);
    }
    assert_eq!(erase(&h, &tenant("b")).await.len(), 6);
    let dead = create_dead_requests(&h, submissions_of(&h, "c", 3)).await;
    let dead: Vec<RequestId> = dead.iter().map(|job| job.id).collect();
    h.requests().replay_requests(&dead).await.expect("replay_requests must succeed");
    let mut order = ClaimOrder::default();
    let turns = claim_in(&h, &mut order, 4).await.jobs;
    assert_eq!(by_tenant(&turns), BTreeMap::from([("a", 2), ("c", 2)]));
    let express = claim_express(&h, 100).await;
    assert_eq!(by_tenant(&express), BTreeMap::from([("a", EXPRESS_JOBS - 4 - 2)]), "a replay is none");
    let rest = claim_in(&h, &mut order, 100).await.jobs;
    assert_eq!(by_tenant(&rest), BTreeMap::from([("a", 20 - EXPRESS_JOBS), ("c", 1)]), "none is left behind");
    h.clock().advance(Duration::from_secs(5));
    assert!(claim_in(&h, &mut order, 100).await.jobs.is_empty(), "what was parked is gone, too");
    let books = request_audit(&h).await;
    assert_eq!((books.in_flight, books.cancelled, books.erased), (19, 4, 6), "{books:?}");
}

pub async fn jobs_of_tenants_with_few_are_express<H: HasRequests>() {
    let h = H::open().await;
    accept_batch(&h, submissions_of(&h, "big", 50)).await;
    h.clock().advance(Duration::from_secs(1));
    let quiet = accept_one(&h, submission_for(&h, "quiet", "k", "k")).await;
    h.clock().advance(Duration::from_secs(1));
    accept_batch(&h, (50..60).map(|n| submission_for(&h, "big", &format!("{n}"), "more")).collect()).await;
    let first = claim_express(&h, 1).await;
    assert_eq!(first.iter().map(|job| job.id).collect::<Vec<_>>(), [quiet], "the last accepted first");
    let rest = claim_express(&h, 100).await;
    assert_eq!(by_tenant(&rest), BTreeMap::from([("big", EXPRESS_JOBS)]), "only its first ones");
    assert!(claim_express(&h, 100).await.is_empty(), "each is claimed once");
    let jobs = claim_in(&h, &mut ClaimOrder::default(), 100).await.jobs;
    assert_eq!(jobs.len(), 60 - EXPRESS_JOBS, "the others have their turns");
    report_batch(&h, jobs.iter().chain(&rest).chain(&first).map(success).collect()).await;
    let again = accept_one(&h, submission_for(&h, "big", "again", "again")).await;
    assert_eq!(
        claim_express(&h, 9).await.iter().map(|job| job.id).collect::<Vec<_>>(),
        [again],
        "it has no more"
    );
}

pub async fn express_jobs_are_claimed_by_turns_too<H: HasRequests>() {
    let h = H::open().await;
    accept_batch(&h, submissions_of(&h, "a", EXPRESS_JOBS)).await;
    let jobs = claim_in(&h, &mut ClaimOrder::default(), 100).await.jobs;
    assert_eq!(jobs.len(), EXPRESS_JOBS);
    assert!(claim_express(&h, 100).await.is_empty(), "they are leased");
    // A job that was put off is no express job any more.
    report_one(&h, not_called(&jobs[0], Duration::ZERO)).await.expect("the report is accepted");
    assert!(claim_express(&h, 100).await.is_empty());
    assert_eq!(claim_in(&h, &mut ClaimOrder::default(), 100).await.jobs.len(), 1);
}

pub async fn parked_jobs_do_not_count_against_express_jobs<H: HasRequests>() {
    let h = H::open().await;
    accept_batch(&h, submissions_of(&h, "a", EXPRESS_JOBS)).await;
    let jobs = claim_in(&h, &mut ClaimOrder::default(), 100).await.jobs;
    report_batch(&h, jobs.iter().map(|job| not_called(job, Duration::from_secs(3_600))).collect()).await;
    accept_one(&h, submission_for(&h, "a", "next", "next")).await;
    assert_eq!(claim_express(&h, 100).await.len(), 1, "its others wait for something else");
}

pub async fn waiters_are_woken_by_express_jobs_alone<H: HasRequests>() {
    const LONG: Duration = Duration::from_secs(3_600);
    let h = H::open().await;
    accept_batch(&h, submissions_of(&h, "a", EXPRESS_JOBS)).await;
    // If the notification were lost, this would hang until the test runner's timeout.
    h.requests().wait_for_express_jobs(LONG).await;
    accept_batch(&h, (20..40).map(|n| submission_for(&h, "a", &format!("{n}"), "more")).collect()).await;
    let waited =
        tokio::time::timeout(Duration::from_millis(20), h.requests().wait_for_express_jobs(LONG)).await;
    assert!(waited.is_err(), "these are no express jobs");
}
