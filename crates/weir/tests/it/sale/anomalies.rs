//! Anomalies in attempts to buy: found over HTTP, listed, counted and logged. Which crowds are anomalies is tested in
//! `weir-core`.

use http::Method;
use serde_json::{Value, json};
use weir_testkit::http::Client;

use super::fixtures::{UNTHROTTLED, create_active};
use crate::fixtures::{Running, Store, TEST_TIMEOUT};

const CHROME: &str = "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/142.0";
/// Lets tests name the address of a caller.
const TRUSTED: (&str, &str) = ("WEIR_EDGE_TRUSTED_PROXIES", "127.0.0.0/8");

async fn attempt(client: &Client, sku: &str, buyer: &str, address: &str, agent: Option<&str>) {
    let mut headers =
        vec![("content-type", "application/json"), ("x-user-id", buyer), ("x-forwarded-for", address)];
    headers.extend(agent.map(|agent| ("user-agent", agent)));
    let body = json!({"sku": sku, "qty": 1}).to_string();
    let response = client.request(Method::POST, "/api/v1/purchases", &headers, body).await.unwrap();
    assert!(matches!(response.status, 200 | 404), "{:?}", response.body);
}

async fn anomalies(operator: &Client, query: &str) -> Value {
    let response = operator.get(&format!("/admin/sale/anomalies{query}")).await.unwrap();
    assert_eq!(response.status, 200, "{:?}", response.body);
    response.json()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn anomalies_are_listed_counted_and_logged() {
    let running = Running::start_with(Store::Embedded, &[TRUSTED]).await;
    let (client, operator) = (running.client(), running.operator());
    create_active(&operator, "W", 10).await;
    assert_eq!(anomalies(&operator, "").await, json!({"items": [], "nextCursor": null}));
    // Sixty names that curl brings from one address, and people's attempts at another sale.
    for n in 0..60 {
        attempt(&client, "W", &format!("{n:x}q"), "203.0.113.7", Some("curl/8.5.0")).await;
        attempt(&client, "OTHER", &format!("{n:x}w"), &format!("198.51.100.{n}"), Some(CHROME)).await;
    }
    let found = anomalies(&operator, "").await;
    let item = &found["items"][0];
    assert_eq!(found["items"].as_array().unwrap().len(), 1, "{found}");
    assert_eq!(
        (&item["pattern"], &item["key"], &item["sku"]),
        (&json!("many_users_one_address"), &json!("203.0.113.7"), &json!("W"))
    );
    assert!(item["count"].as_u64().unwrap() >= 30 && item["firstSeen"].as_str() <= item["lastSeen"].as_str());
    let metrics = String::from_utf8(client.get("/metrics").await.unwrap().body.to_vec()).unwrap();
    assert!(metrics.contains("weir_sale_anomalies_total{pattern=\"many_users_one_address\"} 1"), "{metrics}");
    assert!(metrics.contains("weir_sale_anomalies_total{pattern=\"network_spike\"} 0"));
    let counted = metrics.lines().find_map(|line| {
        line.strip_prefix("weir_sale_anomalous_attempts_total{pattern=\"many_users_one_address\"} ")
    });
    assert!(counted.unwrap().parse::<u64>().unwrap() > 1, "{counted:?}");
    let line = running.weir.wait_for_log(|line| line.contains("many_users_one_address"), TEST_TIMEOUT).await;
    assert!(line.contains("203.0.113.7"), "{line}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn anomalies_are_read_page_by_page() {
    let running = Running::start_with(Store::Embedded, &[TRUSTED, UNTHROTTLED]).await;
    let (client, operator) = (running.client(), running.operator());
    // The sales are unknown: attempts are looked at whatever becomes of them.
    for sku in ["A", "B", "C"] {
        for n in 0..60 {
            attempt(&client, sku, &format!("{n:x}q"), "203.0.113.7", None).await;
        }
    }
    let (mut skus, mut query) = (Vec::new(), "?limit=2".to_owned());
    loop {
        let page = anomalies(&operator, &query).await;
        skus.extend(
            page["items"].as_array().unwrap().iter().map(|item| item["sku"].as_str().unwrap().to_owned()),
        );
        let Some(cursor) = page["nextCursor"].as_str() else { break };
        query = format!("?limit=2&cursor={cursor}");
    }
    assert_eq!(skus, ["C", "B", "A"]);
    for query in ["?limit=0", "?cursor=x"] {
        let refused = operator.get(&format!("/admin/sale/anomalies{query}")).await.unwrap();
        assert_eq!((refused.status, &refused.json()["code"]), (400, &json!("INVALID_REQUEST")), "{query}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_attempt_is_a_line_if_that_is_wanted() {
    let running = Running::start_with(Store::Embedded, &[TRUSTED, ("WEIR_SALE_LOG_ATTEMPTS", "true")]).await;
    let (client, operator) = (running.client(), running.operator());
    create_active(&operator, "W", 1).await;
    for (buyer, sku) in [("ada", "W"), ("bob", "W"), ("cy", "GONE")] {
        attempt(&client, sku, buyer, "203.0.113.7", Some("curl/8.5.0")).await;
    }
    for (buyer, outcome) in [("ada", "BOUGHT"), ("bob", "SOLD_OUT"), ("cy", "NOT_FOUND")] {
        let is_wanted =
            |line: &str| line.contains("an attempt to buy") && line.contains(&format!("\"{buyer}\""));
        let line = running.weir.wait_for_log(is_wanted, TEST_TIMEOUT).await;
        let line: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(line["outcome"], outcome, "{line}");
        assert_eq!((&line["address"], &line["userAgent"]), (&json!("203.0.113.7"), &json!("curl/8.5.0")));
        assert!(line["micros"].as_u64().is_some() && line["httpRequestId"].is_string(), "{line}");
    }
    let silent = Running::start(Store::Embedded).await;
    create_active(&silent.operator(), "W", 1).await;
    attempt(&silent.client(), "W", "ada", "203.0.113.7", None).await;
    create_active(&silent.operator(), "LATER", 1).await;
    let is_later = |line: &str| line.contains("a product was created") && line.contains("LATER");
    silent.weir.wait_for_log(is_later, TEST_TIMEOUT).await;
    assert!(silent.weir.log_lines().iter().all(|line| !line.contains("an attempt to buy")));
}
