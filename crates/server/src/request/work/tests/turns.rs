//! Tenants that share a worker.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::Semaphore;
use weir_core::TenantId;
use weir_core::request::state::RequestStatus;
use weir_core::request::turn::EXPRESS_JOBS;
use weir_store::request::{
    DownstreamCapacity, RequestStore, Submit, TenantCapacity, TenantRule, TenantRules,
};

use super::fixtures::{FakeDownstream, Fixture, TEST_TIMEOUT, answer, until};
use crate::request::settings::RequestSettings;

const CONCURRENCY: usize = 32;

fn of_tenant(tenant: &str) -> impl Fn(&mut Submit) {
    move |submit| submit.tenant = TenantId::parse(tenant).unwrap()
}

#[tokio::test]
async fn calls_that_do_not_end_leave_some_for_a_tenant_with_little_work() {
    let released = Arc::new(Semaphore::new(0));
    let release = Arc::clone(&released);
    let reserved = CONCURRENCY / 16;
    // All that one tenant may have at once hang; what comes then is answered.
    let downstream = FakeDownstream::start(move |n| {
        let release = Arc::clone(&release);
        async move {
            if n < CONCURRENCY - reserved {
                let _ = release.acquire().await;
            }
            answer(200, "{}")
        }
    })
    .await;
    let mut fixture = Fixture::new(Some(&downstream.url));
    fixture.settings.concurrency = CONCURRENCY;
    fixture.settings.downstream.read_timeout = TEST_TIMEOUT;
    for _ in 0..100 {
        fixture.submit_with("1", of_tenant("big")).await;
    }
    let capacity =
        DownstreamCapacity { downstream: RequestSettings::DEFAULT_DOWNSTREAM.to_owned(), jobs: CONCURRENCY };
    let (tenants, policy) = (TenantCapacity::default(), fixture.settings.policy);
    let express = fixture.engine.claim_express(&[capacity], &tenants, &policy).await.unwrap();
    assert_eq!(express.jobs.len(), EXPRESS_JOBS, "another worker has these");
    let worker = fixture.start();
    until("all that it may have are called", || async { downstream.calls() == CONCURRENCY - reserved }).await;
    for _ in 0..3 {
        let quiet = fixture.submit_with("2", of_tenant("quiet")).await;
        assert_eq!(fixture.end_of(quiet).await.status, RequestStatus::Completed);
    }
    assert_eq!(downstream.calls(), CONCURRENCY - reserved + 3, "nothing else was called");
    released.add_permits(CONCURRENCY);
    worker.stop().await;
}

#[tokio::test]
async fn a_tenant_has_no_more_calls_at_once_than_its_limit() {
    let (running, most) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
    let (counted, seen) = (Arc::clone(&running), Arc::clone(&most));
    let downstream = FakeDownstream::start(move |_| {
        let (running, most) = (Arc::clone(&counted), Arc::clone(&seen));
        async move {
            most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            tokio::task::yield_now().await;
            running.fetch_sub(1, Ordering::SeqCst);
            answer(200, "{}")
        }
    })
    .await;
    let mut fixture = Fixture::new(Some(&downstream.url));
    let limited = TenantRule { weight: NonZeroU32::MIN, concurrency: Some(2) };
    let named = HashMap::from([("limited".to_owned(), limited)]);
    fixture.settings.tenants = Arc::new(TenantRules { named, ..TenantRules::default() });
    let mut ids = Vec::new();
    for _ in 0..30 {
        ids.push(fixture.submit_with("1", of_tenant("limited")).await);
    }
    let worker = fixture.start();
    for id in ids {
        let request = fixture.end_of(id).await;
        assert_eq!((request.status, request.attempts), (RequestStatus::Completed, 1));
    }
    assert!(most.load(Ordering::SeqCst) <= 2, "{most:?} at once");
    worker.stop().await;
}
