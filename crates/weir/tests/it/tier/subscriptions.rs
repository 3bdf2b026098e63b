//! Subscriptions that expire, plans that tokens claim, and plans while the store is away.

use std::time::Duration;

use serde_json::{Value, json};
use weir_testkit::http::Client;
use weir_testkit::postgres::{Database, Server};
use weir_testkit::process::Weir;
use weir_testkit::proxy::Proxy;
use weir_testkit::wait;

use super::fixtures::{claiming, expect_error, user};
use crate::fixtures::{
    InProcess, LONG_TIMEOUTS, Running, Store, TEST_TIMEOUT, on_each_engine, operator, weir,
};

/// The name that every test of claimed plans uses.
const PLAN_CLAIM: (&str, &str) = ("WEIR_TIER_PLAN_CLAIM", "https://shop.example/plan");

async fn plan_of(caller: &Client) -> String {
    let response = caller.get("/api/v1/limits/me").await.unwrap();
    assert_eq!(response.status, 200, "{:?}", response.body);
    response.json()["plan"].as_str().unwrap().to_owned()
}

async fn subscribe(operator: &Client, user: &str, body: Value) -> Value {
    let response = operator.put(&format!("/admin/subscriptions/{user}"), &body).await.unwrap();
    assert_eq!(response.status, 200, "{:?}", response.body);
    response.json()
}

async fn metric(weir: &Weir, name: &str) -> u64 {
    let text = Client::new(weir.base_url()).get("/metrics").await.unwrap().body;
    let text = String::from_utf8(text.to_vec()).unwrap();
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.unwrap_or_else(|| panic!("there is no metric {name}")).parse().unwrap()
}

async fn a_subscription_is_over_when_it_expires_also_in_memory(store: Store) {
    let server = InProcess::start(store).await;
    let (operator, me) = (server.operator(), server.caller("u"));
    let body =
        json!({"plan": "PRO_MONTHLY", "expiresAt": "2026-01-01T01:00:00+00:30", "anchor": "2025-12-31"});
    let put = subscribe(&operator, "u", body).await;
    assert_eq!(
        (&put["expiresAt"], &put["anchor"], &put["plan"]),
        (&json!("2026-01-01T00:30:00Z"), &json!("2025-12-31"), &json!("PRO_MONTHLY"))
    );
    let path = "/admin/subscriptions/u";
    assert_eq!(operator.get(path).await.unwrap().json(), put);
    server.clock.advance(Duration::from_secs(1_799));
    assert_eq!(plan_of(&me).await, "PRO_MONTHLY");
    server.clock.advance(Duration::from_secs(1));
    assert_eq!(plan_of(&me).await, "FREE");
    assert_eq!(operator.get(path).await.unwrap().status, 404);
    assert_eq!(operator.get("/admin/subscriptions").await.unwrap().json()["items"], json!([]));
    assert_eq!(operator.delete(path).await.unwrap().status, 404);
    let renewed = subscribe(&operator, "u", json!({"plan": "STARTER_YEARLY"})).await;
    assert_eq!((&renewed["expiresAt"], &renewed["anchor"]), (&Value::Null, &Value::Null));
    assert_eq!(plan_of(&me).await, "STARTER_YEARLY");
    for (field, bad) in [
        ("expiresAt", json!("2026-01-01T00:30:00Z")),
        ("expiresAt", json!("tomorrow")),
        ("expiresAt", json!("9999-01-01T00:00:00Z")),
        ("expiresAt", json!(1_767_225_600)),
        ("anchor", json!("2026-02-29")),
        ("anchor", json!("31")),
        ("anchor", json!(31)),
    ] {
        let mut body = json!({"plan": "PRO_MONTHLY"});
        body[field] = bad;
        expect_error(&operator.put(path, &body).await.unwrap(), 400, "INVALID_REQUEST", field);
    }
    assert_eq!(operator.get(path).await.unwrap().json(), renewed, "nothing of that was saved");
    server.stop().await;
}

async fn subscriptions_are_listed_page_by_page(store: Store) {
    let server = Running::start(store).await;
    let operator = server.operator();
    let empty = operator.get("/admin/subscriptions").await.unwrap().json();
    assert_eq!(empty, json!({"items": [], "nextCursor": null}));
    for user in ["c", "a@b.c", "b%2Fx"] {
        subscribe(&operator, user, json!({"plan": "PRO_MONTHLY", "anchor": "2026-01-31"})).await;
    }
    let users = |page: &Value| -> Vec<String> {
        let items = page["items"].as_array().unwrap().iter();
        items.map(|item| item["user"].as_str().unwrap().to_owned()).collect()
    };
    let first = operator.get("/admin/subscriptions?limit=2").await.unwrap().json();
    assert_eq!((users(&first), &first["nextCursor"]), (vec!["a@b.c".into(), "b/x".into()], &json!("b/x")));
    assert_eq!(first["items"][0], operator.get("/admin/subscriptions/a@b.c").await.unwrap().json());
    let last = operator.get("/admin/subscriptions?limit=2&cursor=b%2Fx").await.unwrap().json();
    assert_eq!((users(&last), &last["nextCursor"]), (vec!["c".into()], &Value::Null));
    for (query, field) in [("limit=0", "limit"), ("cursor=", "cursor"), ("cursor=%0A", "cursor")] {
        let response = operator.get(&format!("/admin/subscriptions?{query}")).await.unwrap();
        expect_error(&response, 400, "INVALID_REQUEST", field);
    }
}

async fn a_token_claims_the_plan_of_a_user_without_a_subscription(store: Store) {
    let server = Running::start_with(store, &[PLAN_CLAIM]).await;
    let claim = |user, plan| claiming(&server.weir, user, PLAN_CLAIM.1, plan);
    assert_eq!(plan_of(&claim("u", json!("PRO_YEARLY"))).await, "PRO_YEARLY");
    assert_eq!(plan_of(&claim("u", json!("BUSINESS_MONTHLY"))).await, "BUSINESS_MONTHLY", "another token");
    assert_eq!(plan_of(&user(&server.weir, "u")).await, "FREE");
    let call = claim("u", json!("PRO_YEARLY")).get("/api/v1/ai/x").await.unwrap();
    assert_eq!((call.status, call.header("x-ratelimit-limit")), (200, Some("30")));
    // A subscription decides, also one to the free plan.
    for plan in ["STARTER_MONTHLY", "FREE"] {
        subscribe(&server.operator(), "u", json!({"plan": plan})).await;
        assert_eq!(plan_of(&claim("u", json!("PRO_YEARLY"))).await, plan);
    }
    assert_eq!(server.operator().delete("/admin/subscriptions/u").await.unwrap().status, 204);
    assert_eq!(plan_of(&claim("u", json!("PRO_YEARLY"))).await, "PRO_YEARLY");
    assert_eq!(metric(&server.weir, "weir_tier_unknown_plan_claims_total").await, 0);
    assert_eq!(plan_of(&claim("u", json!(null))).await, "FREE", "null is no claim");
    for unknown in [json!("GOLD"), json!("pro_yearly"), json!(["PRO_YEARLY"]), json!(7), json!("")] {
        assert_eq!(plan_of(&claim("u", unknown)).await, "FREE");
    }
    assert_eq!(metric(&server.weir, "weir_tier_unknown_plan_claims_total").await, 5);
    server.weir.wait_for_log(|line| line.contains("claims an unknown plan"), TEST_TIMEOUT).await;
    let lines = server.weir.log_lines();
    let warnings = lines.iter().filter(|line| line.contains("claims an unknown plan")).count();
    assert!((1..5).contains(&warnings), "{warnings} lines: they are throttled");
}

on_each_engine!(
    a_subscription_is_over_when_it_expires_also_in_memory,
    subscriptions_are_listed_page_by_page,
    a_token_claims_the_plan_of_a_user_without_a_subscription,
);

/// Each server has the subscription in memory when it expires, and nothing tells them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_subscription_expires_on_every_server_and_is_deleted_then() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let server = Running::start_with(Store::Postgres, &[PLAN_CLAIM]).await;
    let other = server.second_with(&[PLAN_CLAIM]).await;
    let soon = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(4);
    subscribe(&server.operator(), "u", json!({"plan": "PRO_MONTHLY", "expiresAt": soon.to_string()})).await;
    for (weir, after) in [(&server.weir, "FREE"), (&other, "STARTER_YEARLY")] {
        let plan = if after == "FREE" { json!(null) } else { json!(after) };
        let me = claiming(weir, "u", PLAN_CLAIM.1, plan);
        wait::until("the subscription counts", TEST_TIMEOUT, async || {
            plan_of(&me).await == "PRO_MONTHLY" || jiff::Timestamp::now() >= soon
        })
        .await;
        wait::until("it has expired", TEST_TIMEOUT, async || plan_of(&me).await == after).await;
        assert!(jiff::Timestamp::now() >= soon, "not before its time");
    }
}

/// Two servers, of which the first reaches the database through a proxy.
struct CutOff {
    proxy: Proxy,
    first: Weir,
    second: Weir,
    _database: Database,
}

impl CutOff {
    async fn start() -> Self {
        let database = Server::shared().database("cut").await;
        let proxy = Proxy::start(Server::shared().addr()).await;
        let start = |url: &str| weir().env("WEIR_STORE", url).env(PLAN_CLAIM.0, PLAN_CLAIM.1);
        let second = start(database.url()).spawn().await;
        // Known from the start, although the user never calls before the outage.
        subscribe(&operator(&second), "silent", json!({"plan": "STARTER_MONTHLY"})).await;
        let first = start(&database.url_via(proxy.addr())).spawn().await;
        Self { proxy, first, second, _database: database }
    }

    fn cut(&self) {
        self.proxy.refuse();
        self.proxy.cut();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn known_plans_survive_an_outage_and_follow_what_changed_meanwhile() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let servers = CutOff::start().await;
    let (first, second) = (operator(&servers.first), operator(&servers.second));
    let caller = |user: &str| super::fixtures::user(&servers.first, user);
    subscribe(&first, "changed", json!({"plan": "PRO_MONTHLY"})).await;
    subscribe(&first, "ended", json!({"plan": "PRO_YEARLY"})).await;
    let soon = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(3);
    let expiring = json!({"plan": "BUSINESS_YEARLY", "expiresAt": soon.to_string()});
    subscribe(&first, "expiring", expiring).await;
    // Only this user is read before the outage. The others are known because this server has put them.
    assert_eq!(plan_of(&caller("changed")).await, "PRO_MONTHLY");
    wait::until("all subscriptions are read", TEST_TIMEOUT, async || {
        plan_of(&caller("silent")).await == "STARTER_MONTHLY"
    })
    .await;
    servers.cut();
    // A change that fails must not make the server forget what it knows.
    wait::until("a change is refused", TEST_TIMEOUT, async || {
        let response = first.put("/admin/subscriptions/changed", &json!({"plan": "FREE"})).await.unwrap();
        response.status == 503
    })
    .await;
    assert_eq!(first.delete("/admin/subscriptions/ended").await.unwrap().status, 503);
    subscribe(&second, "changed", json!({"plan": "BUSINESS_MONTHLY"})).await;
    assert_eq!(second.delete("/admin/subscriptions/ended").await.unwrap().status, 204);
    for (user, plan) in
        [("changed", "PRO_MONTHLY"), ("ended", "PRO_YEARLY"), ("silent", "STARTER_MONTHLY"), ("new", "FREE")]
    {
        for _ in 0..2 {
            assert_eq!(plan_of(&caller(user)).await, plan, "{user}");
        }
    }
    let claimed = claiming(&servers.first, "claiming", PLAN_CLAIM.1, json!("PRO_YEARLY"));
    assert_eq!(plan_of(&claimed).await, "PRO_YEARLY");
    wait::until("it expires during the outage, too", TEST_TIMEOUT, async || {
        plan_of(&caller("expiring")).await == "FREE"
    })
    .await;
    assert!(jiff::Timestamp::now() >= soon, "not before its time");
    servers.proxy.pass();
    wait::until("the changes are known", TEST_TIMEOUT, async || {
        plan_of(&caller("changed")).await == "BUSINESS_MONTHLY" && plan_of(&caller("ended")).await == "FREE"
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_starts_before_an_outage_knows_the_plans_of_silent_users() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let servers = CutOff::start().await;
    servers
        .first
        .wait_for_log(|line| line.contains("read the subscriptions of the store"), TEST_TIMEOUT)
        .await;
    servers.cut();
    wait::until("the outage is noticed", TEST_TIMEOUT, async || {
        let response = operator(&servers.first).get("/admin/subscriptions/silent").await.unwrap();
        response.status == 503
    })
    .await;
    assert_eq!(plan_of(&user(&servers.first, "silent")).await, "STARTER_MONTHLY");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_user_without_room_is_503_with_the_limits_of_the_plan() {
    let settings = [("WEIR_RATE_LIMIT_KEYS_MAX", "1"), PLAN_CLAIM];
    let settings: Vec<_> = settings.into_iter().chain(LONG_TIMEOUTS).collect();
    let server = Running::start_with(Store::Embedded, &settings).await;
    assert_eq!(user(&server.weir, "first").get("/api/v1/ai/x").await.unwrap().status, 200);
    let second = claiming(&server.weir, "second", PLAN_CLAIM.1, json!("PRO_MONTHLY"));
    let response = second.get("/api/v1/ai/x").await.unwrap();
    expect_error(&response, 503, "DEPENDENCY_UNAVAILABLE", "rate_limit.keys_max");
    for (name, value) in [
        ("x-ratelimit-limit", "30"),
        ("x-ratelimit-remaining", "40"),
        ("x-ratelimit-reset", "0"),
        ("ratelimit-policy", "\"minute\";q=30;w=60"),
        ("ratelimit", "\"minute\";r=40;t=0"),
        ("retry-after", "1"),
    ] {
        assert_eq!(response.header(name), Some(value), "{name}");
    }
}
