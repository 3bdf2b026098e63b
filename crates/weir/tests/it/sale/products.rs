//! Products, for the operator.

use http::Method;
use serde_json::{Value, json};

use super::fixtures::{buy, create, create_active, ms_from_now, product, purchase, status, wait_for_state};
use crate::fixtures::{Running, Store, audit, on_each_engine};

async fn a_product_is_created_read_changed_and_reset(store: Store) {
    let running = Running::start(store).await;
    let (client, operator) = (running.client(), running.operator());
    let (start, end) = (ms_from_now(600_000), ms_from_now(700_000));
    let made = create(&operator, &product("WIDGET-001", 100, &start, &end)).await;
    let mut expected = product("WIDGET-001", 100, &start, &end);
    expected["state"] = json!("UPCOMING");
    expected["createdAt"] = made["createdAt"].clone();
    assert_eq!(made, expected);
    let path = "/api/v1/products/WIDGET-001";
    let read = operator.get(path).await.unwrap().json()["data"].clone();
    expected["currentStock"] = json!(100);
    expected["totalPurchases"] = json!(0);
    assert_eq!(read, expected);
    let change = json!({"productName": "Super Widget", "initialStock": 200});
    let changed = operator.put(path, &change).await.unwrap();
    assert_eq!((changed.status, &changed.json()["data"]["initialStock"]), (200, &json!(200)));
    assert_eq!(changed.json()["data"]["startTime"], start);
    let shown = status(&client, "WIDGET-001").await;
    assert_eq!((&shown["productName"], &shown["stock"]), (&json!("Super Widget"), &json!(200)));
    let listed = operator.get("/api/v1/products?limit=1").await.unwrap().json()["data"].clone();
    assert_eq!((&listed["items"][0]["sku"], &listed["nextCursor"]), (&json!("WIDGET-001"), &json!(null)));
    let reset = operator.delete(path).await.unwrap();
    let message = "Product WIDGET-001 and all associated sale data have been reset.";
    assert_eq!(reset.json(), json!({"success": true, "data": {"message": message}}));
    for answer in [operator.get(path).await, operator.delete(path).await, operator.put(path, &change).await] {
        let answer = answer.unwrap();
        assert_eq!((answer.status, &answer.json()["error"]["code"]), (404, &json!("NOT_FOUND")));
    }
    assert_eq!(client.get("/api/v1/sales?sku=WIDGET-001").await.unwrap().status, 404);
}

async fn only_the_operator_may_manage_products(store: Store) {
    let running = Running::start(store).await;
    create(&running.operator(), &product("W", 1, &ms_from_now(60_000), &ms_from_now(70_000))).await;
    for client in [running.client(), running.client().with_header("x-admin-key", "wrong")] {
        for (method, path) in [
            (Method::POST, "/api/v1/products"),
            (Method::GET, "/api/v1/products"),
            (Method::GET, "/api/v1/products/W"),
            (Method::PUT, "/api/v1/products/W"),
            (Method::DELETE, "/api/v1/products/W"),
        ] {
            let refused = client.request(method.clone(), path, &[], "").await.unwrap();
            assert_eq!(refused.status, 401, "{method} {path}");
            let error = json!({"code": "UNAUTHORIZED", "message": "Missing or invalid X-Admin-Key header."});
            assert_eq!(refused.json(), json!({"success": false, "error": error}));
        }
    }
    assert_eq!(status(&running.client(), "W").await["stock"], 1);
}

async fn all_invalid_fields_of_a_product_are_named_at_once(store: Store) {
    let running = Running::start(store).await;
    let operator = running.operator();
    let fields = async |body: &Value| {
        let refused = operator.post("/api/v1/products", body).await.unwrap();
        let error = refused.json()["error"].clone();
        assert_eq!((refused.status, &error["code"]), (400, &json!("VALIDATION_ERROR")), "{body}");
        error["fields"].as_object().unwrap().keys().cloned().collect::<Vec<_>>()
    };
    let all = ["endTime", "initialStock", "productName", "sku", "startTime"];
    assert_eq!(fields(&json!({})).await, all);
    let bad = json!({"sku": "a b", "productName": " ", "initialStock": 0, "startTime": "soon", "endTime": 7});
    assert_eq!(fields(&bad).await, all);
    for (field, value) in [
        ("sku", json!("x".repeat(65))),
        ("sku", json!("a_b")),
        ("productName", json!("x".repeat(256))),
        ("productName", json!("a\u{0}b")),
        ("initialStock", json!(-1)),
        ("initialStock", json!(1.5)),
        ("initialStock", json!("5")),
        ("initialStock", json!(2_147_483_648_u64)),
        ("startTime", json!(ms_from_now(-60_000))),
        ("startTime", json!("2026-13-01T00:00:00Z")),
        ("endTime", json!(ms_from_now(60_000))),
        ("endTime", json!(null)),
    ] {
        let mut body = product("W", 5, &ms_from_now(120_000), &ms_from_now(240_000));
        body[field] = value;
        assert_eq!(fields(&body).await, [field], "{body}");
    }
    create(&operator, &product("W", 5, &ms_from_now(120_000), &ms_from_now(240_000))).await;
    assert_eq!(
        fields(&product("W", 5, &ms_from_now(120_000), &ms_from_now(240_000))).await,
        ["sku"],
        "the SKU exists already"
    );
    for (field, value) in [("endTime", json!(ms_from_now(60_000))), ("initialStock", json!(0))] {
        let refused = operator.put("/api/v1/products/W", &json!({field: value})).await.unwrap();
        assert!(refused.json()["error"]["fields"][field].is_string(), "{:?}", refused.body);
    }
    assert_eq!(status(&running.client(), "W").await["stock"], 5, "refused changes change nothing");
}

async fn a_product_created_again_under_its_sku_is_a_new_sale(store: Store) {
    let running = Running::start_with(store, &[super::fixtures::UNTHROTTLED]).await;
    let (client, operator) = (running.client(), running.operator());
    create_active(&operator, "W", 1).await;
    assert!(buy(&client, "W", "a").await.is_ok());
    assert_eq!(operator.delete("/api/v1/products/W").await.unwrap().status, 200);
    assert_eq!(purchase(&client, "W", "a").await.status, 404);
    create_active(&operator, "W", 2).await;
    assert_eq!(status(&client, "W").await["stock"], 2);
    assert!(buy(&client, "W", "a").await.is_ok(), "the new sale has no purchases");
    assert_eq!(audit(&operator).await["sale"]["sold"], 1);
}

async fn a_product_created_on_one_server_is_sold_by_the_other(store: Store) {
    if store == Store::Embedded {
        return;
    }
    let running = Running::start(store).await;
    let second = running.second().await;
    let other = weir_testkit::http::Client::new(second.base_url());
    create_active(&running.operator(), "W", 2).await;
    wait_for_state(&other, "W", "ACTIVE").await;
    assert!(buy(&other, "W", "a").await.is_ok());
    weir_testkit::wait::until("the first server shows it", crate::fixtures::TEST_TIMEOUT, async || {
        status(&running.client(), "W").await["stock"] == 1
    })
    .await;
    assert!(buy(&running.client(), "W", "b").await.is_ok());
    wait_for_state(&other, "W", "ENDED").await;
    assert_eq!(running.operator().delete("/api/v1/products/W").await.unwrap().status, 200);
    weir_testkit::wait::until("the other server has removed it", crate::fixtures::TEST_TIMEOUT, async || {
        other.get("/api/v1/sales?sku=W").await.unwrap().status == 404
    })
    .await;
}

on_each_engine!(
    a_product_is_created_read_changed_and_reset,
    only_the_operator_may_manage_products,
    all_invalid_fields_of_a_product_are_named_at_once,
    a_product_created_again_under_its_sku_is_a_new_sale,
    a_product_created_on_one_server_is_sold_by_the_other,
);
