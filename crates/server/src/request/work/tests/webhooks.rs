//! Callback URLs are called when their requests are final.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use weir_core::webhook::{self, SignedMessage, SigningSecret};
use weir_core::{ManualClock, TenantId, Timestamp};
use weir_queue::{MessageSource, Queue};
use weir_store::request::{RequestStore, Submit, WEBHOOKS_TOPIC};

use super::fixtures::{FakeDownstream, Fixture, SECRET, answer, until};
use crate::request::work::webhooks::{WebhookDependencies, Webhooks};

fn start(fixture: &Fixture) -> CancellationToken {
    start_task(fixture).0
}

/// Starts to send; the task ends some time after the token is cancelled.
fn start_task(fixture: &Fixture) -> (CancellationToken, JoinHandle<()>) {
    let parts = WebhookDependencies {
        queue: Arc::new(fixture.engine.clone()),
        store: Arc::new(fixture.engine.clone()),
        keyring: Arc::clone(&fixture.keyring),
        secret: fixture.secret(),
        clock: fixture.engine.clock(),
        steady_clock: fixture.engine.clock(),
        metrics: fixture.metrics.clone(),
    };
    let closing = CancellationToken::new();
    let task = tokio::spawn(Webhooks::new(parts, &fixture.settings).run(closing.clone()));
    (closing, task)
}

/// Completes requests of a tenant with this callback URL.
async fn complete_some(fixture: &Fixture, tenant: &str, callback_url: &str, count: usize) {
    let submission = || {
        let tenant = TenantId::parse(tenant).unwrap();
        Submit { tenant, callback_url: Some(callback_url.to_owned()), ..fixture.submission("1") }
    };
    let queued = || async { fixture.engine.audit(WEBHOOKS_TOPIC).await.unwrap().accepted };
    let expected = queued().await + count as u64;
    let worker = fixture.start();
    let batch: Vec<_> = std::iter::repeat_with(submission).take(count).collect();
    fixture.engine.submit_batch(batch.into()).await.unwrap();
    until("their webhooks are queued", || async { queued().await == expected }).await;
    worker.stop().await;
}

async fn done(fixture: &Fixture) -> u64 {
    fixture.engine.audit(WEBHOOKS_TOPIC).await.unwrap().done
}

/// Completes a request with this callback URL, and starts to send webhooks.
async fn complete(fixture: &Fixture, callback_url: &str) -> (weir_core::RequestId, CancellationToken) {
    let worker = fixture.start();
    let url = Some(callback_url.to_owned());
    let id = fixture.submit_with(r#"{"a":1}"#, |submit| submit.callback_url = url).await;
    fixture.end_of(id).await;
    worker.stop().await;
    (id, start(fixture))
}

async fn dead_reason(fixture: &Fixture) -> String {
    let is_dead = || async { fixture.engine.audit(WEBHOOKS_TOPIC).await.unwrap().dead == 1 };
    until("the webhook is a dead letter", is_dead).await;
    fixture.engine.dead_letters(None, 1, usize::MAX).await.unwrap()[0].reason.clone()
}

#[tokio::test]
async fn a_final_status_is_sent_as_a_signed_webhook() {
    let receiver = FakeDownstream::always(204, "").await;
    let mut fixture = Fixture::new(None);
    fixture.settings.allow_private = true;
    let (id, closing) = complete(&fixture, &receiver.url).await;
    let is_done = || async { fixture.engine.audit(WEBHOOKS_TOPIC).await.unwrap().done == 1 };
    until("the webhook is done", is_done).await;
    closing.cancel();
    let (headers, body) = receiver.seen(0);
    let header = |name: &str| headers[name].to_str().unwrap();
    let message = SignedMessage {
        id: header("webhook-id"),
        timestamp: header("webhook-timestamp"),
        signatures: header("webhook-signature"),
        body: &body,
    };
    let verify = |secret: &str| {
        webhook::verify(&[SigningSecret::parse(secret).unwrap()], message, fixture.engine.clock().now())
    };
    let of_tenant = |name: &str| fixture.secret().tenant_secret(&TenantId::parse(name).unwrap());
    assert_eq!(verify(&of_tenant("acme")), Ok(()));
    assert!(verify(&of_tenant("rival")).is_err() && verify(SECRET).is_err(), "nobody else could sign it");
    assert!(message.id.starts_with(&id.to_string()));
    let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(body["type"], "request.completed");
    assert_eq!(body["data"]["requestId"], id.to_string());
    assert_eq!(body["data"]["status"], "COMPLETED");
    assert_eq!(body["data"]["result"], serde_json::json!({"a": 1}));
    assert_eq!(body["data"]["failureCode"], serde_json::Value::Null);
    assert_eq!((&body["timestamp"], &body["data"]["attempts"]), (&body["data"]["updatedAt"], &1.into()));
    assert_eq!(receiver.calls(), 1);
}

#[tokio::test]
async fn an_unreachable_receiver_makes_a_dead_letter() {
    let receiver = FakeDownstream::always(410, "").await;
    let mut fixture = Fixture::new(None);
    fixture.settings.allow_private = true;
    let (_, closing) = complete(&fixture, &receiver.url).await;
    assert_eq!(dead_reason(&fixture).await, "the receiver answered 410");
    assert_eq!(receiver.calls(), 1);
    closing.cancel();
}

#[tokio::test]
async fn a_failing_receiver_gets_the_same_webhook_again() {
    let receiver = FakeDownstream::start(|n| async move { answer(if n == 0 { 503 } else { 200 }, "") }).await;
    let clock = ManualClock::at(Timestamp::from_seconds(1_767_225_600));
    let mut fixture = Fixture::with_clock(None, clock.clone());
    fixture.settings.allow_private = true;
    let (_, closing) = complete(&fixture, &receiver.url).await;
    until("it was sent", || async { receiver.calls() == 1 }).await;
    let is_done = || async {
        clock.advance(Duration::from_secs(1));
        fixture.engine.audit(WEBHOOKS_TOPIC).await.unwrap().done == 1
    };
    until("the webhook was sent again", is_done).await;
    closing.cancel();
    let (first, second) = (receiver.seen(0), receiver.seen(1));
    assert_eq!(first.0["webhook-id"], second.0["webhook-id"]);
    assert_eq!(first.1, second.1);
    assert_ne!(first.0["webhook-signature"], second.0["webhook-signature"], "signed at another time");
}

#[tokio::test]
async fn a_callback_url_into_this_network_is_never_called() {
    let receiver = FakeDownstream::always(204, "").await;
    let fixture = Fixture::new(None);
    let (_, closing) = complete(&fixture, &receiver.url).await;
    assert_eq!(dead_reason(&fixture).await, "the address is private or reserved");
    assert_eq!(receiver.calls(), 0);
    closing.cancel();
}

/// Settings under which no call ends by itself while a test runs.
fn with_long_timeouts() -> Fixture {
    let mut fixture = Fixture::new(None);
    fixture.settings.allow_private = true;
    fixture.settings.webhook_timeout = Duration::from_secs(600);
    fixture
}

#[tokio::test]
async fn a_silent_receiver_does_not_delay_other_tenants() {
    let stuck = FakeDownstream::start(|_| std::future::pending()).await;
    let quick = FakeDownstream::always(204, "").await;
    let fixture = with_long_timeouts();
    complete_some(&fixture, "slow", &stuck.url, 300).await;
    let closing = start(&fixture);
    until("its webhooks are sent", || async { stuck.calls() > 0 }).await;
    complete_some(&fixture, "other", &quick.url, 1).await;
    until("another tenant's webhook is settled", || async { done(&fixture).await == 1 }).await;
    assert_eq!(quick.calls(), 1);
    complete_some(&fixture, "slow", &quick.url, 1).await;
    until("and one to another receiver of the same tenant", || async { done(&fixture).await == 2 }).await;
    assert!(stuck.calls() < 64, "it has {} of 64 places", stuck.calls());
    closing.cancel();
}

#[tokio::test]
async fn a_backlog_larger_than_one_claim_does_not_delay_other_tenants() {
    let stuck = FakeDownstream::start(|_| std::future::pending()).await;
    let quick = FakeDownstream::always(204, "").await;
    let fixture = with_long_timeouts();
    complete_some(&fixture, "slow", &stuck.url, 1_200).await;
    complete_some(&fixture, "other", &quick.url, 1).await;
    let closing = start(&fixture);
    until("another tenant's webhook is settled", || async { done(&fixture).await == 1 }).await;
    let books = fixture.engine.audit(WEBHOOKS_TOPIC).await.unwrap();
    assert_eq!((books.in_flight, books.dead), (1_200, 0), "none is lost");
    closing.cancel();
}

#[tokio::test]
async fn a_webhook_is_settled_when_its_own_call_has_ended() {
    let receiver = FakeDownstream::start(|n| async move {
        if n == 0 { std::future::pending().await } else { answer(204, "") }
    })
    .await;
    let fixture = with_long_timeouts();
    complete_some(&fixture, "acme", &receiver.url, 200).await;
    let closing = start(&fixture);
    until("all others are settled while one call is running", || async { done(&fixture).await == 199 }).await;
    assert_eq!(receiver.calls(), 200);
    closing.cancel();
}

#[tokio::test]
async fn a_stop_releases_waiting_webhooks_to_other_servers() {
    let (open, opened) = tokio::sync::watch::channel(false);
    let receiver = FakeDownstream::start(move |_| {
        let mut opened = opened.clone();
        async move {
            opened.wait_for(|is_open| *is_open).await.unwrap();
            answer(204, "")
        }
    })
    .await;
    let fixture = with_long_timeouts();
    complete_some(&fixture, "acme", &receiver.url, 100).await;
    let closing = start(&fixture);
    until("some calls are running", || async { receiver.calls() > 0 }).await;
    closing.cancel();
    let next = start(&fixture);
    open.send(true).unwrap();
    until("all are settled, once each", || async { done(&fixture).await == 100 }).await;
    assert_eq!(receiver.calls(), 100);
    next.cancel();
}

#[tokio::test]
async fn a_busy_tenant_with_fast_receivers_does_not_delay_others() {
    const QUEUED: usize = 4_000;
    let answers = Arc::new(tokio::sync::Semaphore::new(0));
    let permits = Arc::clone(&answers);
    let busy = FakeDownstream::start(move |_| {
        let permits = Arc::clone(&permits);
        async move {
            permits.acquire().await.unwrap().forget();
            answer(204, "")
        }
    })
    .await;
    let other = FakeDownstream::always(204, "").await;
    let fixture = with_long_timeouts();
    complete_some(&fixture, "busy", &busy.url, QUEUED).await;
    complete_some(&fixture, "other", &other.url, 1).await;
    let closing = start(&fixture);
    until("the busy tenant's are called", || async { busy.calls() > 0 }).await;
    // Its calls end one after the other, each as soon as the one before has made room for the next.
    while other.calls() == 0 {
        let before = busy.calls();
        assert!(before < QUEUED / 4, "the other tenant waits behind {before} calls");
        answers.add_permits(1);
        until("the next is called", || async { busy.calls() > before || other.calls() > 0 }).await;
    }
    closing.cancel();
}

fn count(fixture: &Fixture, outcome: &'static str) -> u64 {
    fixture.metrics.webhooks(outcome)
}

/// Sends webhooks to a receiver that never answers, beginning so long after their requests have ended, until each was either
/// called or deferred. Returns how many were called, and how many spent an attempt.
async fn send_to_a_stuck_receiver(begin_after: Duration) -> (usize, usize) {
    const QUEUED: usize = 60;
    let stuck = FakeDownstream::start(|_| std::future::pending()).await;
    let clock = ManualClock::at(Timestamp::from_seconds(1_767_225_600));
    let mut fixture = Fixture::with_clock(None, clock.clone());
    fixture.settings.allow_private = true;
    fixture.settings.webhook_timeout = Duration::from_secs(3);
    complete_some(&fixture, "acme", &stuck.url, QUEUED).await;
    clock.advance(begin_after);
    let (closing, sending) = start_task(&fixture);
    let settled = || async { count(&fixture, "retried") + count(&fixture, "put_off") >= QUEUED as u64 };
    until("all are settled", settled).await;
    closing.cancel();
    sending.await.unwrap();
    // Past all waits.
    clock.advance(Duration::from_secs(3_600));
    let messages =
        fixture.engine.claim(WEBHOOKS_TOPIC, QUEUED, Duration::from_secs(60)).await.unwrap().messages;
    assert_eq!(messages.len(), QUEUED);
    (stuck.calls(), messages.iter().filter(|message| message.attempts == 1).count())
}

#[tokio::test]
async fn a_paused_receiver_costs_its_webhooks_no_attempt() {
    let (calls, attempts) = send_to_a_stuck_receiver(Duration::ZERO).await;
    assert!(calls > 0 && calls < 60, "{calls} of 60 were called before it was left alone");
    assert_eq!(attempts, calls);
}

#[tokio::test]
async fn after_a_day_a_paused_receiver_costs_attempts() {
    let (calls, attempts) = send_to_a_stuck_receiver(Duration::from_secs(24 * 3_600)).await;
    assert!(calls < 60, "{calls} of 60 were called");
    assert_eq!(attempts, 60, "so it becomes a dead letter eventually");
}
