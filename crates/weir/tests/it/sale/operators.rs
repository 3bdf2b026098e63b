//! What operators do to sales: end and extend them, read who bought, and reset products.

use http::Method;
use serde_json::{Value, json};
use weir_testkit::http::{Client, Response};
use weir_testkit::wait;

use super::fixtures::{
    Listener, UNTHROTTLED, attempt, buy, create, create_active, create_soon, ms_from_now, product, status,
    wait_for_state,
};
use super::redis::{Fleet, skipped};
use crate::fixtures::{Running, Store, TEST_TIMEOUT, on_each_engine};

async fn end(operator: &Client, sku: &str) -> Response {
    operator.post(&format!("/api/v1/products/{sku}/end"), &json!({})).await.expect("an answer")
}

async fn extend(operator: &Client, sku: &str, end: &str) -> Response {
    let path = format!("/api/v1/products/{sku}/extend");
    operator.post(&path, &json!({"endTime": end})).await.expect("an answer")
}

fn refusal(response: &Response) -> (u16, Value) {
    (response.status, response.json()["error"]["code"].clone())
}

async fn an_operator_ends_a_sale_and_everybody_learns_of_it(store: Store) {
    let running = Running::start_with(store, &[UNTHROTTLED]).await;
    let (client, operator) = (running.client(), running.operator());
    create(&operator, &product("LATER", 5, &ms_from_now(600_000), &ms_from_now(700_000))).await;
    assert_eq!(refusal(&end(&operator, "LATER").await), (200, json!("SALE_NOT_ACTIVE")));
    assert_eq!(refusal(&end(&operator, "NONE").await), (404, json!("NOT_FOUND")));
    assert_eq!(end(&client, "LATER").await.status, 401);
    create_active(&operator, "W", 5).await;
    let mut listener = Listener::connect(running.weir.addr(), "?sku=W", None).await;
    assert_eq!(listener.next().await.unwrap().data["endReason"], Value::Null);
    assert_eq!(status(&client, "W").await.get("endReason"), Some(&Value::Null));
    let bought = attempt(&client, "W", "a").await.json()["data"].clone();
    assert_eq!(bought["sku"], "W");
    let ended = end(&operator, "W").await.json()["data"].clone();
    assert_eq!((&ended["state"], &ended["endReason"]), (&json!("ENDED"), &json!("ENDED_BY_OPERATOR")));
    assert_eq!((&ended["currentStock"], &ended["totalPurchases"]), (&json!(4), &json!(1)));
    let told = listener.until("state-change").await;
    assert_eq!(told.data, json!({"sku": "W", "state": "ENDED", "reason": "ENDED_BY_OPERATOR"}));
    let shown = status(&client, "W").await;
    assert_eq!((&shown["state"], &shown["endReason"]), (&json!("ENDED"), &json!("ENDED_BY_OPERATOR")));
    let first = Listener::connect(running.weir.addr(), "?sku=W", None).await.next().await.unwrap();
    assert_eq!(first.data["endReason"], "ENDED_BY_OPERATOR");
    assert_eq!(buy(&client, "W", "b").await, Err("SALE_NOT_ACTIVE".to_owned()));
    assert_eq!(buy(&client, "W", "a").await, Err("ALREADY_PURCHASED".to_owned()));
    assert_eq!(refusal(&end(&operator, "W").await), (200, json!("SALE_NOT_ACTIVE")));
    assert_eq!(
        refusal(&extend(&operator, "W", &ms_from_now(9_000_000)).await),
        (200, json!("SALE_NOT_MODIFIABLE"))
    );
}

async fn an_extended_sale_goes_on_after_its_first_end(store: Store) {
    let running = Running::start_with(store, &[UNTHROTTLED]).await;
    let (client, operator) = (running.client(), running.operator());
    create_soon(&operator, "W", 5, 6_000).await;
    wait_for_state(&client, "W", "ACTIVE").await;
    let first = status(&client, "W").await["endTime"].as_str().unwrap().to_owned();
    for (body, problem) in [
        (json!({}), "Is required"),
        (json!({"endTime": "soon"}), "Must be an ISO 8601 time such as 2026-01-01T12:00:00.000Z"),
        (json!({"endTime": first}), "Must be later than the present endTime"),
        (json!({"endTime": ms_from_now(-1_000)}), "Must be later than the present endTime"),
    ] {
        let refused = operator.post("/api/v1/products/W/extend", &body).await.unwrap();
        assert_eq!(refusal(&refused), (400, json!("VALIDATION_ERROR")), "{body}");
        assert_eq!(refused.json()["error"]["fields"]["endTime"], problem);
    }
    let later = ms_from_now(3_600_000);
    let extended = extend(&operator, "W", &later).await.json()["data"].clone();
    assert_eq!((&extended["endTime"], &extended["state"]), (&json!(later), &json!("ACTIVE")));
    assert_eq!(status(&client, "W").await["endTime"], later);
    let first: jiff::Timestamp = first.parse().unwrap();
    wait::until("the first end is over", TEST_TIMEOUT, async || jiff::Timestamp::now() > first).await;
    assert!(buy(&client, "W", "a").await.is_ok());
    assert_eq!(status(&client, "W").await["state"], "ACTIVE");
    assert_eq!(refusal(&extend(&operator, "NONE", &later).await), (404, json!("NOT_FOUND")));
}

async fn purchases_are_listed_in_pages_or_as_csv(store: Store) {
    let running = Running::start_with(store, &[UNTHROTTLED]).await;
    let (client, operator) = (running.client(), running.operator());
    create_active(&operator, "W", 9).await;
    let mut expected = Vec::new();
    for buyer in ["b", "a,\"x\"", "c", "a", "ü"] {
        let data = attempt(&client, "W", buyer).await.json()["data"].clone();
        expected.push(json!({
            "purchaseNo": data["purchaseNo"], "userId": buyer, "purchasedAt": data["purchasedAt"]
        }));
    }
    let (mut listed, mut cursor) = (Vec::new(), String::new());
    loop {
        let path = format!("/api/v1/products/W/purchases?limit=2{cursor}");
        let page = operator.get(&path).await.unwrap().json()["data"].clone();
        listed.extend(page["items"].as_array().unwrap().clone());
        let Some(next) = page["nextCursor"].as_str() else { break };
        cursor = format!("&cursor={next}");
    }
    assert_eq!(listed, expected);
    let csv = async |sku: &str| {
        let path = format!("/api/v1/products/{sku}/purchases");
        operator.request(Method::GET, &path, &[("accept", "text/csv")], "").await.unwrap()
    };
    let response = csv("W").await;
    assert_eq!(response.header("content-type"), Some("text/csv; charset=utf-8"));
    let text = String::from_utf8(response.body.to_vec()).unwrap();
    let line = |purchase: &Value, user: &str| {
        let [number, at] = ["purchaseNo", "purchasedAt"].map(|field| purchase[field].as_str().unwrap());
        format!("{number},{user},{at}\n")
    };
    let users = ["b", "\"a,\"\"x\"\"\"", "c", "a", "ü"];
    let lines: String = expected.iter().zip(users).map(|(purchase, user)| line(purchase, user)).collect();
    assert_eq!(text, format!("purchaseNo,userId,purchasedAt\n{lines}"));
    assert_eq!(csv("NONE").await.status, 404);
    assert_eq!(client.get("/api/v1/products/W/purchases").await.unwrap().status, 401);
    for query in ["cursor=x", "limit=0"] {
        let refused = operator.get(&format!("/api/v1/products/W/purchases?{query}")).await.unwrap();
        assert_eq!(refusal(&refused), (400, json!("VALIDATION_ERROR")), "{query}");
    }
}

async fn a_product_in_use_is_reset_only_where_that_is_allowed(store: Store) {
    let running = Running::start_with(store, &[UNTHROTTLED, ("WEIR_SALE_ALLOW_RESET", "false")]).await;
    let (client, operator) = (running.client(), running.operator());
    let path = "/api/v1/products/W";
    create(&operator, &product("W", 5, &ms_from_now(600_000), &ms_from_now(700_000))).await;
    assert_eq!(operator.delete(path).await.unwrap().status, 200, "it has not begun");
    create_active(&operator, "W", 5).await;
    assert_eq!(refusal(&operator.delete(path).await.unwrap()), (409, json!("RESET_DISABLED")));
    assert!(buy(&client, "W", "a").await.is_ok(), "it is still there");
    assert_eq!(end(&operator, "W").await.status, 200);
    assert_eq!(refusal(&operator.delete(path).await.unwrap()), (409, json!("RESET_DISABLED")));
    assert_eq!(buy(&client, "W", "a").await, Err("ALREADY_PURCHASED".to_owned()));
}

on_each_engine!(
    an_operator_ends_a_sale_and_everybody_learns_of_it,
    an_extended_sale_goes_on_after_its_first_end,
    purchases_are_listed_in_pages_or_as_csv,
    a_product_in_use_is_reset_only_where_that_is_allowed,
);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_end_decided_without_postgres_is_final_once_postgres_is_back() {
    if skipped() {
        return;
    }
    let fleet = Fleet::start().await;
    create_active(&fleet.operator(), "W", 5).await;
    create_active(&fleet.operator(), "X", 5).await;
    wait_for_state(&fleet.clients[1], "X", "ACTIVE").await;
    assert!(buy(&fleet.clients[1], "W", "a").await.is_ok());
    fleet.to_postgres.refuse();
    fleet.to_postgres.cut();
    assert_eq!(end(&fleet.operator(), "W").await.json()["data"]["endReason"], "ENDED_BY_OPERATOR");
    let later = ms_from_now(7_200_000);
    assert_eq!(extend(&fleet.operator(), "X", &later).await.json()["data"]["endTime"], later);
    for client in &fleet.clients {
        assert_eq!(buy(client, "W", "b").await, Err("SALE_NOT_ACTIVE".to_owned()));
        wait::until("both servers know", TEST_TIMEOUT, async || {
            status(client, "W").await["endReason"] == "ENDED_BY_OPERATOR"
                && status(client, "X").await["endTime"] == later
        })
        .await;
    }
    fleet.to_postgres.pass();
    fleet.wait_until_healthy().await;
    // Redis forgets, so only Postgres can know.
    wait::until("Postgres knows", TEST_TIMEOUT * 2, async || {
        let ended = "SELECT count(*) FROM products WHERE sku = 'W' AND ended_by_operator";
        let extended =
            "SELECT count(*) FROM products WHERE sku = 'X' AND end_time > now() + interval '90 minutes'";
        fleet.count(ended).await == 1 && fleet.count(extended).await == 1
    })
    .await;
    fleet.redis.command(&["FLUSHALL"]).await;
    assert_eq!(buy(&fleet.clients[1], "W", "b").await, Err("SALE_NOT_ACTIVE".to_owned()));
    assert_eq!(status(&fleet.clients[1], "W").await["endReason"], "ENDED_BY_OPERATOR");
    wait::until("the extended sale is back", TEST_TIMEOUT, async || {
        status(&fleet.clients[1], "X").await["endTime"] == later
    })
    .await;
    fleet
        .expect_items(json!([
            {"sku": "X", "initialStock": 5, "sold": 0, "persisted": 0},
            {"sku": "W", "initialStock": 5, "sold": 1, "persisted": 1},
        ]))
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_postgres_the_latest_purchase_is_answered_by_redis() {
    if skipped() {
        return;
    }
    let fleet = Fleet::start().await;
    create_active(&fleet.operator(), "W", 5).await;
    wait_for_state(&fleet.clients[1], "W", "ACTIVE").await;
    fleet.to_postgres.refuse();
    fleet.to_postgres.cut();
    assert!(buy(&fleet.clients[0], "W", "a").await.is_ok());
    for client in &fleet.clients {
        let latest = async |buyer: &str| {
            client.request(Method::GET, "/api/v1/purchases", &[("x-user-id", buyer)], "").await.unwrap()
        };
        let found = latest("a").await;
        assert_eq!((found.status, &found.json()["data"]["sku"]), (200, &json!("W")));
        assert_eq!(refusal(&latest("nobody").await), (404, json!("NOT_FOUND")));
    }
}
