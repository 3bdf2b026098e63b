//! Purchases that cannot be persisted: dead letters that are listed, replayed and discarded under `/admin/dlq`.

use serde_json::{Value, json};
use weir_testkit::http::Client;
use weir_testkit::postgres::{self, Database};
use weir_testkit::process::Weir;
use weir_testkit::redis::{Options, Server};
use weir_testkit::{skip, wait};

use super::fixtures::{buy, create_active};
use crate::fixtures::{TEST_TIMEOUT, operator, weir};

async fn start() -> (Weir, Server, Database) {
    let database = postgres::Server::shared().database("sale").await;
    let redis = Server::private(&Options { appendonly: false, ..Options::default() });
    let weir = weir().env("WEIR_STORE", database.url()).env("WEIR_CACHE", redis.url()).spawn().await;
    (weir, redis, database)
}

async fn letters(operator: &Client) -> Vec<Value> {
    let response = operator.get("/admin/dlq").await.expect("an answer");
    assert_eq!(response.status, 200, "{:?}", response.body);
    response.json()["items"].as_array().expect("a list").clone()
}

/// Waits for a dead letter, and expects that it is the only one.
async fn letter(operator: &Client) -> Value {
    let mut found = Vec::new();
    // The retries before it is given up take half a minute.
    wait::until("there is a dead letter", TEST_TIMEOUT * 6, async || {
        found = letters(operator).await;
        !found.is_empty()
    })
    .await;
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0)
}

/// Waits until the stream is empty: entries are removed once they are persisted or dead letters.
async fn expect_empty(redis: &Server) {
    wait::until("the stream is empty", TEST_TIMEOUT, async || {
        redis.command(&["XLEN", "sale:{W}:stream"]).await.integer() == 0
    })
    .await;
}

async fn replay(operator: &Client, letter: &Value) {
    let path = format!("/admin/dlq/{}/replay", letter["id"].as_str().unwrap());
    let response = operator.post(&path, &json!({})).await.expect("an answer");
    assert_eq!((response.status, response.json()), (200, json!({"replayed": 1})));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_invalid_entry_is_a_dead_letter_until_it_is_discarded() {
    if skip("postgres") || skip("redis") {
        return;
    }
    let (weir, redis, _database) = start().await;
    let operator = operator(&weir);
    create_active(&operator, "W", 5).await;
    redis.command(&["XADD", "sale:{W}:stream", "*", "what", "nonsense"]).await;
    let dead = letter(&operator).await;
    assert_eq!((&dead["topic"], &dead["key"]), (&json!("sale-purchases"), &json!("W")));
    assert_eq!((&dead["payload"], &dead["attempts"]), (&json!("{\"what\":\"nonsense\"}"), &json!(1)));
    assert_eq!(dead["reason"], "the stream entry is not a purchase");
    let path = format!("/admin/dlq/{}", dead["id"].as_str().unwrap());
    assert_eq!(operator.get(&path).await.unwrap().json(), dead);
    expect_empty(&redis).await;
    replay(&operator, &dead).await;
    let again = letter(&operator).await;
    assert_eq!(
        (&again["payload"], &again["reason"]),
        (&dead["payload"], &dead["reason"]),
        "a replay fails in the same way"
    );
    let path = format!("/admin/dlq/{}", again["id"].as_str().unwrap());
    assert_eq!(operator.delete(&path).await.unwrap().status, 204);
    assert_eq!(letters(&operator).await, Vec::<Value>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_purchase_that_the_store_refuses_delays_no_others_and_can_be_replayed() {
    if skip("postgres") || skip("redis") {
        return;
    }
    let (weir, redis, database) = start().await;
    let (operator, client) = (operator(&weir), Client::new(weir.base_url()));
    create_active(&operator, "W", 50).await;
    database.execute("ALTER TABLE purchases ADD CONSTRAINT nobody CHECK (user_id <> 'refused')").await;
    let number = buy(&client, "W", "refused").await.expect("Redis sells");
    for n in 0..9 {
        assert!(buy(&client, "W", &format!("b{n}")).await.is_ok());
    }
    let persisted = async || {
        let audit = operator.get("/admin/audit").await.expect("an answer").json();
        audit["sale"]["items"][0]["persisted"].as_u64()
    };
    wait::until("the other purchases are persisted", TEST_TIMEOUT * 2, async || persisted().await == Some(9))
        .await;
    let dead = letter(&operator).await;
    assert_eq!((&dead["topic"], &dead["attempts"]), (&json!("sale-purchases"), &json!(4)));
    assert!(dead["payload"].as_str().unwrap().contains("\"user\":\"refused\""), "{dead}");
    assert!(dead["reason"].as_str().unwrap().contains("nobody"), "{dead}");
    expect_empty(&redis).await;
    let audit = operator.get("/admin/audit").await.expect("an answer").json();
    assert_eq!((&audit["ok"], &audit["sale"]["items"][0]["sold"]), (&json!(false), &json!(10)), "{audit}");
    database.execute("ALTER TABLE purchases DROP CONSTRAINT nobody").await;
    replay(&operator, &dead).await;
    wait::until("the replayed purchase is persisted", TEST_TIMEOUT * 2, async || {
        persisted().await == Some(10)
    })
    .await;
    assert_eq!(letters(&operator).await, Vec::<Value>::new());
    let rows = database.query_strings("SELECT number::text FROM purchases WHERE user_id = 'refused'").await;
    let persisted_number: u32 = rows[0][0].as_deref().unwrap().parse().unwrap();
    assert!(
        number.ends_with(&format!("-{persisted_number:04}")),
        "{number} is persisted as {persisted_number}"
    );
    let audit = operator.get("/admin/audit").await.expect("an answer").json();
    assert_eq!(audit["ok"], true, "{audit}");
}
