//! Subscriptions, tiers and the remaining limits of a user.

use serde_json::{Value, json};
use weir_testkit::http::Client;
use weir_testkit::wait;

use super::fixtures::{expect_error, user};
use crate::fixtures::{Running, Store, TEST_TIMEOUT, on_each_engine, operator};

async fn my_limits(client: &Client) -> Value {
    let response = client.get("/api/v1/limits/me").await.unwrap();
    assert_eq!(response.status, 200, "{:?}", response.body);
    response.json()
}

async fn subscribe(operator: &Client, user: &str, plan: &str) -> Value {
    let path = format!("/admin/subscriptions/{user}");
    let response = operator.put(&path, &json!({ "plan": plan })).await.unwrap();
    assert_eq!(response.status, 200, "{:?}", response.body);
    response.json()
}

async fn a_subscription_is_put_read_changed_and_ended(store: Store) {
    let server = Running::start(store).await;
    let operator = server.operator();
    let path = "/admin/subscriptions/user@example.com";
    expect_error(&operator.get(path).await.unwrap(), 404, "NOT_FOUND", "user@example.com");
    let put = subscribe(&operator, "user@example.com", "PRO_MONTHLY").await;
    assert_eq!(
        (&put["user"], &put["plan"], &put["tier"]),
        (&json!("user@example.com"), &json!("PRO_MONTHLY"), &json!("pro"))
    );
    assert_eq!(operator.get(path).await.unwrap().json(), put);
    let me = user(&server.weir, "user@example.com");
    assert_eq!(my_limits(&me).await["plan"], "PRO_MONTHLY");
    subscribe(&operator, "user@example.com", "STARTER_YEARLY").await;
    assert_eq!(my_limits(&me).await["tier"], "starter", "it holds at once");
    assert_eq!(operator.delete(path).await.unwrap().status, 204);
    assert_eq!(operator.delete(path).await.unwrap().status, 404);
    assert_eq!(my_limits(&me).await["plan"], "FREE");
    for (body, field) in [
        (json!({"plan": "PRO"}), "plan must be one of"),
        (json!({"plan": "pro_monthly"}), "plan must be one of"),
        (json!({"plan": null}), "plan"),
        (json!({}), "plan is required"),
    ] {
        expect_error(&operator.put(path, &body).await.unwrap(), 400, "INVALID_REQUEST", field);
    }
    assert_eq!(operator.get(path).await.unwrap().status, 404, "nothing of that was saved");
}

async fn every_plan_has_the_limits_of_its_tier(store: Store) {
    let server = Running::start(store).await;
    let (operator, me) = (server.operator(), user(&server.weir, "u"));
    for (plan, tier, rpm, burst, daily) in [
        ("FREE", "free", 5, 8, 50),
        ("STARTER_MONTHLY", "starter", 15, 20, 200),
        ("STARTER_YEARLY", "starter", 15, 20, 200),
        ("PRO_MONTHLY", "pro", 30, 40, 500),
        ("PRO_YEARLY", "pro", 30, 40, 500),
        ("BUSINESS_MONTHLY", "business", 60, 80, 1000),
        ("BUSINESS_YEARLY", "business", 60, 80, 1000),
    ] {
        subscribe(&operator, "u", plan).await;
        let limits = my_limits(&me).await;
        assert_eq!((&limits["plan"], &limits["tier"]), (&json!(plan), &json!(tier)));
        let minute = json!({"limit": rpm, "capacity": burst, "remaining": burst, "resetAfterMs": 0});
        let day = json!({"limit": daily, "capacity": daily, "remaining": daily, "resetAfterMs": 0});
        assert_eq!(
            (&limits["minute"], &limits["daily"]),
            (&minute, &day),
            "{plan}: a new user's buckets are full"
        );
    }
}

async fn tiers_change_while_running(store: Store) {
    let server = Running::start(store).await;
    let (operator, me) = (server.operator(), user(&server.weir, "u"));
    let tiers = operator.get("/admin/tiers").await.unwrap().json();
    let names: Vec<_> = tiers["items"].as_array().unwrap().iter().map(|tier| tier["tier"].clone()).collect();
    assert_eq!(names, ["free", "starter", "pro", "business"]);
    let changed = operator.put("/admin/tiers/free", &json!({"dailyLimit": 7})).await.unwrap();
    let expected = json!({"tier": "free", "requestsPerMinute": 5, "burstCapacity": 8, "dailyLimit": 7});
    assert_eq!(changed.json(), expected, "what is left out stays as it is");
    assert_eq!(operator.get("/admin/tiers/free").await.unwrap().json(), expected);
    assert_eq!(my_limits(&me).await["daily"]["remaining"], 7);
    for bad in [json!(0), json!(-1), json!(1.5), json!("5"), json!(2_147_483_648_u64)] {
        let response = operator.put("/admin/tiers/free", &json!({"burstCapacity": bad})).await.unwrap();
        expect_error(&response, 400, "INVALID_REQUEST", "burstCapacity");
    }
    for response in [
        operator.get("/admin/tiers/gold").await.unwrap(),
        operator.put("/admin/tiers/gold", &json!({"dailyLimit": 7})).await.unwrap(),
    ] {
        expect_error(&response, 404, "NOT_FOUND", "starter");
    }
}

async fn a_tier_goes_back_to_its_settings(store: Store) {
    let server = Running::start_with(store, &[("WEIR_RATE_LIMIT_TIERS_FREE_DAILY_LIMIT", "51")]).await;
    let (operator, me) = (server.operator(), user(&server.weir, "u"));
    operator.put("/admin/tiers/free", &json!({"dailyLimit": 7})).await.unwrap();
    operator.put("/admin/tiers/pro", &json!({"dailyLimit": 8})).await.unwrap();
    assert_eq!(my_limits(&me).await["daily"]["limit"], 7);
    for _ in 0..2 {
        assert_eq!(operator.delete("/admin/tiers/free").await.unwrap().status, 204);
        assert_eq!(my_limits(&me).await["daily"]["limit"], 51);
    }
    assert_eq!(operator.get("/admin/tiers/pro").await.unwrap().json()["dailyLimit"], 8);
    expect_error(&operator.delete("/admin/tiers/gold").await.unwrap(), 404, "NOT_FOUND", "starter");
}

async fn limits_are_switched_off_and_on_while_running(store: Store) {
    let mut server = Running::start(store).await;
    let path = "/admin/rate-limit/enabled";
    assert_eq!(server.operator().get(path).await.unwrap().json(), json!({"enabled": true}));
    for (body, field) in [(json!({}), "enabled is required"), (json!({"enabled": "off"}), "enabled must be")]
    {
        expect_error(&server.operator().put(path, &body).await.unwrap(), 400, "INVALID_REQUEST", field);
    }
    let off = json!({"enabled": false});
    assert_eq!(server.operator().put(path, &off).await.unwrap().json(), off);
    for is_restarted in [false, true] {
        let me = user(&server.weir, "u");
        for _ in 0..9 {
            let call = me.get("/api/v1/ai/x").await.unwrap();
            assert_eq!(call.status, 200, "the free plan has 8 at once");
            assert_eq!(call.header("x-ratelimit-remaining"), Some("9223372036854775807"));
            assert_eq!(call.header("ratelimit"), None);
        }
        assert_eq!(my_limits(&me).await["enabled"], false);
        if !is_restarted {
            server.weir.kill_9();
            server.weir.restart().await;
        }
    }
    assert_eq!(server.operator().put(path, &json!({"enabled": true})).await.unwrap().status, 200);
    let call = user(&server.weir, "u").get("/api/v1/ai/x").await.unwrap();
    assert_eq!(call.header("x-ratelimit-remaining"), Some("7"), "nothing was spent meanwhile");
}

async fn definitions_survive_a_restart(store: Store) {
    let mut server = Running::start(store).await;
    let operator = server.operator();
    operator.put("/admin/tiers/pro", &json!({"burstCapacity": 41})).await.unwrap();
    subscribe(&operator, "u", "PRO_YEARLY").await;
    server.weir.kill_9();
    server.weir.restart().await;
    let limits = my_limits(&user(&server.weir, "u")).await;
    assert_eq!((&limits["plan"], &limits["minute"]["capacity"]), (&json!("PRO_YEARLY"), &json!(41)));
}

on_each_engine!(
    a_subscription_is_put_read_changed_and_ended,
    every_plan_has_the_limits_of_its_tier,
    tiers_change_while_running,
    a_tier_goes_back_to_its_settings,
    limits_are_switched_off_and_on_while_running,
    definitions_survive_a_restart,
);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn definitions_of_one_server_soon_apply_on_the_others() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let server = Running::start(Store::Postgres).await;
    let other = server.second().await;
    // Both servers have cached that the user has no plan yet.
    for weir in [&server.weir, &other] {
        assert_eq!(my_limits(&user(weir, "u")).await["plan"], "FREE");
    }
    subscribe(&server.operator(), "u", "PRO_MONTHLY").await;
    server.operator().put("/admin/tiers/pro", &json!({"dailyLimit": 501})).await.unwrap();
    server.operator().put("/admin/policies/p", &super::fixtures::slow_bucket(3)).await.unwrap();
    let (me, operator) = (user(&other, "u"), operator(&other));
    wait::until("the other server has the change", TEST_TIMEOUT, async || {
        let limits = my_limits(&me).await;
        let policy = operator.get("/admin/policies/p").await.unwrap().status;
        limits["plan"] == "PRO_MONTHLY" && limits["daily"]["limit"] == 501 && policy == 200
    })
    .await;
    server.operator().delete("/admin/subscriptions/u").await.unwrap();
    server.operator().delete("/admin/policies/p").await.unwrap();
    server.operator().delete("/admin/tiers/pro").await.unwrap();
    server.operator().put("/admin/rate-limit/enabled", &json!({"enabled": false})).await.unwrap();
    wait::until("the other server has the end of the subscription", TEST_TIMEOUT, async || {
        my_limits(&me).await["plan"] == "FREE"
            && my_limits(&me).await["enabled"] == false
            && operator.get("/admin/tiers/pro").await.unwrap().json()["dailyLimit"] == 500
            && operator.get("/admin/rate-limit/enabled").await.unwrap().json()["enabled"] == false
            && operator.get("/admin/policies/p").await.unwrap().status == 404
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disabled_limits_show_the_largest_remaining_amount() {
    let settings = [("WEIR_RATE_LIMIT_ENABLED", "false"), ("WEIR_RATE_LIMIT_TIERS_FREE_DAILY_LIMIT", "51")];
    let server = Running::start_with(Store::Embedded, &settings).await;
    let limits = my_limits(&user(&server.weir, "u")).await;
    assert_eq!(limits["enabled"], false);
    assert_eq!(limits["minute"]["remaining"], 9_223_372_036_854_775_807_i64);
    assert_eq!(limits["daily"]["limit"], 51);
}
