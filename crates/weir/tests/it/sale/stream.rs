//! The event stream of sales: `/api/v1/sales/events`.

use futures_util::future::join_all;
use serde_json::json;
use weir_testkit::skip;

use super::fixtures::{Listener, buy, create, create_active, create_soon, ms_from_now, product};
use crate::fixtures::{Running, Store, TEST_TIMEOUT, on_each_engine};

async fn a_stream_has_the_present_state_every_purchase_and_the_end(store: Store) {
    let running = Running::start(store).await;
    create_active(&running.operator(), "W", 2).await;
    let mut listener = Listener::connect(running.weir.addr(), "?sku=W", None).await;
    assert_eq!(listener.status(), "200");
    assert!(listener.head.iter().any(|line| line.eq_ignore_ascii_case("content-type: text/event-stream")));
    let first = listener.next().await.unwrap();
    assert_eq!(first.name, "initial");
    assert_eq!((&first.data["state"], &first.data["stock"]), (&json!("ACTIVE"), &json!(2)));
    assert!(first.data["startTime"].is_string() && first.data["endTime"].is_string());
    assert!(buy(&running.client(), "W", "a").await.is_ok());
    assert_eq!(listener.until("stock-update").await.data, json!({"sku": "W", "stock": 1}));
    assert!(buy(&running.client(), "W", "b").await.is_ok());
    assert_eq!(listener.until("stock-update").await.data, json!({"sku": "W", "stock": 0}));
    let end = listener.until("state-change").await;
    assert_eq!(end.data, json!({"sku": "W", "state": "ENDED", "reason": "SOLD_OUT"}));
}

async fn state_changes_are_published_at_their_time(store: Store) {
    let running = Running::start(store).await;
    create(&running.operator(), &product("LATER", 2, &ms_from_now(3_600_000), &ms_from_now(7_200_000))).await;
    let mut listener = Listener::connect(running.weir.addr(), "", None).await;
    assert_eq!(listener.next().await.unwrap().name, "initial");
    create_soon(&running.operator(), "W", 2, 1_000).await;
    let started = listener.until("state-change").await;
    assert_eq!(started.data, json!({"sku": "W", "state": "ACTIVE"}));
    let over = listener.until("state-change").await;
    assert_eq!(over.data, json!({"sku": "W", "state": "ENDED", "reason": "TIME_EXPIRED"}));
}

async fn a_reconnecting_client_gets_the_missed_events(store: Store) {
    let running = Running::start(store).await;
    create_active(&running.operator(), "W", 5).await;
    create_active(&running.operator(), "X", 5).await;
    let first = Listener::connect(running.weir.addr(), "?sku=W", None).await.next().await.unwrap();
    for buyer in ["a", "b"] {
        assert!(buy(&running.client(), "W", buyer).await.is_ok());
        assert!(buy(&running.client(), "X", &format!("x{buyer}")).await.is_ok());
    }
    let mut back = Listener::connect(running.weir.addr(), "?sku=W", Some(&first.id)).await;
    for stock in [4, 3] {
        assert_eq!(
            back.next().await.unwrap().data,
            json!({"sku": "W", "stock": stock}),
            "the missed events of W, in order, and no initial"
        );
    }
    let mut new = Listener::connect(running.weir.addr(), "?sku=W", Some("17")).await;
    let initial = new.next().await.unwrap();
    assert_eq!((initial.name.as_str(), &initial.data["stock"]), ("initial", &json!(3)));
    assert!(buy(&running.client(), "W", "c").await.is_ok());
    assert_eq!(
        new.next().await.unwrap().data,
        json!({"sku": "W", "stock": 2}),
        "no past events for an unknown event id"
    );
}

async fn every_subscriber_gets_the_end_of_a_flood(store: Store) {
    let running = Running::start(store).await;
    create_active(&running.operator(), "W", 1_000).await;
    let listeners = (0..100).map(|_| Listener::connect(running.weir.addr(), "", None));
    let listeners = join_all(listeners).await.into_iter().map(|mut listener| {
        tokio::spawn(async move {
            let mut stocks = Vec::new();
            loop {
                let event = listener.next().await.expect("no subscriber is dropped");
                if event.name == "state-change" && event.data["state"] == "ENDED" {
                    return stocks;
                }
                stocks.extend(event.data["stock"].as_u64());
            }
        })
    });
    let listeners: Vec<_> = listeners.collect();
    let client = running.client();
    let buys = (0..1_000).map(|n| {
        let client = client.clone();
        async move { buy(&client, "W", &format!("b{n}")).await.expect("enough units are in stock") }
    });
    futures_util::StreamExt::collect::<Vec<_>>(futures_util::StreamExt::buffer_unordered(
        futures_util::stream::iter(buys),
        200,
    ))
    .await;
    for listener in listeners {
        let stocks = tokio::time::timeout(TEST_TIMEOUT, listener).await.expect("in time").unwrap();
        assert_eq!(stocks.last(), Some(&0), "the last stock is published");
        assert!(stocks.is_sorted_by(|one, next| one >= next), "stock only falls: {stocks:?}");
    }
}

async fn a_stop_ends_streams(store: Store) {
    let mut running = Running::start(store).await;
    create_active(&running.operator(), "W", 5).await;
    let mut listener = Listener::connect(running.weir.addr(), "", None).await;
    assert!(listener.next().await.is_some());
    running.weir.terminate();
    assert_eq!(listener.next().await, None);
    assert!(running.weir.wait(TEST_TIMEOUT).await.success(), "the server stops cleanly");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn purchases_on_another_server_are_published_here() {
    if skip("postgres") {
        return;
    }
    let running = Running::start(Store::Postgres).await;
    let other = running.second().await;
    create_active(&running.operator(), "W", 2).await;
    let mut listener = Listener::connect(running.weir.addr(), "?sku=W", None).await;
    assert_eq!(listener.next().await.unwrap().data["stock"], 2);
    let elsewhere = weir_testkit::http::Client::new(other.base_url());
    assert!(buy(&elsewhere, "W", "a").await.is_ok());
    assert_eq!(listener.until("stock-update").await.data["stock"], 1);
    assert!(buy(&elsewhere, "W", "b").await.is_ok());
    assert_eq!(listener.until("state-change").await.data["reason"], "SOLD_OUT");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_sale_has_no_stream() {
    let running = Running::start(Store::Embedded).await;
    assert_eq!(Listener::connect(running.weir.addr(), "", None).await.status(), "404");
    assert_eq!(Listener::connect(running.weir.addr(), "?sku=W", None).await.status(), "404");
}

on_each_engine!(
    a_stream_has_the_present_state_every_purchase_and_the_end,
    state_changes_are_published_at_their_time,
    a_reconnecting_client_gets_the_missed_events,
    every_subscriber_gets_the_end_of_a_flood,
    a_stop_ends_streams,
);
