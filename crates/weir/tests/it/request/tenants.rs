//! What operators do with a whole tenant: `/admin/tenants/{tenant}/limits` and `/admin/tenants/{tenant}/data`.

use serde_json::json;
use weir_testkit::http::Client;
use weir_testkit::{skip, wait};

use super::fixtures::{Api, KEYS, body, submit};
use crate::fixtures::{Running, Store, TEST_TIMEOUT, audit, on_each_engine, operator};

const LIMITS: &str = "/admin/tenants/acme/limits";

async fn a_tenants_limit_is_changed_and_removed_while_running(store: Store) {
    let api = Api::start_with(store, &[("WEIR_REQUEST_TENANT_LIMIT", "2")]).await;
    let (caller, operator) = (api.caller("acme"), api.operator());
    let shown = operator.get(LIMITS).await.unwrap().json();
    assert_eq!(shown, json!({"tenantId": "acme", "requestsPerMinute": 2, "source": "settings"}));
    let send = async |key: &str| submit(&caller, &body(key, "pay", json!(1))).await;
    assert_eq!([send("a").await.status, send("b").await.status, send("c").await.status], [202, 202, 429]);
    let changed = operator.put(LIMITS, &json!({"requestsPerMinute": 3})).await.unwrap();
    let own = json!({"tenantId": "acme", "requestsPerMinute": 3, "source": "operator"});
    assert_eq!((changed.status, changed.json()), (200, own.clone()));
    assert_eq!(operator.get(LIMITS).await.unwrap().json(), own);
    let third = send("c").await;
    assert_eq!((third.status, third.header("x-ratelimit-remaining")), (202, Some("0")), "it applies at once");
    assert_eq!(send("d").await.status, 429, "what was submitted in this minute counts");
    let other = submit(&api.caller("other"), &body("a", "pay", json!(1))).await;
    assert_eq!(other.header("x-ratelimit-limit"), Some("2"), "others keep theirs");
    operator.put(LIMITS, &json!({"requestsPerMinute": 0})).await.unwrap();
    let unlimited = send("d").await;
    assert_eq!((unlimited.status, unlimited.header("x-ratelimit-limit")), (202, None));
    assert_eq!(operator.delete(LIMITS).await.unwrap().status, 204);
    assert_eq!(operator.delete(LIMITS).await.unwrap().status, 404);
    assert_eq!(send("e").await.status, 429);
    for bad in [json!({}), json!({"requestsPerMinute": -1}), json!({"requestsPerMinute": 2_147_483_648_u64})]
    {
        assert_eq!(operator.put(LIMITS, &bad).await.unwrap().status, 400, "{bad}");
    }
    assert_eq!(caller.get(LIMITS).await.unwrap().status, 403, "a tenant is no operator");
    api.wait_for_log("a tenant's limit was changed").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenants_limit_applies_on_every_server_within_five_seconds() {
    if skip("postgres") {
        return;
    }
    let api = Api::start_with(Store::Postgres, &[KEYS]).await;
    let second = api.running.second_with(&[KEYS, ("WEIR_ROLES", "api")]).await;
    let (one, other) = (api.operator(), operator(&second));
    let limit = async |client: &Client| client.get(LIMITS).await.unwrap().json()["requestsPerMinute"].clone();
    assert_eq!((limit(&one).await, limit(&other).await), (json!(0), json!(0)));
    one.put(LIMITS, &json!({"requestsPerMinute": 7})).await.unwrap();
    assert_eq!(limit(&one).await, 7);
    wait::until("the other server has heard of it", TEST_TIMEOUT, async || limit(&other).await == 7).await;
}

async fn all_data_of_a_tenant_is_erased_and_nothing_of_others(store: Store) {
    let roles = [("WEIR_ROLES", "api,reconciler")];
    let mut api = Api { running: Running::start_with(store, &roles).await };
    let (caller, other) = (api.caller("acme"), api.caller("other"));
    let mut ids = Vec::new();
    for n in 0..12 {
        ids.push(api.accepted(&caller, &format!("k{n}")).await);
    }
    api.begin(&ids[0]).await;
    api.bury(&ids[1]).await;
    let kept = api.accepted(&other, "k").await;
    let erasing = api.operator().delete("/admin/tenants/acme/data").await.unwrap();
    assert_eq!((erasing.status, erasing.json()), (202, json!({"erasing": 12})));
    assert_eq!(caller.delete("/admin/tenants/other/data").await.unwrap().status, 403);
    // What was not erased yet is erased after the crash.
    api.running.weir.kill_9();
    api.running.weir.restart().await;
    let books = async || audit(&api.operator()).await;
    wait::until("everything is erased", TEST_TIMEOUT, async || books().await["request"]["erased"] == 12)
        .await;
    api.wait_for_log("the data of a tenant is erased").await;
    let (caller, other) = (api.caller("acme"), api.caller("other"));
    for id in &ids {
        assert_eq!(caller.get(&format!("/v1/requests/{id}")).await.unwrap().status, 404);
    }
    assert_eq!(caller.get("/v1/requests").await.unwrap().json()["items"], json!([]));
    assert_eq!(other.get(&format!("/v1/requests/{kept}")).await.unwrap().status, 200);
    assert_eq!(api.operator().get("/admin/dlq").await.unwrap().json()["items"], json!([]));
    let books = books().await;
    assert_eq!((&books["ok"], &books["request"]["jobs"]), (&json!(true), &json!(1)), "{books}");
    assert!(!api.stored_rows().await.contains("acme"), "no row names the tenant");
    let again = submit(&caller, &body("k0", "pay", json!("another payload"))).await;
    assert_eq!((again.status, again.header("idempotent-replayed")), (202, None), "its keys are free");
}

on_each_engine!(
    a_tenants_limit_is_changed_and_removed_while_running,
    all_data_of_a_tenant_is_erased_and_nothing_of_others,
);
