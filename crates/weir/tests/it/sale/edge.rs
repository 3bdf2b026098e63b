//! Protection against crowds and bots: throttles, limits per address, challenges.

use http::Method;
use serde_json::{Value, json};
use weir_testkit::http::Client;

use super::fixtures::{Listener, attempt, create_active, purchase, status};
use crate::fixtures::{Running, Store, TEST_TIMEOUT};

fn expect_limited(response: &weir_testkit::http::Response) {
    assert_eq!(response.status, 429, "{:?}", response.body);
    let error = response.json()["error"].clone();
    assert_eq!(error["code"], "RATE_LIMITED");
    assert_eq!(error["message"], "Too many requests. Please try again shortly.");
    let retry_after: u64 = response.header("retry-after").unwrap().parse().unwrap();
    assert!(retry_after >= 1 && error["retryAfter"] == retry_after, "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_with_too_many_attempts_is_throttled_and_others_are_not() {
    // The number of attempts below is small enough for a slow machine to make them within a second.
    let running = Running::start_with(Store::Embedded, &[("WEIR_SALE_USER_PER_SECOND", "3")]).await;
    let client = running.client();
    create_active(&running.operator(), "W", 100).await;
    let hurried: Vec<_> =
        futures_util::future::join_all((0..60).map(|_| attempt(&client, "W", "hurry"))).await;
    let limited: Vec<_> = hurried.iter().filter(|answer| answer.status == 429).collect();
    assert!(!limited.is_empty(), "60 attempts at once are more than 3 a second");
    limited.iter().for_each(|answer| expect_limited(answer));
    assert_eq!(limited[0].header("x-ratelimit-remaining"), Some("0"));
    assert_eq!(limited[0].header("ratelimit-policy"), Some("\"purchase\";q=3;w=1"));
    let bought = hurried.iter().filter(|answer| answer.json()["success"] == true).count();
    assert_eq!(bought, 1);
    let other = attempt(&client, "W", "patient").await;
    assert_eq!((other.status, other.header("x-ratelimit-limit")), (200, Some("3")));
    assert_eq!(purchase(&client, "W", "hurry").await.status, 200, "reads are not throttled");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_with_too_many_requests_is_throttled() {
    let settings = [
        ("WEIR_EDGE_PER_IP_PER_SECOND", "1"),
        ("WEIR_EDGE_PER_IP_BURST", "2"),
        ("WEIR_EDGE_TRUSTED_PROXIES", "127.0.0.0/8"),
    ];
    let running = Running::start_with(Store::Embedded, &settings).await;
    let from = async |address: &str| {
        let headers = [("x-forwarded-for", address)];
        running.client().request(Method::GET, "/api/v1/sales", &headers, "").await.unwrap()
    };
    let answers = futures_util::future::join_all((0..40).map(|_| from("203.0.113.7"))).await;
    let limited: Vec<_> = answers.iter().filter(|answer| answer.status == 429).collect();
    assert!(limited.len() >= 10, "{}", limited.len());
    limited.iter().for_each(|answer| expect_limited(answer));
    assert_eq!(from("203.0.113.8").await.status, 404, "another address is not throttled");
    assert_eq!(running.client().get("/livez").await.unwrap().status, 200, "other routes are not limited");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_of_a_known_network_has_a_limit_of_its_own() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("weir.toml");
    let text = "[edge]\nper_ip_per_second = 1\nper_ip_burst = 2\ntrusted_proxies = [\"127.0.0.0/8\"]\n\
        [edge.networks.office]\nnetworks = [\"203.0.113.0/24\"]\nper_ip_per_second = 0\n";
    std::fs::write(&file, text).unwrap();
    let running = Running::start_with(Store::Embedded, &[("WEIR_CONFIG", file.to_str().unwrap())]).await;
    let limited = async |address: &str| {
        let headers = [("x-forwarded-for", address)];
        let client = running.client();
        let calls = (0..40).map(|_| client.request(Method::GET, "/api/v1/sales", &headers, ""));
        let answers = futures_util::future::join_all(calls).await;
        answers.into_iter().filter(|answer| answer.as_ref().unwrap().status == 429).count()
    };
    assert_eq!(limited("203.0.113.7").await, 0);
    assert!(limited("198.51.100.7").await >= 10);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_per_address_are_limited_and_a_closed_one_makes_room() {
    let running = Running::start_with(Store::Embedded, &[("WEIR_EDGE_SSE_PER_IP", "2")]).await;
    create_active(&running.operator(), "W", 5).await;
    let connect = async || Listener::connect(running.weir.addr(), "", None).await;
    let (one, _two) = (connect().await, connect().await);
    assert_eq!((one.status(), connect().await.status()), ("200", "429"));
    drop(one);
    weir_testkit::wait::until("the closed stream has made room", TEST_TIMEOUT, async || {
        connect().await.status() == "200"
    })
    .await;
}

/// The settings of a challenge, whose verifier is asked with the secret `s3cret`, or `int3ractive`.
fn challenge<'a>(provider: &'a str, verify_url: &'a str) -> [(&'a str, &'a str); 6] {
    [
        ("WEIR_SALE_CHALLENGE_PROVIDER", provider),
        ("WEIR_SALE_CHALLENGE_SITE_KEY", "the-site-key"),
        ("WEIR_SALE_CHALLENGE_SECRET", "s3cret"),
        ("WEIR_SALE_CHALLENGE_INTERACTIVE_SITE_KEY", "the-other-key"),
        ("WEIR_SALE_CHALLENGE_INTERACTIVE_SECRET", "int3ractive"),
        ("WEIR_SALE_CHALLENGE_VERIFY_URL", verify_url),
    ]
}

/// A verifier that answers with the token itself, `{"success":…,"score":…}`, if the secret is `s3cret` or, for a token with
/// `"interactive":true`, `int3ractive`.
async fn verifier() -> std::net::SocketAddr {
    use http_body_util::{BodyExt, Full};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let answer = async |request: hyper::Request<hyper::body::Incoming>| {
        let body = request.into_body().collect().await.unwrap().to_bytes();
        let form: std::collections::BTreeMap<String, String> =
            url::form_urlencoded::parse(&body).into_owned().collect();
        let token: Value = serde_json::from_str(&form["response"]).unwrap();
        let secret = if token["interactive"] == true { "int3ractive" } else { "s3cret" };
        let answer = if form["secret"] == secret && form.contains_key("remoteip") {
            form["response"].clone()
        } else {
            json!({"success": false}).to_string()
        };
        Ok::<_, std::convert::Infallible>(hyper::Response::new(Full::new(bytes::Bytes::from(answer))))
    };
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let service = hyper::service::service_fn(answer);
            let io = hyper_util::rt::TokioIo::new(stream);
            tokio::spawn(hyper::server::conn::http1::Builder::new().serve_connection(io, service));
        }
    });
    address
}

async fn with_token(client: &Client, buyer: &str, token: &Value) -> Value {
    let headers = [("content-type", "application/json"), ("x-user-id", buyer)];
    let kind = if token["interactive"] == true { "interactive" } else { "invisible" };
    let body = json!({"sku": "W", "qty": 1, "challengeToken": token.to_string(), "challengeKind": kind});
    let body = body.to_string();
    client.request(Method::POST, "/api/v1/purchases", &headers, body).await.unwrap().json()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_challenge_admits_buyers_whom_the_verifier_takes_for_human() {
    let url = format!("http://{}/siteverify", verifier().await);
    let settings = challenge("recaptcha", &url);
    let running = Running::start_with(Store::Embedded, &settings).await;
    let client = running.client();
    create_active(&running.operator(), "W", 10).await;
    let none = attempt(&client, "W", "no-token").await;
    assert_eq!((none.status, &none.json()["error"]["code"]), (200, &json!("CHALLENGE_REQUIRED")));
    for (n, (verdict, is_admitted)) in [
        (json!({"success": true, "score": 0.9}), true),
        (json!({"success": true, "score": 0.5}), true),
        (json!({"success": true, "score": 0.1}), false),
        (json!({"success": true}), true),
        (json!({"success": false, "score": 0.9}), false),
        (json!({"success": true, "interactive": true}), true),
    ]
    .into_iter()
    .enumerate()
    {
        let answer = with_token(&client, &format!("buyer-{n}"), &verdict).await;
        let expected = if is_admitted { json!(null) } else { json!("CHALLENGE_REQUIRED") };
        assert_eq!(answer["error"]["code"], expected, "{verdict}");
    }
    assert_eq!(status(&client, "W").await["stock"], 6);
    let metrics = running.client().get("/metrics").await.unwrap();
    let metrics = String::from_utf8_lossy(&metrics.body).into_owned();
    for line in ["{outcome=\"passed\"} 3", "{outcome=\"flagged\"} 1", "{outcome=\"required\"} 3"] {
        assert!(metrics.contains(&format!("weir_sale_challenges_total{line}")), "{line}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_verifier_admits_nobody() {
    let settings = challenge("turnstile", "http://127.0.0.1:1/");
    let running = Running::start_with(Store::Embedded, &settings).await;
    create_active(&running.operator(), "W", 10).await;
    let answer = with_token(&running.client(), "a", &json!({"success": true})).await;
    assert_eq!(answer["error"]["code"], "SERVICE_UNAVAILABLE");
    assert_eq!(answer["error"]["message"], "Service temporarily unavailable. Please try again.");
    assert_eq!(status(&running.client(), "W").await["stock"], 10);
}
