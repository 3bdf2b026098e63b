//! The states of a sale over time.

use std::time::Duration;

use serde_json::json;

use super::fixtures::{
    MINUTE, attempt, buy, create, create_active, create_soon, ms_from_now, product, status, wait_for_state,
};
use crate::fixtures::{InProcess, Running, Store, on_each_engine};

/// Creates a sale from 00:01 to 00:11 of the day at whose start the clock of servers in this process is set.
async fn sale(server: &InProcess, sku: &str, stock: u32) {
    let wanted = product(sku, stock, "2026-01-01T00:01:00.000Z", "2026-01-01T00:11:00.000Z");
    create(&server.operator(), &wanted).await;
}

async fn before_its_start_a_sale_is_upcoming(store: Store) {
    let server = InProcess::start(store).await;
    sale(&server, "W", 5).await;
    let before = status(&server.client, "W").await;
    assert_eq!((&before["state"], &before["stock"]), (&json!("UPCOMING"), &json!(5)));
    server.clock.advance(MINUTE - Duration::from_millis(1));
    assert_eq!(status(&server.client, "W").await["state"], "UPCOMING");
    assert_eq!(buy(&server.client, "W", "a").await, Err("SALE_NOT_ACTIVE".to_owned()));
    server.stop().await;
}

async fn from_its_start_a_sale_with_stock_is_active(store: Store) {
    let server = InProcess::start(store).await;
    sale(&server, "W", 5).await;
    server.clock.advance(MINUTE);
    assert_eq!(status(&server.client, "W").await["state"], "ACTIVE");
    assert!(buy(&server.client, "W", "a").await.is_ok());
    server.stop().await;
}

async fn from_its_end_a_sale_is_ended(store: Store) {
    let server = InProcess::start(store).await;
    sale(&server, "W", 5).await;
    server.clock.advance(MINUTE * 11 - Duration::from_millis(1));
    assert_eq!(status(&server.client, "W").await["state"], "ACTIVE");
    assert!(buy(&server.client, "W", "a").await.is_ok());
    server.clock.advance(Duration::from_millis(1));
    let after = status(&server.client, "W").await;
    assert_eq!(
        (&after["state"], &after["stock"]),
        (&json!("ENDED"), &json!(4)),
        "the remaining stock is shown"
    );
    assert_eq!(buy(&server.client, "W", "b").await, Err("SALE_NOT_ACTIVE".to_owned()));
    server.stop().await;
}

async fn the_last_unit_ends_a_sale_at_once(store: Store) {
    let running = Running::start(store).await;
    let client = running.client();
    create_active(&running.operator(), "W", 1).await;
    assert!(buy(&client, "W", "a").await.is_ok());
    let after = status(&client, "W").await;
    assert_eq!((&after["state"], &after["stock"]), (&json!("ENDED"), &json!(0)));
}

async fn an_ended_sale_stays_ended(store: Store) {
    let mut running = Running::start(store).await;
    let (client, operator) = (running.client(), running.operator());
    create_active(&operator, "W", 1).await;
    assert!(buy(&client, "W", "a").await.is_ok());
    create_soon(&operator, "X", 1, 200).await;
    wait_for_state(&client, "X", "ENDED").await;
    for sku in ["W", "X"] {
        let path = format!("/api/v1/products/{sku}");
        let again = json!({"startTime": ms_from_now(60_000), "endTime": ms_from_now(120_000)});
        let change = operator.put(&path, &again).await.unwrap();
        assert_eq!((change.status, &change.json()["error"]["code"]), (200, &json!("SALE_NOT_MODIFIABLE")));
        let created = operator
            .post("/api/v1/products", &product(sku, 9, &ms_from_now(60_000), &ms_from_now(120_000)))
            .await;
        assert_eq!(created.unwrap().status, 400, "the SKU exists already");
    }
    running.weir.restart().await;
    for (sku, code) in [("W", "SOLD_OUT"), ("X", "SALE_NOT_ACTIVE")] {
        assert_eq!(status(&client, sku).await["state"], "ENDED");
        assert_eq!(attempt(&client, sku, &format!("b-{sku}")).await.json()["error"]["code"], code);
    }
}

async fn without_a_sku_the_current_next_or_last_sale_is_shown(store: Store) {
    let server = InProcess::start(store).await;
    let current = async || {
        let response = server.client.get("/api/v1/sales").await.unwrap();
        (response.status, response.json()["data"]["sku"].clone())
    };
    assert_eq!(current().await, (404, json!(null)));
    let at = |minute: u32| format!("2026-01-01T00:{minute:02}:00Z");
    for (sku, from, to) in [("LATER", 30, 40), ("SECOND", 5, 20), ("FIRST", 1, 10)] {
        create(&server.operator(), &product(sku, 5, &at(from), &at(to))).await;
    }
    assert_eq!(current().await.1, "FIRST", "the next one, while none is active");
    server.clock.advance(MINUTE * 6);
    assert_eq!(current().await.1, "FIRST", "of two active ones the one that started first");
    server.clock.advance(MINUTE * 5);
    assert_eq!(current().await.1, "SECOND", "the only active one");
    server.clock.advance(MINUTE * 10);
    assert_eq!(current().await.1, "LATER", "the next one, while none is active");
    server.clock.advance(MINUTE * 30);
    assert_eq!(current().await.1, "LATER", "the last one that ended");
    server.stop().await;
}

on_each_engine!(
    before_its_start_a_sale_is_upcoming,
    from_its_start_a_sale_with_stock_is_active,
    from_its_end_a_sale_is_ended,
    the_last_unit_ends_a_sale_at_once,
    an_ended_sale_stays_ended,
    without_a_sku_the_current_next_or_last_sale_is_shown,
);
