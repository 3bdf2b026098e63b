//! The layer around an axum service.
#![expect(clippy::unwrap_used, reason = "a test that finds nothing where something must be fails")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::routing::get;
use futures_util::future::join_all;
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use tower::{Layer, Service, ServiceExt};
use weir_core::{ManualClock, Timestamp};
use weir_tower::{Everybody, LimitLayer, Policy, by_header};

const MINUTE: Duration = Duration::from_secs(60);

fn request(key: &str) -> Request<Body> {
    Request::get("/").header("x-api-key", key).body(Body::empty()).unwrap()
}

fn clock() -> ManualClock {
    ManualClock::at(Timestamp::from_seconds(1_700_000_000))
}

fn header<'a>(response: &'a Response<Body>, name: &str) -> &'a str {
    response.headers()[name].to_str().unwrap()
}

#[tokio::test]
async fn callers_are_limited_separately_and_get_headers() {
    let clock = clock();
    let policy = Policy::token_bucket("login", 2, 1, MINUTE).unwrap();
    let layer = LimitLayer::new(policy, by_header("x-api-key")).clock(Arc::new(clock.clone()));
    let app = Router::new().route("/", get(async || "welcome")).layer(layer);
    for left in ["1", "0"] {
        let response = app.clone().oneshot(request("alice")).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(
            (header(&response, "x-ratelimit-limit"), header(&response, "x-ratelimit-remaining")),
            ("1", left)
        );
        assert_eq!(header(&response, "ratelimit-policy"), "\"login\";q=1;w=60");
    }
    clock.advance(Duration::from_millis(1_500));
    let denied = app.clone().oneshot(request("alice")).await.unwrap();
    assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!((header(&denied, "retry-after"), header(&denied, "x-ratelimit-reset")), ("59", "59"));
    assert_eq!(header(&denied, "ratelimit"), "\"login\";r=0;t=59");
    let body: serde_json::Value =
        serde_json::from_slice(&denied.into_body().collect().await.unwrap().to_bytes()).unwrap();
    assert_eq!((&body["status"], &body["code"]), (&429.into(), &"RATE_LIMITED".into()));
    assert_eq!(app.clone().oneshot(request("bob")).await.unwrap().status(), StatusCode::OK);
    clock.advance(Duration::from_millis(58_499));
    assert_eq!(app.clone().oneshot(request("alice")).await.unwrap().status(), StatusCode::TOO_MANY_REQUESTS);
    clock.advance(Duration::from_millis(1));
    assert_eq!(app.clone().oneshot(request("alice")).await.unwrap().status(), StatusCode::OK);
}

#[tokio::test]
async fn requests_without_a_key_share_one_limit() {
    let policy = Policy::fixed_window("all", 1, MINUTE).unwrap();
    let layer = LimitLayer::new(policy, by_header("x-api-key"));
    let app = Router::new().route("/", get(async || "welcome")).layer(layer);
    let nobody = || Request::get("/").body(Body::empty()).unwrap();
    assert_eq!(app.clone().oneshot(nobody()).await.unwrap().status(), StatusCode::OK);
    assert_eq!(app.clone().oneshot(nobody()).await.unwrap().status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(app.clone().oneshot(request("alice")).await.unwrap().status(), StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_calls_never_exceed_the_limit_and_only_allowed_ones_reach_the_service() {
    let reached = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&reached);
    let handler = async move || {
        seen.fetch_add(1, Ordering::SeqCst);
        "welcome"
    };
    let policy = Policy::sliding_window("all", 7, Duration::from_secs(86_400)).unwrap();
    let app = Router::new().route("/", get(handler)).layer(LimitLayer::new(policy, Everybody));
    let calls = (0..200).map(|_| {
        let app = app.clone();
        tokio::spawn(async move { app.oneshot(request("x")).await.unwrap().status() })
    });
    let passed =
        join_all(calls).await.into_iter().filter(|status| *status.as_ref().unwrap() == StatusCode::OK);
    assert_eq!(passed.count(), 7);
    assert_eq!(reached.load(Ordering::SeqCst), 7);
}

#[tokio::test]
async fn a_shadowed_policy_denies_no_request_and_sends_headers() {
    let policy = Policy::fixed_window("watched", 1, MINUTE).unwrap().shadow();
    let layer = LimitLayer::new(policy, Everybody).clock(Arc::new(clock()));
    let app = Router::new().route("/", get(async || "welcome")).layer(layer);
    for (left, reset) in [("0", "60"), ("0", "60"), ("0", "60")] {
        let response = app.clone().oneshot(request("x")).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(
            (header(&response, "x-ratelimit-remaining"), header(&response, "x-ratelimit-reset")),
            (left, reset)
        );
    }
}

#[tokio::test]
async fn a_full_memory_refuses_new_callers_and_serves_known_ones() {
    let policy = Policy::fixed_window("few", 3, MINUTE).unwrap();
    let layer = LimitLayer::new(policy, by_header("x-api-key")).keys_max(1).clock(Arc::new(clock()));
    let app = Router::new().route("/", get(async || "welcome")).layer(layer);
    assert_eq!(app.clone().oneshot(request("alice")).await.unwrap().status(), StatusCode::OK);
    let full = app.clone().oneshot(request("bob")).await.unwrap();
    assert_eq!((full.status(), header(&full, "retry-after")), (StatusCode::SERVICE_UNAVAILABLE, "1"));
    assert_eq!(app.clone().oneshot(request("alice")).await.unwrap().status(), StatusCode::OK);
}

#[tokio::test]
async fn a_closure_may_be_the_key_and_errors_of_the_service_pass() {
    let inner = tower::service_fn(async |request: Request<()>| match request.uri().path() {
        "/broken" => Err("broken"),
        _ => Ok(Response::new(String::new())),
    });
    let policy = Policy::fixed_window("paths", 1, MINUTE).unwrap();
    let by_path = |request: &Request<()>| Some(request.uri().path().to_owned());
    let mut service = LimitLayer::new(policy, by_path).layer(inner);
    let mut call = async |path: &str| {
        let request = Request::get(path).body(()).unwrap();
        service.ready().await.unwrap().call(request).await.map(|response| response.status().as_u16())
    };
    assert_eq!(call("/a").await, Ok(200));
    assert_eq!(call("/a").await, Ok(429));
    assert_eq!(call("/b").await, Ok(200));
    assert_eq!(call("/broken").await, Err("broken"));
    assert_eq!(call("/broken").await, Ok(429), "it was counted all the same");
}
