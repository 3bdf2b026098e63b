//! Tokens, scopes and tenants of request.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Value, json};
use weir_server::auth::jwt::{self, Claims};
use weir_testkit::http::Client;

use super::fixtures::{Api, BOTH, body, submit};
use crate::fixtures::{FAR_FUTURE, Store, on_each_engine};

fn claims(tenant: Option<&str>, scope: Option<&str>, exp: u64) -> Claims {
    Claims { sub: "a@b.c".into(), exp, tenant_id: tenant.map(str::to_owned), scope: scope.map(str::to_owned) }
}

/// A token with any claims, signed with the server's own secret.
fn signed(api: &Api, claims: &Value) -> String {
    use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
    let key = EncodingKey::from_secret(api.secret("jwt.secret").as_bytes());
    encode(&Header::new(Algorithm::HS256), claims, &key).unwrap()
}

async fn only_genuine_unexpired_tokens_are_accepted(store: Store) {
    let api = Api::start(store).await;
    let own = |claims: &Claims| jwt::sign(&api.secret("jwt.secret"), claims).unwrap();
    let good = own(&claims(Some("acme"), Some(BOTH), FAR_FUTURE));
    assert_eq!(submit(&api.bearing(&good), &body("k", "pay", json!(1))).await.status, 202);
    let part = |json: &str| URL_SAFE_NO_PAD.encode(json);
    let payload = part(&format!(r#"{{"sub":"a","exp":{FAR_FUTURE},"tenant_id":"acme","scope":"{BOTH}"}}"#));
    let full = |more: Value| {
        let mut claims = json!({"sub": "a", "exp": FAR_FUTURE, "tenant_id": "acme", "scope": BOTH});
        claims.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        signed(&api, &claims)
    };
    let (head, rest) = good.split_once('.').unwrap();
    let bad = [
        String::new(),
        "nonsense".to_owned(),
        format!("{}.{payload}.", part(r#"{"alg":"none"}"#)),
        format!("{}.{payload}.", part(r#"{"alg":"None","typ":"JWT"}"#)),
        format!("{}.{payload}.AAAA", part(r#"{"alg":"HS256"}"#)),
        format!("{head}.{payload}.{}", rest.split_once('.').unwrap().1),
        jwt::sign("another secret, also 32 bytes...", &claims(Some("acme"), Some(BOTH), FAR_FUTURE)).unwrap(),
        own(&claims(Some("acme"), Some(BOTH), 1_000_000)),
        full(json!({"nbf": FAR_FUTURE})),
        full(json!({"iat": FAR_FUTURE})),
        full(json!({"exp": null})),
    ];
    let callers = bad.iter().map(|token| api.bearing(token)).chain([api.running.client()]);
    for (place, caller) in callers.enumerate() {
        for path in ["/v1/requests", "/v1/requests/x", "/v1/requests/x/events"] {
            let answer = caller.get(path).await.unwrap();
            assert_eq!((answer.status, &answer.json()["code"]), (401, &json!("UNAUTHENTICATED")), "{place}");
        }
        assert_eq!(submit(&caller, &body("k", "pay", json!(1))).await.status, 401, "{place}");
    }
}

async fn scopes_and_a_tenant_are_needed(store: Store) {
    let api = Api::start(store).await;
    let bearing = |tenant, scope| {
        api.bearing(&jwt::sign(&api.secret("jwt.secret"), &claims(tenant, scope, FAR_FUTURE)).unwrap())
    };
    let forbidden = async |caller: &Client, reads: bool| {
        let answer = match reads {
            true => caller.get("/v1/requests").await.unwrap(),
            // Invalid in every field: a caller without the scope is not told which.
            false => submit(caller, &json!({})).await,
        };
        assert_eq!((answer.status, &answer.json()["code"]), (403, &json!("UNAUTHORIZED_SCOPE")));
    };
    for scope in [None, Some(""), Some("requests"), Some("requests:read"), Some("REQUESTS:CREATE")] {
        forbidden(&bearing(Some("acme"), scope), false).await;
    }
    for scope in [None, Some("requests:create"), Some("requests:readx")] {
        forbidden(&bearing(Some("acme"), scope), true).await;
    }
    for tenant in [None, Some(""), Some("a\nb")] {
        forbidden(&bearing(tenant, Some(BOTH)), true).await;
        forbidden(&bearing(tenant, Some(BOTH)), false).await;
    }
    let creator = bearing(Some("acme"), Some("other requests:create"));
    assert_eq!(submit(&creator, &body("k", "pay", json!(1))).await.status, 202);
    assert_eq!(bearing(Some("acme"), Some("requests:read")).get("/v1/requests").await.unwrap().status, 200);
}

async fn tenants_do_not_see_each_other(store: Store) {
    let api = Api::start(store).await;
    let id = api.accepted(&api.caller("acme"), "k").await;
    let other = api.caller("other");
    for path in ["", "?wait=5s", "/events"] {
        let answer = other.get(&format!("/v1/requests/{id}{path}")).await.unwrap();
        assert_eq!((answer.status, &answer.json()["code"]), (404, &json!("NOT_FOUND")), "{path}");
    }
    for unknown in ["x", "019ceaa0-0d7b-7c3e-9a41-5f2d8c6b7e10", "%00", "019ceaa00d7b7c3e9a415f2d8c6b7e10"] {
        let answer = other.get(&format!("/v1/requests/{unknown}")).await.unwrap();
        assert_eq!(answer.status, 404, "{unknown}");
    }
    assert_eq!(other.get("/v1/requests").await.unwrap().json()["items"], json!([]));
    let found = api.caller("acme").get(&format!("/v1/requests/{}", id.to_uppercase())).await.unwrap();
    assert_eq!(found.status, 200);
}

on_each_engine!(
    only_genuine_unexpired_tokens_are_accepted,
    scopes_and_a_tenant_are_needed,
    tenants_do_not_see_each_other,
);
