//! Credentials of checks, holds and definitions.

use http::Method;
use serde_json::json;

use super::fixtures::{bearing, expect_error, put_policy, slow_bucket, user};
use crate::fixtures::{Running, Store};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn checks_need_the_operators_key_or_a_token_with_the_scope() {
    let server = Running::start(Store::Embedded).await;
    put_policy(&server.operator(), "p", slow_bucket(100)).await;
    let hold = json!({"policy": "p", "key": "k", "cost": 1});
    for (path, body) in [
        ("/v1/check", json!({"checks": [{"policy": "p", "key": "k"}]})),
        ("/v1/refund", hold.clone()),
        ("/v1/hold", hold.clone()),
    ] {
        for allowed in [server.operator(), bearing(&server.weir, "svc", Some("other limits:check"))] {
            assert_eq!(allowed.post(path, &body).await.unwrap().status, 200, "{path}");
        }
    }
    for path in ["/v1/check", "/v1/refund", "/v1/hold", "/v1/settle"] {
        for scope in [None, Some("requests:read"), Some("limits:checks")] {
            let caller = bearing(&server.weir, "svc", scope);
            expect_error(&caller.post(path, &hold).await.unwrap(), 403, "UNAUTHORIZED_SCOPE", "limits:check");
        }
        let wrong_key = server.client().with_header("x-admin-key", "0123456789abcdef");
        let no_token = server.client().with_header("authorization", "Bearer x.y.z");
        for stranger in [server.client(), wrong_key, no_token] {
            expect_error(&stranger.post(path, &hold).await.unwrap(), 401, "UNAUTHENTICATED", "X-Admin-Key");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn definitions_need_the_operator_and_users_see_only_their_own_limits() {
    let server = Running::start(Store::Embedded).await;
    let routes = [
        (Method::GET, "/admin/subscriptions/u"),
        (Method::PUT, "/admin/subscriptions/u"),
        (Method::DELETE, "/admin/subscriptions/u"),
        (Method::GET, "/admin/tiers"),
        (Method::GET, "/admin/tiers/free"),
        (Method::PUT, "/admin/tiers/free"),
        (Method::GET, "/admin/policies"),
        (Method::GET, "/admin/policies/p"),
        (Method::PUT, "/admin/policies/p"),
        (Method::DELETE, "/admin/policies/p"),
        (Method::DELETE, "/admin/policies/p/keys/k"),
    ];
    let caller = bearing(&server.weir, "svc", Some("limits:check"));
    for (stranger, status, code, message) in [
        (server.client(), 401, "UNAUTHENTICATED", "X-Admin-Key"),
        (caller, 403, "UNAUTHORIZED_SCOPE", "the scope admin"),
    ] {
        for (method, path) in &routes {
            let response = stranger.request(method.clone(), path, &[], "{}").await.unwrap();
            expect_error(&response, status, code, message);
        }
    }
    let response = server.operator().get("/api/v1/limits/me").await.unwrap();
    expect_error(&response, 401, "UNAUTHENTICATED", "token");
    assert_eq!(user(&server.weir, "u").get("/api/v1/limits/me").await.unwrap().json()["user"], "u");
}
