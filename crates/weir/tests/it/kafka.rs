//! Quota with Kafka: a send counts when the brokers confirm it, otherwise it is 503; senders share a consumer group.

use std::collections::{BTreeSet, HashSet};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde_json::json;
use weir_queue::publish::OutgoingEvent;
use weir_testkit::http::{Client, Response};
use weir_testkit::kafka::Broker;
use weir_testkit::postgres::{self, Database};
use weir_testkit::process::{Builder, Weir};
use weir_testkit::redis::{Options, Server};
use weir_testkit::{skip, wait};

use crate::fixtures::{
    TEST_TIMEOUT, configure, consume, consume_messages, deliveries, message, operator, produce,
    produce_event, send_in_parallel, weir_with_long_timeouts,
};
use crate::trace::{STATE, TRACE, traced, traceparent};

/// The timeout of a call (`http.timeout` of the servers here), with a margin for a busy machine.
const ANSWER_WITHIN: Duration = Duration::from_secs(11);

fn skipped() -> bool {
    skip("postgres") || skip("kafka")
}

/// A server that accepts messages and one that delivers them.
struct Servers {
    database: Database,
    gateway: Weir,
    sender: Weir,
    client: Client,
}

/// A server with the test's own consumer group, so that tests can share a broker. They also share its topic, so each test
/// checks only its own users.
fn server_with(database: &Database, broker: &str, group: &str, roles: &str) -> Builder {
    weir_with_long_timeouts()
        .env("WEIR_STORE", database.url())
        .env("WEIR_BROKER", broker)
        .env("WEIR_KAFKA_GROUP", group)
        .env("WEIR_ROLES", roles)
}

impl Servers {
    async fn start(broker: &str, group: &str) -> Self {
        let database = postgres::Server::shared().database("kafka").await;
        let (gateway, sender) = tokio::join!(
            server_with(&database, broker, group, "api").spawn(),
            server_with(&database, broker, group, "sender").spawn()
        );
        let client = Client::new(gateway.base_url());
        wait_until_healthy(&client).await;
        Self { database, gateway, sender, client }
    }

    async fn stored_count(&self, user: &str) -> u32 {
        let select = format!("SELECT current_count::text FROM rate_limit_store WHERE user_id = '{user}'");
        self.database.query_strings(&select).await[0][0].as_deref().unwrap().parse().unwrap()
    }
}

/// Waits until the server has reached the broker.
async fn wait_until_healthy(client: &Client) {
    wait::until("health is good", TEST_TIMEOUT, async || client.get("/health").await.unwrap().status == 200)
        .await;
}

async fn send(client: &Client, user: &str, text: &str) -> Response {
    let started = Instant::now();
    let response = client.post("/api/send", &message(user, text)).await.expect("an answer");
    assert!(started.elapsed() < ANSWER_WITHIN, "an answer took {:?}", started.elapsed());
    response
}

/// Sends a message that must be accepted.
async fn send_accepted(client: &Client, user: &str, text: &str) {
    let response = send(client, user, text).await;
    assert_eq!(response.status, 200, "{:?}", response.body);
}

/// The messages of one user that a server delivered, in order. Each is delivered once unless a test says otherwise.
fn delivered(weir: &Weir, user: &str) -> Vec<String> {
    let mine = deliveries(weir).into_iter().filter(|(name, _)| name == user);
    mine.map(|(_, text)| text).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn accepted_messages_are_delivered_in_order_and_400_parallel_sends_stop_at_50() {
    if skipped() {
        return;
    }
    let servers = Servers::start(&Broker::shared().url(), "order").await;
    let users: Vec<String> = (0..5).map(|n| format!("order-{n}")).collect();
    for user in &users {
        configure(&servers.client, user, 30, 60).await;
    }
    for n in 0..30 {
        let text = format!("m{n}");
        join_all(users.iter().map(|user| send_accepted(&servers.client, user, &text))).await;
    }
    let expected: Vec<String> = (0..30).map(|n| format!("m{n}")).collect();
    for user in &users {
        wait::until("every message is delivered", TEST_TIMEOUT, async || {
            delivered(&servers.sender, user).len() >= 30
        })
        .await;
        assert_eq!(delivered(&servers.sender, user), expected);
        assert_eq!(servers.stored_count(user).await, 30);
    }
    assert!(deliveries(&servers.gateway).is_empty(), "the gateway delivers nothing itself");
    configure(&servers.client, "order-many", 50, 60).await;
    let counts = send_in_parallel(std::slice::from_ref(&servers.client), "order-many", 400).await;
    counts.expect(200, 50);
    counts.expect(429, 350);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_outage_is_503_counts_nothing_and_ends_without_a_restart() {
    if skipped() {
        return;
    }
    let mut broker = Broker::private();
    let servers = Servers::start(&broker.url(), "gone").await;
    configure(&servers.client, "gone", 100, 60).await;
    send_accepted(&servers.client, "gone", "before").await;
    wait::until("it is delivered", TEST_TIMEOUT, async || delivered(&servers.sender, "gone") == ["before"])
        .await;
    broker.stop().await;
    for _ in 0..5 {
        let response = send(&servers.client, "gone", "during").await;
        assert_eq!(response.status, 503, "{:?}", response.body);
        assert_eq!(response.json()["code"], "DEPENDENCY_UNAVAILABLE");
        assert!(response.header("retry-after").is_some());
    }
    assert_eq!(servers.stored_count("gone").await, 1, "unconfirmed sends do not count");
    wait::until("health reports the outage", TEST_TIMEOUT, async || {
        let health = servers.client.get("/health").await.unwrap();
        health.status == 503 && health.json()["data"]["checks"]["kafka"]["status"] == "down"
    })
    .await;
    broker.start().await;
    // The server recovers without a restart.
    wait_until_healthy(&servers.client).await;
    send_accepted(&servers.client, "gone", "after").await;
    assert_eq!(servers.stored_count("gone").await, 2);
    wait::until("the sender continues", TEST_TIMEOUT, async || {
        delivered(&servers.sender, "gone").last().is_some_and(|text| text == "after")
    })
    .await;
    // The broker may have stopped before the first message was committed, and then it is delivered again.
    let mut texts = delivered(&servers.sender, "gone");
    texts.dedup();
    assert_eq!(texts, ["before", "after"], "no message that got 503 is delivered");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_publishes_one_message_also_after_a_503_whose_outcome_is_unknown() {
    if skipped() {
        return;
    }
    let mut broker = Broker::private();
    let database = postgres::Server::shared().database("kafka").await;
    let weir = server_with(&database, &broker.url(), "keys", "api").spawn().await;
    let client = Client::new(weir.base_url());
    wait_until_healthy(&client).await;
    configure(&client, "keys", 100, 60).await;
    send_accepted(&client, "keys", "before").await;
    let headers = [("content-type", "application/json"), ("idempotency-key", "k")];
    let body = message("keys", "once").to_string();
    let send_once = || client.request(http::Method::POST, "/api/send", &headers, body.clone());
    broker.pause();
    let unknown = send_once().await.unwrap();
    assert_eq!(unknown.status, 503, "{:?}", unknown.body);
    assert!(
        unknown.json()["message"].as_str().unwrap().contains("may still be delivered"),
        "{:?}",
        unknown.body
    );
    broker.resume();
    wait_until_healthy(&client).await;
    let accepted = send_once().await.unwrap();
    assert_eq!((accepted.status, accepted.header("idempotent-replayed")), (200, None), "{:?}", accepted.body);
    let replayed = send_once().await.unwrap();
    assert_eq!((&replayed.body, replayed.header("idempotent-replayed")), (&accepted.body, Some("true")));
    send_accepted(&client, "keys", "after").await;
    let row = client.get("/api/config/keys").await.unwrap().json();
    assert_eq!(row["currentCount"], 3, "it counts once");
    let events = consume(&broker, "sms-outbound", |events| {
        events.iter().any(|(_, payload)| payload.contains("\"after\""))
    })
    .await;
    let once: BTreeSet<String> = events
        .iter()
        .map(|(_, payload)| serde_json::from_str::<serde_json::Value>(payload).unwrap())
        .filter(|event| event["message"] == "once")
        .map(|event| event["messageId"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(once, BTreeSet::from([accepted.json()["messageId"].as_str().unwrap().to_owned()]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_network_to_kafka_is_503_in_time_and_heals() {
    if skipped() {
        return;
    }
    let (broker, proxy) = Broker::private_with_proxy().await;
    let servers = Servers::start(&broker.url_via(proxy.addr()), "network").await;
    configure(&servers.client, "network", 100_000, 600).await;
    // When a server notices that its connections were cut varies, and so does its answer until then. This checks that it
    // reconnects by itself.
    let heals = async || {
        wait::until("messages are accepted again", TEST_TIMEOUT, async || {
            send(&servers.client, "network", "m").await.status == 200
        })
        .await;
    };
    send_accepted(&servers.client, "network", "m").await;
    proxy.black_hole();
    let before = servers.stored_count("network").await;
    for _ in 0..3 {
        assert_eq!(send(&servers.client, "network", "m").await.status, 503);
    }
    assert_eq!(servers.stored_count("network").await, before);
    proxy.pass();
    proxy.cut();
    heals().await;
    proxy.half_open_after(200);
    // A message may or may not get through before its connection stalls.
    for _ in 0..3 {
        assert!(matches!(send(&servers.client, "network", "m").await.status, 200 | 503));
    }
    proxy.pass();
    proxy.cut();
    heals().await;
    proxy.delay(Duration::from_millis(20));
    for _ in 0..5 {
        send_accepted(&servers.client, "network", "m").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sender_killed_in_mid_stream_loses_nothing_and_keeps_the_order() {
    if skipped() {
        return;
    }
    let mut servers = Servers::start(&Broker::shared().url(), "killed").await;
    let users: Vec<String> = (0..4).map(|n| format!("killed-{n}")).collect();
    for user in &users {
        configure(&servers.client, user, 1_000, 60).await;
    }
    let mut others = Vec::new();
    for round in 0..3 {
        for n in 0..40 {
            let text = (round * 40 + n).to_string();
            join_all(users.iter().map(|user| send_accepted(&servers.client, user, &text))).await;
        }
        // Killed while it delivers. Another member of the group takes over.
        servers.sender.kill_9();
        let next = server_with(&servers.database, &Broker::shared().url(), "killed", "sender").spawn().await;
        others.push(std::mem::replace(&mut servers.sender, next));
    }
    let by_sender = |user: &str| -> Vec<Vec<usize>> {
        let numbers = |weir| delivered(weir, user).iter().map(|text| text.parse().unwrap()).collect();
        others.iter().chain([&servers.sender]).map(numbers).collect()
    };
    for user in &users {
        wait::until("every message is delivered", Duration::from_secs(60), async || {
            by_sender(user).into_iter().flatten().collect::<BTreeSet<_>>().len() == 120
        })
        .await;
        // Messages that a killed sender had delivered but not committed are delivered again by the next one.
        let mut furthest = 0;
        for numbers in by_sender(user) {
            assert!(
                numbers.is_sorted_by(|a, b| b == &(a + 1)),
                "a sender delivers each message once: {numbers:?}"
            );
            assert!(numbers.first().is_none_or(|first| *first <= furthest), "{numbers:?} leaves a gap");
            furthest = furthest.max(numbers.last().map_or(0, |last| last + 1));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_topic_carries_the_trace_of_what_its_events_are_about() {
    if skipped() {
        return;
    }
    let broker = Broker::private();
    let database = postgres::Server::shared().database("kafka").await;
    let weir = server_with(&database, &broker.url(), "traced", "api,sender,worker")
        .env("WEIR_SLOT_DISPATCH_TOPIC", "slots-due")
        .spawn()
        .await;
    let client = traced(&weir);
    wait_until_healthy(&client).await;
    let operator = operator(&weir);
    configure(&operator, "traced", 10, 60).await;
    send_accepted(&client, "traced", "fine").await;
    let submission = json!({"idempotencyKey": "k", "requestType": "pay", "payload": 1});
    assert_eq!(client.post("/v1/requests", &submission).await.unwrap().status, 202);
    let config = json!({"configName": "due", "maxPerWindow": 1, "windowSize": "PT1S"});
    assert_eq!(operator.post("/admin/rate-limit/config", &config).await.unwrap().status, 200);
    let slot = json!({"eventId": "e", "configName": "due", "requestedTime": "2026-01-01T00:00:00Z"});
    assert_eq!(operator.post("/api/v1/slots", &slot).await.unwrap().status, 201);
    // An event of somebody else, in the same trace, that is given up.
    let headers = vec![("traceparent", traceparent()), ("tracestate", STATE.to_owned())];
    let malformed = OutgoingEvent { headers, ..OutgoingEvent::new("traced", b"nonsense".to_vec()) };
    produce_event(&broker, "sms-outbound", malformed).await;

    let mut spans = HashSet::new();
    for topic in ["sms-outbound", "request-processing", "sms-outbound.dlq"] {
        let messages = consume_messages(&broker, topic, |messages| !messages.is_empty()).await;
        let trace = messages[0].trace.as_ref().unwrap_or_else(|| panic!("{topic} has a trace"));
        assert_eq!(trace.parent.trace_id.to_string(), TRACE, "{topic}");
        assert_eq!(trace.state.as_deref(), Some(STATE), "{topic}");
        assert!(spans.insert(trace.parent.span_id), "{topic} has a span of its own");
    }
    let due = consume_messages(&broker, "slots-due", |messages| !messages.is_empty()).await;
    let begun = due[0].trace.as_ref().expect("a trace begins");
    assert_ne!(begun.parent.trace_id.to_string(), TRACE);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_events_are_logged_moved_to_the_dead_letter_topic_and_skipped() {
    if skipped() {
        return;
    }
    let broker = Broker::private();
    let servers = Servers::start(&broker.url(), "malformed").await;
    configure(&servers.client, "malformed", 10, 60).await;
    for payload in ["nonsense", "{}", r#"{"messageId":"x"}"#] {
        produce(&broker, "sms-outbound", "malformed", payload).await;
    }
    send_accepted(&servers.client, "malformed", "fine").await;
    wait::until("the sender continues", TEST_TIMEOUT, async || {
        delivered(&servers.sender, "malformed") == ["fine"]
    })
    .await;
    // The log is written after the deliveries.
    let logged =
        || servers.sender.log_lines().into_iter().filter(|line| line.contains("malformed event")).count();
    wait::until("each malformed event is logged", TEST_TIMEOUT, async || logged() >= 3).await;
    assert_eq!(logged(), 3);
    let dead_letters = consume(&broker, "sms-outbound.dlq", |events| events.len() >= 3).await;
    let mut payloads: Vec<&str> = dead_letters.iter().map(|(_, payload)| payload.as_str()).collect();
    payloads.sort_unstable();
    assert_eq!(payloads, ["nonsense", r#"{"messageId":"x"}"#, "{}"]);
    assert!(dead_letters.iter().all(|(key, _)| key == "malformed"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_redis_a_failed_publish_stays_counted() {
    if skipped() || skip("redis") {
        return;
    }
    let redis = Server::private(&Options { appendonly: false, ..Options::default() });
    let mut broker = Broker::private();
    let database = postgres::Server::shared().database("kafka").await;
    let weir = server_with(&database, &broker.url(), "behind", "api,sender")
        .env("WEIR_CACHE", redis.url())
        .spawn()
        .await;
    let client = Client::new(weir.base_url());
    wait_until_healthy(&client).await;
    configure(&client, "behind", 5, 60).await;
    for n in 0..2 {
        send_accepted(&client, "behind", &n.to_string()).await;
    }
    wait::until("they are delivered", TEST_TIMEOUT, async || delivered(&weir, "behind") == ["0", "1"]).await;
    broker.stop().await;
    assert_eq!(send(&client, "behind", "lost").await.status, 503);
    broker.start().await;
    wait_until_healthy(&client).await;
    let count = client.get("/api/config/behind").await.unwrap().json()["currentCount"].clone();
    assert_eq!(count, json!(3), "the failed send stays counted");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_embedded_engine_can_publish_too() {
    if skip("kafka") {
        return;
    }
    let weir = weir_with_long_timeouts().env("WEIR_BROKER", Broker::shared().url());
    let weir = weir.env("WEIR_KAFKA_GROUP", "embedded").spawn().await;
    let client = Client::new(weir.base_url());
    wait_until_healthy(&client).await;
    configure(&client, "embedded", 2, 60).await;
    let statuses = [
        send(&client, "embedded", "a").await.status,
        send(&client, "embedded", "b").await.status,
        send(&client, "embedded", "c").await.status,
    ];
    assert_eq!(statuses, [200, 200, 429]);
    wait::until("both are delivered", TEST_TIMEOUT, async || delivered(&weir, "embedded") == ["a", "b"])
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopping_sender_hands_over_immediately() {
    if skipped() {
        return;
    }
    let mut servers = Servers::start(&Broker::shared().url(), "handover").await;
    configure(&servers.client, "handover", 1_000, 60).await;
    send_accepted(&servers.client, "handover", "first").await;
    let first = ["first"];
    wait::until("the first sender delivers", TEST_TIMEOUT, async || {
        delivered(&servers.sender, "handover") == first
    })
    .await;
    let second = server_with(&servers.database, &Broker::shared().url(), "handover", "sender").spawn().await;
    servers.sender.terminate();
    assert!(servers.sender.wait(TEST_TIMEOUT).await.success());
    send_accepted(&servers.client, "handover", "second").await;
    wait::until("the other delivers", TEST_TIMEOUT, async || !delivered(&second, "handover").is_empty())
        .await;
    assert_eq!(delivered(&second, "handover"), ["second"], "the first sender has committed its deliveries");
}
