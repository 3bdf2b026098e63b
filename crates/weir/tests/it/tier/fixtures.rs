//! Callers, policies and checks, for tests of tier.

use jsonwebtoken::{EncodingKey, Header};
use serde_json::{Value, json};
use weir_server::auth::jwt::{self, Claims};
use weir_testkit::http::{Client, Response};
use weir_testkit::process::Weir;

use crate::fixtures::FAR_FUTURE;

/// A client with a token for `user`.
pub(super) fn user(weir: &Weir, user: &str) -> Client {
    bearing(weir, user, None)
}

/// A client with a token for `user` and this scope.
pub(super) fn bearing(weir: &Weir, user: &str, scope: Option<&str>) -> Client {
    let secret = std::fs::read_to_string(weir.data_dir().join("jwt.secret")).unwrap();
    let claims =
        Claims { sub: user.to_owned(), exp: FAR_FUTURE, tenant_id: None, scope: scope.map(str::to_owned) };
    let token = jwt::sign(&secret, &claims).unwrap();
    Client::new(weir.base_url()).with_header("authorization", &format!("Bearer {token}"))
}

/// A client with a token for `user` that has this claim.
pub(super) fn claiming(weir: &Weir, user: &str, claim: &str, value: Value) -> Client {
    let secret = std::fs::read_to_string(weir.data_dir().join("jwt.secret")).unwrap();
    let claims = json!({"sub": user, "exp": FAR_FUTURE, claim: value});
    let key = EncodingKey::from_secret(secret.as_bytes());
    let token = jsonwebtoken::encode(&Header::default(), &claims, &key).unwrap();
    Client::new(weir.base_url()).with_header("authorization", &format!("Bearer {token}"))
}

/// Puts a policy, and expects that to succeed.
pub(super) async fn put_policy(operator: &Client, name: &str, policy: Value) {
    let response = operator.put(&format!("/admin/policies/{name}"), &policy).await.unwrap();
    assert_eq!(response.status, 200, "{:?}", response.body);
}

/// A token bucket that refills too slowly to matter in a test.
pub(super) fn slow_bucket(capacity: u32) -> Value {
    json!({"kind": "token_bucket", "capacity": capacity, "refill": 1, "period": "P300D"})
}

pub(super) async fn check(caller: &Client, checks: Value) -> Value {
    let response = caller.post("/v1/check", &json!({ "checks": checks })).await.unwrap();
    assert_eq!(response.status, 200, "{:?}", response.body);
    response.json()
}

pub(super) async fn check_one(caller: &Client, policy: &str, key: &str, cost: u32) -> Value {
    let answer = check(caller, json!([{"policy": policy, "key": key, "cost": cost}])).await;
    assert_eq!(answer["allowed"], answer["checks"][0]["allowed"], "{answer}");
    answer["checks"][0].clone()
}

/// The remaining amount of a key. Spends nothing.
pub(super) async fn remaining(caller: &Client, policy: &str, key: &str) -> u64 {
    check_one(caller, policy, key, 0).await["remaining"].as_u64().unwrap()
}

pub(super) fn expect_error(response: &Response, status: u16, code: &str, part: &str) {
    let body = response.json();
    assert_eq!(response.status, status, "{body}");
    assert_eq!(body["code"], code, "{body}");
    assert!(body["message"].as_str().unwrap().contains(part), "{body} does not mention {part:?}");
}
