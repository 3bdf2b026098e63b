//! Downstreams behind TLS.

use serde_json::{Value, json};
use weir_testkit::https::HttpsServer;
use weir_testkit::wait;

use super::fixtures::Api;
use crate::fixtures::{Running, Store, TEST_TIMEOUT};

/// Starts a server with a worker that makes one attempt, with long timeouts. Submits a request, and returns it once it is
/// final.
async fn final_request(downstream: &str, settings: &[(&str, &str)]) -> Value {
    let mut all = vec![
        ("WEIR_ROLES", "api,worker"),
        ("WEIR_DOWNSTREAM", downstream),
        ("WEIR_REQUEST_MAX_ATTEMPTS", "1"),
        ("WEIR_REQUEST_CONNECT_TIMEOUT", "30s"),
        ("WEIR_REQUEST_READ_TIMEOUT", "30s"),
        ("WEIR_REQUEST_LEASE", "62s"),
    ];
    all.extend_from_slice(settings);
    let api = Api { running: Running::start_with(Store::Embedded, &all).await };
    let caller = api.caller("acme");
    let id = api.accepted(&caller, "k").await;
    let mut request = Value::Null;
    wait::until("the request is final", TEST_TIMEOUT, async || {
        let Ok(answer) = caller.get(&format!("/v1/requests/{id}?wait=1s")).await else { return false };
        request = answer.json();
        request["status"] == "COMPLETED" || request["failureCode"] != Value::Null
    })
    .await;
    request
}

#[tokio::test(flavor = "multi_thread")]
async fn a_downstream_is_called_over_tls_when_its_authority_is_trusted() {
    let downstream = HttpsServer::start(r#"{"done":true}"#).await;
    let file = downstream.ca_file();
    let trusted = [("WEIR_REQUEST_SSLROOTCERT", file.to_str().unwrap())];
    let request = final_request(&downstream.url(), &trusted).await;
    assert_eq!((&request["status"], &request["result"]), (&json!("COMPLETED"), &json!({"done": true})));
    assert_eq!(downstream.calls(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_downstream_without_a_valid_certificate_is_not_called() {
    let downstream = HttpsServer::start("{}").await;
    let other = HttpsServer::start("{}").await;
    let (own, other) = (downstream.ca_file(), other.ca_file());
    for (url, trusted) in [
        (downstream.url(), None),
        (downstream.url(), Some(&other)),
        (downstream.url_by_address(), Some(&own)),
    ] {
        let trusted = trusted.map(|file| ("WEIR_REQUEST_SSLROOTCERT", file.to_str().unwrap()));
        let request = final_request(&url, trusted.as_slice()).await;
        let end = (&request["status"], &request["failureCode"]);
        let unreachable = (&json!("FAILED_RETRY_EXHAUSTED"), &json!("DOWNSTREAM_UNREACHABLE"));
        assert_eq!(end, unreachable, "{url} {trusted:?}");
    }
    assert_eq!(downstream.calls(), 0);
}
