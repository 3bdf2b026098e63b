//! `/admin/dlq`.

use http::Method;
use serde_json::{Value, json};
use weir_testkit::http::Client;

use crate::fixtures::{Running, Store, on_each_engine, wait_until_delivered};

/// Starts a server with dead letters: malformed messages, inserted behind its back.
async fn with_dead_letters(store: Store, count: usize) -> Running {
    let mut server = Running::start(store).await;
    server.weir.terminate();
    server.weir.wait(crate::fixtures::TEST_TIMEOUT).await;
    match &server.database {
        Some(database) => {
            let insert = format!(
                "INSERT INTO queue_message (topic, shard, key, payload)
                 SELECT 'sms-outbound', 0, 'u' || n::text, '{{}}' FROM generate_series(1, {count}) n;
                 INSERT INTO queue_ledger (topic, slot, accepted) VALUES ('sms-outbound', 99, {count})"
            );
            database.execute(&insert).await;
        }
        None => {
            let file = rusqlite::Connection::open(server.weir.data_dir().join("weir.db")).unwrap();
            file.execute("INSERT INTO queue_ledger (topic, accepted) VALUES ('sms-outbound', ?1)", [count])
                .unwrap();
            for n in 1..=count {
                let insert = "INSERT INTO queue_message (topic, id, key, payload) VALUES ('sms-outbound', ?1, ?2, '{}')";
                file.execute(insert, rusqlite::params![n, format!("u{n}")]).unwrap();
            }
        }
    }
    server.weir.restart().await;
    wait_until_delivered(&server.operator()).await;
    server
}

/// Gives one dead letter the id that a server with a clock far ahead would have given it.
async fn put_one_ahead(server: &mut Running) {
    let update = "UPDATE dead_letter SET id = '0fffffff-ffff-7fff-bfff-ffffffffffff' WHERE key = 'u2'";
    server.weir.terminate();
    server.weir.wait(crate::fixtures::TEST_TIMEOUT).await;
    match &server.database {
        Some(database) => database.execute(update).await,
        None => {
            let file = rusqlite::Connection::open(server.weir.data_dir().join("weir.db")).unwrap();
            assert_eq!(file.execute(update, []).unwrap(), 1);
        }
    }
    server.weir.restart().await;
}

async fn list(operator: &Client, query: &str) -> Value {
    let response = operator.get(&format!("/admin/dlq{query}")).await.unwrap();
    assert_eq!(response.status, 200, "{:?}", response.body);
    response.json()
}

async fn letters_are_listed_replayed_and_discarded(store: Store) {
    let server = with_dead_letters(store, 5).await;
    let operator = server.operator();
    let all = list(&operator, "").await;
    let ids: Vec<_> =
        all["items"].as_array().unwrap().iter().map(|item| item["id"].as_str().unwrap()).collect();
    assert_eq!((ids.len(), &all["nextCursor"]), (5, &Value::Null));
    let first = &all["items"][0];
    assert_eq!(
        (&first["topic"], &first["payload"], &first["attempts"]),
        (&json!("sms-outbound"), &json!("{}"), &json!(1))
    );
    assert!(first["reason"].as_str().unwrap().contains("userId"), "{first}");

    let page = list(&operator, "?limit=2").await;
    assert_eq!(page["items"].as_array().unwrap().len(), 2);
    let cursor = page["nextCursor"].as_str().unwrap();
    let rest = list(&operator, &format!("?limit=3&cursor={cursor}")).await;
    assert_eq!((rest["items"].as_array().unwrap().len(), &rest["nextCursor"]), (3, &Value::Null));

    let discard = format!("/admin/dlq/{}", ids[0]);
    assert_eq!(operator.delete(&discard).await.unwrap().status, 204);
    assert_eq!(operator.delete(&discard).await.unwrap().status, 404);
    let replay = operator.post(&format!("/admin/dlq/{}/replay", ids[1]), &json!({})).await.unwrap();
    assert_eq!((replay.status, replay.json()), (200, json!({"replayed": 1})));
    let again = operator.post(&format!("/admin/dlq/{}/replay", ids[1]), &json!({})).await.unwrap();
    assert_eq!(again.status, 404);
    // The replayed message is as malformed as before and becomes a dead letter again, with a new id.
    let books = wait_until_delivered(&operator).await;
    assert_eq!(
        (&books["ok"], &books["quota"]["dead"], &books["quota"]["discarded"]),
        (&json!(true), &json!(4), &json!(1))
    );
    let all = operator.post("/admin/dlq/replay", &json!({})).await.unwrap();
    assert_eq!(all.json(), json!({"matched": 4, "replayed": 4}));
    assert_eq!(wait_until_delivered(&operator).await["ok"], true);
}

on_each_engine!(
    letters_are_listed_replayed_and_discarded,
    letters_of_a_server_whose_clock_is_ahead_are_replayed_with_the_others
);

#[tokio::test]
async fn only_the_operator_is_authorized() {
    let server = Running::start(Store::Embedded).await;
    let wrong = server.client().with_header("x-admin-key", "not the key of this server");
    for client in [server.client(), wrong] {
        for (method, path) in [
            (Method::GET, "/admin/dlq"),
            (Method::POST, "/admin/dlq/replay"),
            (Method::POST, "/admin/dlq/x/replay"),
            (Method::DELETE, "/admin/dlq/x"),
            (Method::GET, "/admin/audit"),
        ] {
            let response = client.request(method, path, &[], "").await.unwrap();
            assert_eq!(
                (response.status, response.json()["code"].clone()),
                (401, json!("UNAUTHENTICATED")),
                "{path}"
            );
        }
    }
}

#[tokio::test]
async fn invalid_queries_are_400_and_unknown_ids_404() {
    let server = Running::start(Store::Embedded).await;
    let operator = server.operator();
    for query in ["?limit=0", "?limit=1001", "?limit=x", "?limit=-1", "?limit="] {
        let response = operator.get(&format!("/admin/dlq{query}")).await.unwrap();
        assert_eq!(response.status, 400, "{query}");
        assert!(response.json()["message"].as_str().unwrap().contains("limit"));
    }
    let long = "x".repeat(5_000);
    for id in ["nope", "%00", "%27%3B--", long.as_str()] {
        assert_eq!(operator.delete(&format!("/admin/dlq/{id}")).await.unwrap().status, 404, "{id}");
    }
    assert_eq!(list(&operator, "?cursor=%00nonsense").await["items"], json!([]));
}

async fn letters_of_a_server_whose_clock_is_ahead_are_replayed_with_the_others(store: Store) {
    let mut server = with_dead_letters(store, 3).await;
    put_one_ahead(&mut server).await;
    let operator = server.operator();
    for (dry_run, replayed) in [(true, 0), (false, 3)] {
        let filter = json!({"topic": "sms-outbound", "dryRun": dry_run});
        let response = operator.post("/admin/dlq/replay", &filter).await.unwrap();
        assert_eq!(response.status, 200, "{:?}", response.body);
        assert_eq!(response.json(), json!({"matched": 3, "replayed": replayed}), "{filter}");
    }
}
