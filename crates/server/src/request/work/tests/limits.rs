//! Downstreams with limits and credentials of their own.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use weir_core::RequestId;
use weir_core::request::state::RequestStatus;
use weir_core::webhook::{SignedMessage, SigningSecret, verify};

use super::fixtures::{FakeDownstream, Fixture, SECRET, answer, until};
use crate::request::settings::DownstreamSettings;

/// Adds a downstream of this name to the settings.
fn add(fixture: &mut Fixture, name: &str, url: &str, change: impl FnOnce(&mut DownstreamSettings)) {
    let mut downstream =
        DownstreamSettings { url: Some(url.parse().unwrap()), ..fixture.settings.downstream.clone() };
    change(&mut downstream);
    fixture.settings.downstreams.insert(name.to_owned(), downstream);
}

async fn submit_many(fixture: &Fixture, downstream: &str, count: usize) -> Vec<RequestId> {
    let mut ids = Vec::with_capacity(count);
    for _ in 0..count {
        ids.push(fixture.submit_with("{}", |submit| submit.downstream = downstream.to_owned()).await);
    }
    ids
}

async fn expect_completed_at_once(fixture: &Fixture, ids: &[RequestId]) {
    for id in ids {
        let request = fixture.end_of(*id).await;
        assert_eq!((request.status, request.attempts), (RequestStatus::Completed, 1), "no attempt is lost");
    }
}

#[tokio::test]
async fn a_rate_spreads_the_calls_of_its_downstream_and_delays_no_other() {
    let (slow, quick) = (FakeDownstream::always(200, "").await, FakeDownstream::always(200, "").await);
    let mut fixture = Fixture::new(None);
    add(&mut fixture, "slow", &slow.url, |of| of.per_second = NonZeroU32::new(5));
    add(&mut fixture, "quick", &quick.url, |_| {});
    let limited = submit_many(&fixture, "slow", 8).await;
    let others = submit_many(&fixture, "quick", 50).await;
    let begun = Instant::now();
    let worker = fixture.start();
    expect_completed_at_once(&fixture, &others).await;
    assert!(slow.calls() < 8, "the others did not wait for it");
    expect_completed_at_once(&fixture, &limited).await;
    worker.stop().await;
    // One at once, then one every 200 ms.
    assert!(begun.elapsed() >= Duration::from_millis(7 * 200), "{:?}", begun.elapsed());
    assert_eq!((slow.calls(), fixture.metrics.retries.get()), (8, 0));
}

#[tokio::test]
async fn a_downstream_with_a_concurrency_has_no_more_calls_and_uses_all_of_them() {
    let (running, most) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
    let server = FakeDownstream::start({
        let (running, most) = (Arc::clone(&running), Arc::clone(&most));
        move |_| {
            let (running, most) = (Arc::clone(&running), Arc::clone(&most));
            async move {
                most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                tokio::time::sleep(Duration::from_millis(5)).await;
                running.fetch_sub(1, Ordering::SeqCst);
                answer(200, "")
            }
        }
    })
    .await;
    let mut fixture = Fixture::new(None);
    add(&mut fixture, "narrow", &server.url, |of| of.concurrency = Some(2));
    let narrow = submit_many(&fixture, "narrow", 30).await;
    let others = submit_many(&fixture, "", 30).await;
    let worker = fixture.start();
    expect_completed_at_once(&fixture, &others).await;
    expect_completed_at_once(&fixture, &narrow).await;
    worker.stop().await;
    assert_eq!((most.load(Ordering::SeqCst), server.calls()), (2, 30));
}

#[tokio::test]
async fn a_full_downstream_does_not_hold_up_the_jobs_of_others() {
    let stuck = FakeDownstream::start(|_| std::future::pending()).await;
    let quick = FakeDownstream::always(200, "").await;
    let mut fixture = Fixture::new(None);
    fixture.settings.downstream.read_timeout = Duration::from_secs(20);
    add(&mut fixture, "stuck", &stuck.url, |of| of.concurrency = Some(1));
    add(&mut fixture, "quick", &quick.url, |_| {});
    submit_many(&fixture, "stuck", 20).await;
    let worker = fixture.start();
    until("it is called", || async { stuck.calls() == 1 }).await;
    let others = submit_many(&fixture, "quick", 100).await;
    expect_completed_at_once(&fixture, &others).await;
    assert_eq!(stuck.calls(), 1, "one at a time");
    worker.kill().await;
}

#[tokio::test]
async fn a_downstream_gets_its_headers_and_a_signature_with_every_attempt() {
    let server = FakeDownstream::start(|n| async move { answer(if n == 0 { 503 } else { 200 }, "") }).await;
    let mut fixture = Fixture::new(None);
    add(&mut fixture, "bank", &server.url, |of| {
        of.sign = true;
        of.headers.insert("authorization", "Bearer s3cret".parse().unwrap());
    });
    let worker = fixture.start();
    let id = submit_many(&fixture, "bank", 1).await.remove(0);
    assert_eq!(fixture.end_of(id).await.status, RequestStatus::Completed);
    worker.stop().await;
    let secret = [SigningSecret::parse(SECRET).unwrap()];
    for n in 0..2 {
        let (headers, body) = server.seen(n);
        let text = |name: &str| headers[name].to_str().unwrap().to_owned();
        assert_eq!((text("authorization"), text("webhook-id")), ("Bearer s3cret".to_owned(), id.to_string()));
        let (timestamp, signatures) = (text("webhook-timestamp"), text("webhook-signature"));
        let message = SignedMessage {
            id: &id.to_string(),
            timestamp: &timestamp,
            signatures: &signatures,
            body: &body,
        };
        verify(&secret, message, fixture.engine.clock().now()).unwrap();
    }
}
