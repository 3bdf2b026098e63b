//! Due slots: published on time, in order and at least once, and consumed over HTTP or Kafka.

use std::collections::BTreeSet;

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use weir_testkit::http::{Client, Response};
use weir_testkit::kafka::Broker;
use weir_testkit::postgres::Server;
use weir_testkit::process::Weir;
use weir_testkit::{skip, wait};

use crate::fixtures::{Running, Store, TEST_TIMEOUT, consume, on_each_engine, operator, weir};

const TOPIC: &str = "payments-due";
const DISPATCH: (&str, &str) = ("WEIR_SLOT_DISPATCH_TOPIC", TOPIC);

/// Configures windows of 100 ms with one slot each, so that slots have an order and are due soon.
async fn configure(operator: &Client, name: &str) {
    let body = json!({"configName": name, "maxPerWindow": 1, "windowSize": "PT0.1S"});
    assert_eq!(operator.post("/admin/rate-limit/config", &body).await.unwrap().status, 200);
}

/// Assigns `count` events at or after `from`. Returns their ids in order of time.
async fn assign(client: &Client, config: &str, prefix: &str, count: usize, from: Timestamp) -> Vec<String> {
    let mut slots = Vec::new();
    for n in 0..count {
        let id = format!("{prefix}-{n}");
        let body = json!({"eventId": id, "configName": config, "requestedTime": from.to_string()});
        let response = client.post("/api/v1/slots", &body).await.unwrap();
        assert_eq!(response.status, 201, "{:?}", response.body);
        slots.push((time(&response.json()["scheduledTime"]), id));
    }
    slots.sort();
    slots.into_iter().map(|(_, id)| id).collect()
}

fn time(value: &Value) -> Timestamp {
    value.as_str().unwrap().parse().unwrap()
}

async fn claim(operator: &Client, body: Value) -> Response {
    operator.post("/admin/queue/claim", &body).await.unwrap()
}

async fn settle(operator: &Client, body: Value) -> Response {
    operator.post("/admin/queue/settle", &body).await.unwrap()
}

/// Whether a claim was settled. On a busy machine its lease may have expired; then the messages can be claimed again.
fn is_settled(status: u16) -> bool {
    assert!(
        matches!(status, 200 | 409),
        "a claim is settled or its lease has expired, but this was {status}"
    );
    status == 200
}

/// Claims and settles messages until `count` are done. Panics if one comes before its time.
async fn take(operator: &Client, count: usize) -> Vec<String> {
    let mut ids = Vec::new();
    wait::until("every slot is on the topic", TEST_TIMEOUT, async || {
        let claimed =
            claim(operator, json!({"topic": TOPIC, "visibilitySeconds": 2, "waitSeconds": 1})).await;
        assert_eq!(claimed.status, 200, "{:?}", claimed.body);
        let claimed = claimed.json();
        let messages = claimed["messages"].as_array().unwrap();
        for message in messages {
            assert!(time(&message["payload"]["scheduledTime"]) <= Timestamp::now(), "too early: {message}");
        }
        let done: Vec<&Value> = messages.iter().map(|message| &message["id"]).collect();
        let body = json!({"topic": TOPIC, "receipt": claimed["receipt"], "done": done});
        if !messages.is_empty() && is_settled(settle(operator, body).await.status) {
            let taken = messages.iter().map(|message| message["payload"]["eventId"].as_str().unwrap());
            ids.extend(taken.map(str::to_owned));
        }
        ids.len() >= count
    })
    .await;
    ids
}

async fn slots_are_published_on_time_and_in_order(store: Store) {
    let running = Running::start_with(store, &[DISPATCH]).await;
    let (client, operator) = (running.client(), running.operator());
    configure(&operator, "a").await;
    let expected = assign(&client, "a", "e", 12, Timestamp::now()).await;
    let gone = assign(&client, "a", "gone", 1, Timestamp::now() + SignedDuration::from_secs(3)).await;
    assert_eq!(client.delete(&format!("/api/v1/slots/{}", gone[0])).await.unwrap().status, 204);
    assert_eq!(take(&operator, 12).await, expected);
    let last = assign(&client, "a", "last", 1, Timestamp::now() + SignedDuration::from_secs(3)).await;
    assert_eq!(take(&operator, 1).await, last, "the slot that was given back is not published");
    let metrics = client.get("/metrics").await.unwrap();
    let metrics = String::from_utf8(metrics.body.to_vec()).unwrap();
    assert!(metrics.contains("weir_slot_dispatched_total 13"), "{metrics}");
}

async fn claimed_messages_are_settled_as_done_retried_or_dead(store: Store) {
    let running = Running::start_with(store, &[DISPATCH]).await;
    let (client, operator) = (running.client(), running.operator());
    configure(&operator, "a").await;
    assign(&client, "a", "e", 3, Timestamp::now() - SignedDuration::from_secs(60)).await;
    wait::until("they are published", TEST_TIMEOUT, async || published(&[&running.weir]).await == 3).await;
    let mut claimed = claim(&operator, json!({"topic": TOPIC})).await.json();
    let ids: Vec<&Value> = claimed["messages"].as_array().unwrap().iter().map(|m| &m["id"]).collect();
    let body = json!({
        "topic": TOPIC, "receipt": claimed["receipt"], "done": [ids[0]],
        "retry": [{"id": ids[1], "delaySeconds": 0}], "dead": [{"id": ids[2], "reason": "no such account"}],
    });
    let settled = settle(&operator, body.clone()).await;
    assert_eq!((settled.status, settled.json()), (200, json!({"settled": 3})));
    let late = settle(&operator, body).await;
    assert_eq!((late.status, &late.json()["code"]), (409, &json!("LEASE_EXPIRED")));
    wait::until("the retried message comes again", TEST_TIMEOUT, async || {
        claimed = claim(&operator, json!({"topic": TOPIC, "max": 1})).await.json();
        claimed["messages"][0]["attempts"] == 1
    })
    .await;
    let books = crate::fixtures::audit(&operator).await;
    let dispatched = &books["slot"]["dispatched"];
    assert_eq!(
        (&books["ok"], &dispatched["accepted"], &dispatched["done"]),
        (&json!(true), &json!(3), &json!(1))
    );
    assert_eq!((&dispatched["dead"], &dispatched["inFlight"]), (&json!(1), &json!(1)));
    let letters = operator.get("/admin/dlq").await.unwrap().json();
    assert_eq!(
        (&letters["items"][0]["topic"], &letters["items"][0]["reason"]),
        (&json!(TOPIC), &json!("no such account"))
    );
}

async fn a_killed_server_dispatches_the_remaining_slots_after_its_restart(store: Store) {
    let mut running = Running::start_with(store, &[DISPATCH]).await;
    configure(&running.operator(), "a").await;
    let expected = assign(&running.client(), "a", "e", 40, Timestamp::now()).await;
    let mut taken: BTreeSet<String> = take(&running.operator(), 5).await.into_iter().collect();
    running.weir.kill_9();
    running.weir.restart().await;
    let operator = running.operator();
    wait::until("every slot was published at least once", TEST_TIMEOUT, async || {
        taken.extend(take(&operator, 1).await);
        taken.len() == expected.len()
    })
    .await;
}

async fn a_disconnected_caller_claims_nothing(store: Store) {
    let running = Running::start_with(store, &[DISPATCH]).await;
    let (client, operator) = (running.client(), running.operator());
    configure(&operator, "a").await;
    let body = format!(r#"{{"topic":"{TOPIC}","visibilitySeconds":3600,"waitSeconds":20}}"#);
    let request = format!(
        "POST /admin/queue/claim HTTP/1.1\r\nhost: localhost\r\nx-admin-key: {}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        running.weir.admin_key(),
        body.len(),
    );
    let mut waiting = TcpStream::connect(running.weir.addr()).await.unwrap();
    waiting.write_all(request.as_bytes()).await.unwrap();
    wait::until("the claim waits", TEST_TIMEOUT, async || connections(&client).await == 2).await;
    drop(waiting);
    wait::until("the server has noticed the disconnect", TEST_TIMEOUT, async || {
        connections(&client).await == 1
    })
    .await;
    let expected = assign(&client, "a", "e", 1, Timestamp::now()).await;
    assert_eq!(take(&operator, 1).await, expected, "no other claim holds it");
}

/// The number of the server's connections, including the one of this request.
async fn connections(client: &Client) -> u64 {
    metric(client, "weir_http_connections").await
}

async fn invalid_claims_and_settlements_are_refused(store: Store) {
    let running = Running::start_with(store, &[DISPATCH]).await;
    let (client, operator) = (running.client(), running.operator());
    assert_eq!(client.post("/admin/queue/claim", &json!({"topic": TOPIC})).await.unwrap().status, 401);
    let own = claim(&operator, json!({"topic": "sms-outbound"})).await;
    assert_eq!(
        (own.status, &own.json()["code"]),
        (404, &json!("NOT_FOUND")),
        "the sender's topic cannot be claimed"
    );
    for (field, value) in [("max", 0), ("max", 1_001), ("visibilitySeconds", 0), ("waitSeconds", 21)] {
        let refused = claim(&operator, json!({"topic": TOPIC, field: value})).await;
        assert_eq!(refused.status, 400, "{field} {value}");
        assert!(refused.json()["message"].as_str().unwrap().starts_with(field));
    }
    for body in [
        json!({"topic": TOPIC, "receipt": "x"}),
        json!({"topic": TOPIC, "receipt": "0-1", "done": ["x"]}),
        json!({"topic": TOPIC, "receipt": "0-1", "retry": [{"id": "0-1", "delaySeconds": 90_000}]}),
        json!({"topic": TOPIC, "receipt": "0-1", "dead": [{"id": "0-1", "reason": "a\u{0}b"}]}),
    ] {
        assert_eq!(settle(&operator, body.clone()).await.status, 400, "{body}");
    }
    let stale = settle(&operator, json!({"topic": TOPIC, "receipt": "0-1", "done": ["0-1"]})).await;
    assert_eq!(stale.status, 409);
}

async fn without_a_topic_nothing_is_dispatched(store: Store) {
    let running = Running::start(store).await;
    let refused = claim(&running.operator(), json!({"topic": TOPIC})).await;
    assert_eq!(refused.status, 404);
    assert!(refused.json()["message"].as_str().unwrap().contains("slot.dispatch.topic"));
}

on_each_engine!(
    slots_are_published_on_time_and_in_order,
    claimed_messages_are_settled_as_done_retried_or_dead,
    a_killed_server_dispatches_the_remaining_slots_after_its_restart,
    a_disconnected_caller_claims_nothing,
    invalid_claims_and_settlements_are_refused,
    without_a_topic_nothing_is_dispatched,
);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_servers_publish_to_kafka_in_order_and_a_broker_that_comes_back_gets_the_rest() {
    if skip("postgres") || skip("kafka") {
        return;
    }
    let database = Server::shared().database("due").await;
    let mut broker = Broker::private();
    let url = broker.url();
    let start = || {
        let weir = weir().env("WEIR_STORE", database.url()).env("WEIR_BROKER", &url);
        weir.env(DISPATCH.0, DISPATCH.1).spawn()
    };
    let (first, second) = tokio::join!(start(), start());
    let operator = operator(&first);
    wait::until("Kafka answers", TEST_TIMEOUT, async || operator.get("/health").await.unwrap().status == 200)
        .await;
    configure(&operator, "a").await;
    let past = Timestamp::now() - SignedDuration::from_secs(3_600);
    let before = assign(&operator, "a", "before", 20, past).await;
    wait::until("they are published", TEST_TIMEOUT, async || published(&[&first, &second]).await >= 20).await;

    broker.crash();
    let client = Client::new(second.base_url());
    let during = assign(&client, "a", "during", 20, Timestamp::now() - SignedDuration::from_secs(60)).await;
    broker.start().await;
    wait::until("the rest is published", TEST_TIMEOUT, async || published(&[&first, &second]).await >= 40)
        .await;
    let events = consume(&broker, TOPIC, |events| events.iter().collect::<BTreeSet<_>>().len() >= 40).await;
    assert!(events.iter().all(|(key, _)| key == "a"));
    let mut ids: Vec<String> = events
        .iter()
        .map(|(_, json)| serde_json::from_str::<Value>(json).unwrap()["eventId"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(ids[..20], before, "messages confirmed before the crash are published once");
    // Messages that the broker had not confirmed when it crashed are published again. The first occurrences are in order,
    // which with one slot a window is the order of assignment.
    let mut seen = BTreeSet::new();
    ids.retain(|id| seen.insert(id.clone()));
    assert_eq!(ids, [before, during].concat(), "of {events:?}");
}

async fn published(weirs: &[&Weir]) -> u64 {
    let mut sum = 0;
    for weir in weirs {
        sum += metric(&Client::new(weir.base_url()), "weir_slot_dispatched_total").await;
    }
    sum
}

async fn metric(client: &Client, name: &str) -> u64 {
    let metrics = client.get("/metrics").await.unwrap();
    let text = String::from_utf8(metrics.body.to_vec()).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.expect("the metric exists").parse().unwrap()
}
