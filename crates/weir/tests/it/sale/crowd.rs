//! Many concurrent buyers, and servers that are killed during a sale.

use std::collections::{BTreeMap, BTreeSet};

use futures_util::future::join_all;
use futures_util::{StreamExt, stream};
use serde_json::json;
use weir_testkit::http::Client;
use weir_testkit::skip;

use super::fixtures::{
    MANY_CALLERS, UNTHROTTLED, attempt, create_active, many_connections, purchase, status,
};
use crate::fixtures::{Running, Store, audit, on_each_engine, operator};

/// All buyers try at once, spread over the servers. Returns purchase numbers by buyer, and counts by error code.
pub(super) async fn buy_in_parallel(
    clients: &[Client],
    sku: &str,
    buyers: impl Iterator<Item = String>,
) -> (BTreeMap<String, String>, BTreeMap<String, usize>) {
    let attempts = buyers.enumerate().map(|(n, buyer)| async move {
        let response = attempt(&clients[n % clients.len()], sku, &buyer).await;
        (buyer, response)
    });
    let answers = join_all(attempts).await;
    let (mut bought, mut refused) = (BTreeMap::new(), BTreeMap::new());
    for (buyer, response) in answers {
        assert_eq!(response.status, 200, "no buyer gets an HTTP error: {:?}", response.body);
        let body = response.json();
        if let Some(number) = body["data"]["purchaseNo"].as_str() {
            let again = bought.insert(buyer, number.to_owned());
            assert_eq!(again, None, "one unit per buyer");
        } else {
            *refused.entry(body["error"]["code"].as_str().unwrap().to_owned()).or_insert(0) += 1;
        }
    }
    (bought, refused)
}

/// Expects that the audit balances, with this number of sold units.
async fn expect_audit(operator: &Client, sku: &str, stock: u32, sold: u32) {
    let audit = audit(operator).await;
    assert_eq!(audit["ok"], true, "{audit}");
    let item = json!({"sku": sku, "initialStock": stock, "sold": sold, "persisted": sold});
    assert_eq!(audit["sale"]["items"], json!([item]), "sold units and stored purchases must be equal");
}

async fn ten_thousand_buyers_get_exactly_a_hundred_units(store: Store) {
    let _turn = many_connections().await;
    let running = Running::start_with(store, &MANY_CALLERS).await;
    let second = if store == Store::Postgres { Some(running.second_with(&MANY_CALLERS).await) } else { None };
    let clients: Vec<Client> =
        [Some(running.client()), second.as_ref().map(|weir| Client::new(weir.base_url()))]
            .into_iter()
            .flatten()
            .collect();
    create_active(&running.operator(), "W", 100).await;
    let (bought, refused) = buy_in_parallel(&clients, "W", (0..10_000).map(|n| format!("buyer-{n}"))).await;
    assert_eq!(bought.len(), 100, "exactly the stock is sold");
    assert_eq!(
        refused,
        BTreeMap::from([("SOLD_OUT".to_owned(), 9_900)]),
        "all others are told that it is sold out"
    );
    let numbers: BTreeSet<&String> = bought.values().collect();
    assert_eq!(numbers.len(), 100, "every purchase has a number of its own");
    assert!(numbers.iter().any(|number| number.ends_with("-0100")), "{numbers:?}");
    for client in &clients {
        let shown = status(client, "W").await;
        assert_eq!((&shown["stock"], &shown["state"]), (&json!(0), &json!("ENDED")), "IM-3");
        for (buyer, number) in bought.iter().take(10) {
            assert_eq!(purchase(client, "W", buyer).await.json()["data"]["purchaseNo"], **number);
        }
    }
    expect_audit(&running.operator(), "W", 100, 100).await;
}

async fn one_buyer_with_many_concurrent_attempts_gets_one_unit(store: Store) {
    let running = Running::start_with(store, &[UNTHROTTLED]).await;
    let client = running.client();
    create_active(&running.operator(), "W", 100).await;
    let attempts = (0..500).map(|_| attempt(&client, "W", "the-same"));
    let answers: Vec<_> = stream::iter(attempts).buffer_unordered(100).collect().await;
    let bought = answers.iter().filter(|answer| answer.json()["success"] == true).count();
    assert_eq!(bought, 1, "PR-5");
    let refused =
        |answer: &&weir_testkit::http::Response| answer.json()["error"]["code"] == "ALREADY_PURCHASED";
    assert_eq!(answers.iter().filter(refused).count(), 499);
    assert_eq!(status(&client, "W").await["stock"], 99, "one unit is sold");
    expect_audit(&running.operator(), "W", 100, 1).await;
}

async fn purchases_survive_kill_9_and_every_unit_is_sold_once(store: Store) {
    let mut running = Running::start(store).await;
    create_active(&running.operator(), "W", 400).await;
    let client = running.client();
    let mut acknowledged: BTreeMap<String, String> = BTreeMap::new();
    for round in 0..3 {
        // Three rounds together have fewer buyers than there are units, so each round can acknowledge 50 purchases whatever
        // was committed and not acknowledged before.
        let buyers = (0..130).map(|n| format!("r{round}-{n}"));
        let attempts = buyers.map(|buyer| {
            let client = client.clone();
            tokio::spawn(async move {
                let headers = [("content-type", "application/json"), ("x-user-id", buyer.as_str())];
                let body = json!({"sku": "W", "qty": 1}).to_string();
                let answer = client.request(http::Method::POST, "/api/v1/purchases", &headers, body).await;
                // The server is being killed, so calls may fail.
                let number = answer.ok()?.json()["data"]["purchaseNo"].as_str()?.to_owned();
                Some((buyer, number))
            })
        });
        let mut attempts: stream::FuturesUnordered<_> = attempts.collect();
        let mut sold = 0;
        while let Some(attempt) = attempts.next().await {
            if let Some((buyer, number)) = attempt.unwrap() {
                acknowledged.insert(buyer, number);
                sold += 1;
                if sold == 50 {
                    running.weir.kill_9();
                }
            }
        }
        running.weir.restart().await;
    }
    let client = running.client();
    assert!(acknowledged.len() >= 150);
    for (buyer, number) in &acknowledged {
        assert_eq!(purchase(&client, "W", buyer).await.json()["data"]["purchaseNo"], **number, "{buyer}");
    }
    let (bought, _) =
        buy_in_parallel(std::slice::from_ref(&client), "W", (0..500).map(|n| format!("last-{n}"))).await;
    let numbers: BTreeSet<&String> = acknowledged.values().chain(bought.values()).collect();
    assert_eq!(numbers.len(), acknowledged.len() + bought.len(), "no purchase number is used twice");
    expect_audit(&running.operator(), "W", 400, 400).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_other_server_continues_the_sale_of_a_killed_one() {
    if skip("postgres") {
        return;
    }
    let mut running = Running::start(Store::Postgres).await;
    let other = running.second().await;
    create_active(&running.operator(), "W", 50).await;
    let (first, _) = buy_in_parallel(&[running.client()], "W", (0..20).map(|n| format!("a{n}"))).await;
    running.weir.kill_9();
    let client = Client::new(other.base_url());
    let (second, refused) =
        buy_in_parallel(std::slice::from_ref(&client), "W", (0..100).map(|n| format!("b{n}"))).await;
    assert_eq!((first.len(), second.len(), refused["SOLD_OUT"]), (20, 30, 70));
    expect_audit(&operator(&other), "W", 50, 50).await;
}

on_each_engine!(
    ten_thousand_buyers_get_exactly_a_hundred_units,
    one_buyer_with_many_concurrent_attempts_gets_one_unit,
    purchases_survive_kill_9_and_every_unit_is_sold_once,
);
