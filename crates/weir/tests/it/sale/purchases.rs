//! Purchases: who gets a unit, and what the others are answered.

use http::Method;
use serde_json::json;

use super::fixtures::{
    UNTHROTTLED, attempt, buy, create, create_active, ms_from_now, product, purchase, status,
};
use crate::fixtures::{Running, Store, audit, on_each_engine};

async fn stock_starts_as_configured(store: Store) {
    let running = Running::start(store).await;
    create(&running.operator(), &product("W", 123, &ms_from_now(60_000), &ms_from_now(120_000))).await;
    let shown = status(&running.client(), "W").await;
    assert_eq!((&shown["stock"], &shown["initialStock"]), (&json!(123), &json!(123)));
}

async fn each_purchase_takes_one_unit(store: Store) {
    let running = Running::start(store).await;
    let client = running.client();
    create_active(&running.operator(), "W", 5).await;
    for left in (0..5).rev() {
        assert!(buy(&client, "W", &format!("b{left}")).await.is_ok());
        assert_eq!(status(&client, "W").await["stock"], left);
    }
}

async fn without_stock_every_buyer_gets_sold_out(store: Store) {
    let running = Running::start(store).await;
    let client = running.client();
    create_active(&running.operator(), "W", 1).await;
    assert!(buy(&client, "W", "first").await.is_ok());
    for n in 0..5 {
        let late = attempt(&client, "W", &format!("late-{n}")).await;
        assert_eq!(late.status, 200);
        let error = json!({"code": "SOLD_OUT", "message": "Sorry, all items have been sold."});
        assert_eq!(late.json(), json!({"success": false, "error": error}));
    }
    assert_eq!(audit(&running.operator()).await["sale"]["sold"], 1);
}

async fn a_valid_purchase_succeeds_and_can_be_read_at_once(store: Store) {
    let running = Running::start(store).await;
    let client = running.client();
    create_active(&running.operator(), "W", 5).await;
    let none = purchase(&client, "W", "a@example.com").await;
    assert_eq!((none.status, &none.json()["error"]["code"]), (404, &json!("NOT_FOUND")));
    let before = jiff::Timestamp::now();
    let bought = attempt(&client, "W", "a@example.com").await;
    assert_eq!((bought.status, &bought.json()["success"]), (200, &json!(true)));
    let data = bought.json()["data"].clone();
    let day = before.strftime("%Y%m%d").to_string();
    let number = data["purchaseNo"].as_str().unwrap();
    assert!(number.starts_with("PUR-") && number.ends_with("-0001"), "{number} on {day}");
    let at: jiff::Timestamp = data["purchasedAt"].as_str().unwrap().parse().unwrap();
    assert!((at - before).get_hours().abs() < 1, "{at}");
    let found = purchase(&client, "W", "a@example.com").await;
    assert_eq!((found.status, &found.json()["data"]), (200, &data));
    let headers = [("x-user-id", "  a@example.com ")];
    let latest = client.request(Method::GET, "/api/v1/purchases", &headers, "").await.unwrap();
    assert_eq!(latest.json()["data"], data, "blanks around a user id do not matter");
}

async fn a_second_purchase_is_already_purchased(store: Store) {
    let running = Running::start_with(store, &[UNTHROTTLED]).await;
    let client = running.client();
    create_active(&running.operator(), "W", 2).await;
    assert!(buy(&client, "W", "a").await.is_ok());
    assert_eq!(buy(&client, "W", "a").await, Err("ALREADY_PURCHASED".to_owned()));
    assert_eq!(status(&client, "W").await["stock"], 1);
    assert!(buy(&client, "W", "b").await.is_ok());
    assert_eq!(
        buy(&client, "W", "a").await,
        Err("ALREADY_PURCHASED".to_owned()),
        "even when all units are sold"
    );
}

async fn a_purchase_before_the_start_is_not_active(store: Store) {
    let running = Running::start(store).await;
    create(&running.operator(), &product("W", 5, &ms_from_now(600_000), &ms_from_now(700_000))).await;
    let early = attempt(&running.client(), "W", "a").await;
    assert_eq!((early.status, &early.json()["error"]["code"]), (200, &json!("SALE_NOT_ACTIVE")));
}

async fn an_unknown_sku_is_404_and_bad_input_400_with_its_fields(store: Store) {
    let running = Running::start(store).await;
    let client = running.client();
    create_active(&running.operator(), "W", 5).await;
    for sku in ["NOT-THERE", "not a sku"] {
        let unknown = attempt(&client, sku, &format!("buyer of {sku}")).await;
        assert_eq!((unknown.status, &unknown.json()["error"]["code"]), (404, &json!("NOT_FOUND")), "{sku}");
    }
    let post = async |headers: &[(&str, &str)], body: &str| {
        let json = [("content-type", "application/json")];
        let headers: Vec<_> = json.iter().chain(headers).copied().collect();
        client.request(Method::POST, "/api/v1/purchases", &headers, body.to_owned()).await.unwrap()
    };
    let good = r#"{"sku":"W","qty":1}"#;
    let long = "x".repeat(256);
    for headers in [&[][..], &[("x-user-id", "  ")], &[("x-user-id", long.as_str())]] {
        let refused = post(headers, good).await;
        assert_eq!(refused.status, 400);
        let error = refused.json()["error"].clone();
        assert_eq!(error["code"], "VALIDATION_ERROR");
        assert_eq!(error["message"], "X-User-Id header is required and must be a non-empty string.");
        assert_eq!(error["fields"]["X-User-Id"], "Must be a non-empty string (max 255 characters)");
    }
    for (body, field) in [
        ("{}", "sku"),
        (r#"{"sku":"W"}"#, "qty"),
        (r#"{"sku":"W","qty":2}"#, "qty"),
        (r#"{"sku":"W","qty":"1"}"#, "qty"),
        (r#"{"sku":7,"qty":1}"#, "sku"),
        (r#"{"sku":"","qty":1}"#, "sku"),
    ] {
        let refused = post(&[("x-user-id", "a")], body).await;
        assert_eq!((refused.status, &refused.json()["error"]["code"]), (400, &json!("VALIDATION_ERROR")));
        assert!(refused.json()["error"]["fields"][field].is_string(), "{body}: {:?}", refused.body);
    }
    for body in ["", "{", "[]", "7"] {
        let refused = post(&[("x-user-id", "a")], body).await;
        assert_eq!((refused.status, &refused.json()["error"]["code"]), (400, &json!("VALIDATION_ERROR")));
    }
    let wrong = client.delete("/api/v1/purchases").await.unwrap();
    assert_eq!((wrong.status, &wrong.json()["error"]["code"]), (405, &json!("METHOD_NOT_ALLOWED")));
    assert!(wrong.header("allow").unwrap().contains("POST"));
    assert!(buy(&client, "W", "a").await.is_ok(), "none of these counted as an attempt");
}

on_each_engine!(
    stock_starts_as_configured,
    each_purchase_takes_one_unit,
    without_stock_every_buyer_gets_sold_out,
    a_valid_purchase_succeeds_and_can_be_read_at_once,
    a_second_purchase_is_already_purchased,
    a_purchase_before_the_start_is_not_active,
    an_unknown_sku_is_404_and_bad_input_400_with_its_fields,
);
