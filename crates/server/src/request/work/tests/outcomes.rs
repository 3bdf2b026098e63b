//! The status of a request after each behaviour of its downstream.

use std::time::{Duration, Instant};

use axum::response::Response;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use weir_core::request::retry::RetryBackoff;
use weir_core::request::state::RequestStatus;
use weir_store::request::{ClaimOrder, Request, RequestStore};

use super::fixtures::{FakeDownstream, Fixture, answer, until, url};
use crate::request::settings::RequestSettings;

async fn end_with(downstream: &str) -> (Fixture, Request) {
    let fixture = Fixture::new(Some(downstream));
    let worker = fixture.start();
    let id = fixture.submit("{}").await;
    let request = fixture.end_of(id).await;
    worker.stop().await;
    (fixture, request)
}

fn failure(request: &Request) -> &str {
    &request.failure.as_ref().unwrap().code
}

/// A server that answers each connection with these bytes, and closes it.
async fn raw(bytes: &'static [u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut head = [0; 4_096];
            let _ = stream.read(&mut head).await;
            let _ = stream.write_all(bytes).await;
        }
    });
    url(address)
}

#[tokio::test]
async fn a_downstream_is_called_once_with_the_request_and_its_response_is_the_result() {
    let server = FakeDownstream::always(200, r#"{"ok": true}"#).await;
    let fixture = Fixture::new(Some(&server.url));
    let worker = fixture.start();
    let id = fixture.submit(r#"{"n": 1.0}"#).await;
    let request = fixture.end_of(id).await;
    worker.stop().await;
    assert_eq!(
        (request.status, request.attempts, request.failure.clone()),
        (RequestStatus::Completed, 1, None)
    );
    assert_eq!(fixture.result(&request).unwrap(), br#"{"ok": true}"#);
    assert_eq!(server.calls(), 1);
    let (headers, body) = server.seen(0);
    assert_eq!(headers["idempotency-key"], id.to_string());
    assert_eq!(headers["x-request-id"], id.to_string());
    assert_eq!(headers["content-type"], "application/json");
    let expected = format!(r#"{{"requestId":"{id}","requestType":"t","payload":{{"n": 1.0}}}}"#);
    assert_eq!(body, expected.as_bytes());
    let changes = fixture.changes.lock().clone();
    assert_eq!(changes, [(id, RequestStatus::InProgress), (id, RequestStatus::Completed)]);
}

#[tokio::test]
async fn without_a_downstream_requests_complete_with_their_own_payload() {
    let fixture = Fixture::new(None);
    let worker = fixture.start();
    let mut ids = Vec::new();
    for n in 0..300 {
        ids.push(fixture.submit(&n.to_string()).await);
    }
    for (n, id) in ids.into_iter().enumerate() {
        let request = fixture.end_of(id).await;
        assert_eq!(fixture.result(&request).unwrap(), n.to_string().as_bytes());
    }
    worker.stop().await;
    assert_eq!(fixture.engine.audit_requests().await.unwrap().completed, 300);
}

#[tokio::test]
async fn an_empty_response_completes_without_a_result() {
    let (_, request) = end_with(&FakeDownstream::always(204, "").await.url).await;
    assert_eq!((request.status, request.result), (RequestStatus::Completed, None));
}

#[tokio::test]
async fn a_refusal_or_a_redirect_is_final_at_once() {
    for (status, code) in [(400, "DOWNSTREAM_REJECTED"), (422, "DOWNSTREAM_REJECTED")] {
        let server = FakeDownstream::always(status, "no").await;
        let (_, request) = end_with(&server.url).await;
        assert_eq!((request.status, failure(&request)), (RequestStatus::FailedPermanent, code));
        assert_eq!((server.calls(), request.attempts), (1, 1));
    }
    let elsewhere = FakeDownstream::always(200, "caught").await;
    let location = elsewhere.url.clone();
    let server = FakeDownstream::start(move |_| {
        let location = location.clone();
        async move { Response::builder().status(302).header("location", location).body("".into()).unwrap() }
    });
    let (_, request) = end_with(&server.await.url).await;
    assert_eq!(
        (request.status, failure(&request)),
        (RequestStatus::FailedPermanent, "DOWNSTREAM_REDIRECTED")
    );
    assert_eq!(elsewhere.calls(), 0, "a redirect is not followed");
}

#[tokio::test]
async fn a_failing_downstream_is_retried_until_it_succeeds() {
    let server =
        FakeDownstream::start(|n| async move { answer(if n < 2 { 503 } else { 200 }, "done") }).await;
    let (fixture, request) = end_with(&server.url).await;
    assert_eq!((request.status, request.attempts, server.calls()), (RequestStatus::Completed, 3, 3));
    assert_eq!(fixture.metrics.retries.get(), 2);
}

#[tokio::test]
async fn a_downstream_that_asks_for_time_is_called_again_and_not_before() {
    for status in [408, 425, 429] {
        let server = FakeDownstream::start(move |n| async move {
            let mut answer = answer(if n < 2 { status } else { 200 }, "");
            if n == 0 {
                answer.headers_mut().insert("retry-after", "1".parse().unwrap());
            }
            answer
        });
        let mut fixture = Fixture::new(Some(&server.await.url));
        let (first, longest) = (Duration::from_millis(1), Duration::from_secs(5));
        fixture.settings.policy.backoff = RetryBackoff::new(first, longest).unwrap();
        let begun = Instant::now();
        let worker = fixture.start();
        let id = fixture.submit("{}").await;
        let request = fixture.end_of(id).await;
        worker.stop().await;
        assert_eq!((request.status, request.attempts), (RequestStatus::Completed, 3), "{status}");
        assert!(
            begun.elapsed() >= Duration::from_secs(1),
            "Retry-After counts, not only the backoff of some milliseconds"
        );
        assert_eq!(fixture.metrics.retries.get(), 2);
    }
}

#[tokio::test]
async fn a_downstream_that_always_asks_for_time_ends_as_a_dead_letter() {
    let server = FakeDownstream::always(429, "").await;
    let (fixture, request) = end_with(&server.url).await;
    assert_eq!((request.status, failure(&request)), (RequestStatus::FailedRetryExhausted, "DOWNSTREAM_BUSY"));
    assert_eq!((request.attempts, fixture.engine.count_dead_requests().await.unwrap()), (5, 1));
}

#[tokio::test]
async fn after_five_attempts_a_request_is_a_dead_letter() {
    let server = FakeDownstream::always(500, "").await;
    let (fixture, request) = end_with(&server.url).await;
    assert_eq!(
        (request.status, failure(&request)),
        (RequestStatus::FailedRetryExhausted, "DOWNSTREAM_ERROR")
    );
    assert_eq!((request.attempts, server.calls()), (5, 5));
    assert_eq!(fixture.engine.count_dead_requests().await.unwrap(), 1);
    assert_eq!(fixture.metrics.finished.count(RequestStatus::FailedRetryExhausted), 1);
    assert_eq!(fixture.metrics.duplicate_calls.get(), 0, "a retry is no repetition");
}

#[tokio::test]
async fn refused_connections_and_unreadable_responses_are_retried() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gone = url(listener.local_addr().unwrap());
    drop(listener);
    let (_, request) = end_with(&gone).await;
    assert_eq!((failure(&request), request.attempts), ("DOWNSTREAM_UNREACHABLE", 5));
    for bytes in
        [&b"\x16\x03\x01 what?\r\n\r\n"[..], b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"]
    {
        let (_, request) = end_with(&raw(bytes).await).await;
        assert_eq!((failure(&request), request.attempts), ("DOWNSTREAM_UNREADABLE", 5));
    }
}

#[tokio::test]
async fn a_call_that_times_out_is_retried() {
    let server = FakeDownstream::start(|n| async move {
        if n == 0 {
            std::future::pending::<()>().await;
        }
        answer(200, "done")
    });
    let (_, request) = end_with(&server.await.url).await;
    assert_eq!((request.status, request.attempts), (RequestStatus::Completed, 2));
}

#[tokio::test]
async fn an_endless_body_times_out_and_an_oversized_one_fails_permanently() {
    let server = FakeDownstream::start(|_| async {
        let first = futures_util::stream::iter([Ok::<_, std::io::Error>(bytes::Bytes::from_static(b"{"))]);
        let body = futures_util::StreamExt::chain(first, futures_util::stream::pending());
        Response::new(axum::body::Body::from_stream(body))
    })
    .await;
    let fixture = Fixture::new(Some(&server.url));
    let worker = fixture.start();
    let id = fixture.submit("{}").await;
    let slow = || async { fixture.find(id).await.failure.is_some_and(|f| f.code == "DOWNSTREAM_TIMEOUT") };
    until("the first attempt has timed out", slow).await;
    worker.kill().await;
    let long = FakeDownstream::start(|_| async { Response::new(vec![b'x'; 1024 * 1024 + 1].into()) }).await;
    let (_, request) = end_with(&long.url).await;
    assert_eq!(
        (request.status, failure(&request)),
        (RequestStatus::FailedPermanent, "DOWNSTREAM_RESULT_TOO_LARGE")
    );
}

#[tokio::test]
async fn a_202_leaves_the_request_in_progress_until_the_callback() {
    let server = FakeDownstream::always(202, "later").await;
    let fixture = Fixture::new(Some(&server.url));
    let worker = fixture.start();
    let id = fixture.submit("{}").await;
    let waits = || async { fixture.changes.lock().len() == 2 };
    until("the 202 is reported", waits).await;
    let request = fixture.find(id).await;
    assert_eq!((request.status, request.attempts, request.result), (RequestStatus::InProgress, 1, None));
    worker.stop().await;
    assert_eq!(server.calls(), 1);
    let room = [weir_store::request::DownstreamCapacity {
        downstream: RequestSettings::DEFAULT_DOWNSTREAM.to_owned(),
        jobs: 1,
    }];
    let claimed =
        fixture.engine.claim_jobs(&room, &ClaimOrder::default(), &fixture.settings.policy).await.unwrap();
    assert!(
        claimed.next_due_in.unwrap() > Duration::from_secs(3_600),
        "it is claimed again when a day is over"
    );
}

#[tokio::test]
async fn jobs_of_a_removed_downstream_go_to_the_default() {
    let fixture = Fixture::new(None);
    let id = fixture.submit_with("1", |submit| "retired".clone_into(&mut submit.downstream)).await;
    let worker = fixture.start();
    assert_eq!(fixture.end_of(id).await.status, RequestStatus::Completed);
    worker.stop().await;
}

#[tokio::test]
async fn each_type_has_its_own_downstream() {
    let (mine, others) =
        (FakeDownstream::always(200, "mine").await, FakeDownstream::always(200, "others").await);
    let mut fixture = Fixture::new(Some(&others.url));
    let mut downstream = fixture.settings.downstream.clone();
    downstream.url = Some(mine.url.parse().unwrap());
    fixture.settings.downstreams.insert("pay".to_owned(), downstream);
    let worker = fixture.start();
    let id = fixture.submit_with("1", |submit| "pay".clone_into(&mut submit.downstream)).await;
    let other = fixture.submit("1").await;
    let (own, default) = (fixture.end_of(id).await, fixture.end_of(other).await);
    assert_eq!(fixture.result(&own).unwrap(), b"mine");
    assert_eq!(fixture.result(&default).unwrap(), b"others");
    worker.stop().await;
}
