//! `sender.url`: messages are posted to the operator's SMS provider, in order for each user, and retried.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::Value;
use weir_core::Timestamp;
use weir_core::webhook::{SignedMessage, SigningSecret, verify};
use weir_testkit::http::Client;
use weir_testkit::kafka::Broker;
use weir_testkit::postgres::Server;
use weir_testkit::process::Builder;
use weir_testkit::raw_connection::{Listener, RawConnection};
use weir_testkit::{skip, wait};

use crate::fixtures::{
    Running, Store, TEST_TIMEOUT, configure, consume, deliveries, message, on_each_engine, operator, produce,
    wait_until_delivered, weir, weir_with_long_timeouts,
};

const SECRET: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";

/// A call that the provider got.
#[derive(Clone, Debug)]
struct Call {
    user: String,
    text: String,
    /// The header `webhook-id`.
    id: String,
}

/// A provider that answers each call with what its rule says; `None` is no answer.
#[derive(Clone)]
struct Provider {
    url: String,
    calls: Arc<Mutex<Vec<Call>>>,
}

type Rule = Arc<dyn Fn(&Call, usize) -> Option<u16> + Send + Sync>;

impl Provider {
    /// The rule gets the call and how many there were of the same message before.
    async fn start(rule: impl Fn(&Call, usize) -> Option<u16> + Send + Sync + 'static) -> Self {
        Self::serve_on(Listener::start().await, rule)
    }

    fn serve_on(
        mut listener: Listener,
        rule: impl Fn(&Call, usize) -> Option<u16> + Send + Sync + 'static,
    ) -> Self {
        let provider = Self { url: listener.url(), calls: Arc::default() };
        let (calls, rule): (_, Rule) = (Arc::clone(&provider.calls), Arc::new(rule));
        tokio::spawn(async move {
            loop {
                let connection = listener.next().await;
                tokio::spawn(serve(connection, Arc::clone(&calls), Arc::clone(&rule)));
            }
        });
        provider
    }

    fn calls_of(&self, user: &str) -> Vec<Call> {
        self.calls.lock().iter().filter(|call| call.user == user).cloned().collect()
    }

    fn texts_of(&self, user: &str) -> Vec<String> {
        self.calls_of(user).into_iter().map(|call| call.text).collect()
    }

    /// A server with this provider.
    async fn server(&self, store: Store, settings: &[(&str, &str)]) -> Running {
        let database = match store {
            Store::Embedded => None,
            Store::Postgres => Some(Server::shared().database("provider").await),
        };
        let mut builder = self.configured(weir());
        if let Some(database) = &database {
            builder = builder.env("WEIR_STORE", database.url());
        }
        let builder = settings.iter().fold(builder, |builder, (name, value)| builder.env(name, value));
        Running { weir: builder.spawn().await, database }
    }

    fn configured(&self, builder: Builder) -> Builder {
        builder
            .env("WEIR_SENDER_URL", &self.url)
            .env("WEIR_WEBHOOK_SECRET", SECRET)
            .env("WEIR_SENDER_READ_TIMEOUT", "1s")
            .env("WEIR_SENDER_VISIBILITY", "7s")
    }
}

/// Checks and answers the calls of one connection.
async fn serve(mut connection: RawConnection, calls: Arc<Mutex<Vec<Call>>>, rule: Rule) {
    while let Some(head) = connection.next_head().await {
        let length = head.get("content-length").expect("a length").parse().expect("a number");
        let body = connection.bytes(length).await;
        let secret = SigningSecret::parse(SECRET).unwrap();
        let header = |name| head.get(name).expect("a header of a signed webhook");
        let id = header("webhook-id");
        let message = SignedMessage {
            id,
            timestamp: header("webhook-timestamp"),
            signatures: header("webhook-signature"),
            body: &body,
        };
        let now = Timestamp::from_micros(jiff::Timestamp::now().as_microsecond());
        verify(std::slice::from_ref(&secret), message, now).expect("the signature is right");
        let body: Value = serde_json::from_slice(&body).expect("JSON");
        assert_eq!(body["type"], "sms.send", "{body}");
        assert!(body["timestamp"].as_str().unwrap().ends_with('Z'), "{body}");
        let text = |name: &str| body["data"][name].as_str().expect("a text").to_owned();
        assert_eq!(text("messageId"), id, "a message has one id");
        let call = Call { user: text("userId"), text: text("message"), id: id.to_owned() };
        let before = calls.lock().iter().filter(|other| other.id == call.id).count();
        let status = rule(&call, before);
        calls.lock().push(call);
        let Some(status) = status else {
            std::future::pending::<()>().await;
            return;
        };
        connection.send(format!("HTTP/1.1 {status} X\r\ncontent-length: 0\r\n\r\n")).await;
    }
}

async fn send(client: &Client, user: &str, text: &str) {
    let response = client.post("/api/send", &message(user, text)).await.unwrap();
    assert_eq!(response.status, 200, "{:?}", response.body);
}

fn numbers(count: usize) -> Vec<String> {
    (0..count).map(|n| n.to_string()).collect()
}

async fn messages_are_posted_in_order_and_logged_when_they_are_accepted(store: Store) {
    let provider = Provider::start(|_, _| Some(202)).await;
    let server = provider.server(store, &[]).await;
    let client = server.client();
    for user in ["a", "b", "c"] {
        configure(&client, user, 100, 60).await;
    }
    for text in numbers(20) {
        for user in ["a", "b", "c"] {
            send(&client, user, &text).await;
        }
    }
    wait_until_delivered(&server.operator()).await;
    for user in ["a", "b", "c"] {
        assert_eq!(provider.texts_of(user), numbers(20), "{user}");
        let logged: Vec<_> = deliveries(&server.weir).into_iter().filter(|(name, _)| name == user).collect();
        assert_eq!(logged.into_iter().map(|(_, text)| text).collect::<Vec<_>>(), numbers(20), "{user}");
    }
}

async fn a_failed_message_is_retried_with_its_id_and_holds_back_only_its_user(store: Store) {
    let provider =
        Provider::start(|call, before| Some(if call.text == "bad" && before < 3 { 503 } else { 200 })).await;
    let server = provider.server(store, &[]).await;
    let client = server.client();
    for user in ["a", "b"] {
        configure(&client, user, 100, 60).await;
    }
    send(&client, "a", "bad").await;
    send(&client, "a", "next").await;
    send(&client, "b", "good").await;
    wait_until_delivered(&server.operator()).await;
    assert_eq!(provider.texts_of("a"), ["bad", "bad", "bad", "bad", "next"]);
    assert_eq!(provider.texts_of("b"), ["good"]);
    let ids: BTreeSet<_> = provider.calls_of("a").into_iter().map(|call| call.id).collect();
    assert_eq!(ids.len(), 2, "one id for all attempts");
    let logged: Vec<_> = deliveries(&server.weir).into_iter().filter(|(user, _)| user == "a").collect();
    assert_eq!(logged.len(), 2, "{logged:?}");
}

async fn a_message_that_is_refused_or_fails_too_often_is_a_dead_letter(store: Store) {
    let provider = Provider::start(|call, _| {
        Some(match call.text.as_str() {
            "refused" => 422,
            "failing" => 500,
            _ => 200,
        })
    })
    .await;
    let server = provider.server(store, &[("WEIR_SENDER_ATTEMPTS", "3")]).await;
    let client = server.client();
    configure(&client, "a", 100, 60).await;
    for text in ["refused", "failing", "fine"] {
        send(&client, "a", text).await;
    }
    let books = wait_until_delivered(&server.operator()).await;
    assert_eq!((&books["quota"]["dead"], &books["ok"]), (&Value::from(2), &Value::from(true)), "{books}");
    assert_eq!(provider.texts_of("a"), ["refused", "failing", "failing", "failing", "fine"]);
    let dead = server.operator().get("/admin/dlq?topic=sms-outbound").await.unwrap().json();
    let reasons: Vec<_> =
        dead["items"].as_array().unwrap().iter().map(|item| item["reason"].to_string()).collect();
    assert!(reasons.iter().any(|reason| reason.contains("422")), "{reasons:?}");
    assert!(
        reasons.iter().any(|reason| reason.contains("500") && reason.contains("3 attempts")),
        "{reasons:?}"
    );
    assert_eq!(deliveries(&server.weir), [("a".to_owned(), "fine".to_owned())]);
}

async fn a_user_whose_calls_are_not_answered_does_not_stop_the_others(store: Store) {
    let provider = Provider::start(|call, _| (call.user != "stuck").then_some(200)).await;
    let server = provider.server(store, &[]).await;
    let client = server.client();
    for user in ["stuck", "other"] {
        configure(&client, user, 100, 60).await;
    }
    for text in numbers(3) {
        send(&client, "stuck", &text).await;
    }
    wait::until("the provider is called for the user", TEST_TIMEOUT, async || {
        !provider.calls_of("stuck").is_empty()
    })
    .await;
    send(&client, "other", "quick").await;
    wait::until("the other is delivered", TEST_TIMEOUT, async || provider.texts_of("other") == ["quick"])
        .await;
    assert_eq!(BTreeSet::from_iter(provider.texts_of("stuck")).len(), 1, "the first is not given up yet");
}

on_each_engine!(
    messages_are_posted_in_order_and_logged_when_they_are_accepted,
    a_failed_message_is_retried_with_its_id_and_holds_back_only_its_user,
    a_message_that_is_refused_or_fails_too_often_is_a_dead_letter,
    a_user_whose_calls_are_not_answered_does_not_stop_the_others,
);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_a_killed_sender_had_begun_is_made_again_with_the_same_id() {
    let provider = Provider::start(|_, before| (before > 0).then_some(200)).await;
    let mut server = provider.server(Store::Embedded, &[]).await;
    configure(&server.client(), "a", 100, 60).await;
    send(&server.client(), "a", "once").await;
    wait::until("the call has begun", TEST_TIMEOUT, async || provider.calls_of("a").len() == 1).await;
    server.weir.kill_9();
    server.weir.restart().await;
    wait_until_delivered(&server.operator()).await;
    let ids: Vec<_> = provider.calls_of("a").into_iter().map(|call| call.id).collect();
    assert!(ids.len() == 2 && ids[0] == ids[1], "{ids:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_wait_while_the_breaker_is_open_and_are_delivered_when_the_provider_is_back() {
    let closed = Provider::start(|_, _| Some(200)).await;
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let url = format!("http://127.0.0.1:{port}");
    let settings = [("WEIR_SENDER_URL", url.as_str()), ("WEIR_SENDER_ATTEMPTS", "3")];
    let server = closed.server(Store::Embedded, &settings).await;
    let client = server.client();
    for user in numbers(40) {
        configure(&client, &user, 100, 60).await;
        send(&client, &user, "x").await;
    }
    wait::until("the breaker is open", TEST_TIMEOUT, async || {
        let metrics = client.get("/metrics").await.unwrap();
        String::from_utf8_lossy(&metrics.body).contains("weir_quota_provider_breaker_state 2")
    })
    .await;
    let provider = Provider::serve_on(Listener::start_on(port).await, |_, _| Some(200));
    let books = wait_until_delivered(&server.operator()).await;
    assert_eq!(
        (&books["quota"]["done"], &books["quota"]["dead"]),
        (&Value::from(40), &Value::from(0)),
        "{books}"
    );
    assert_eq!(provider.calls.lock().len(), 40);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_kafka_messages_are_posted_once_while_another_of_their_partition_is_retried() {
    if skip("postgres") || skip("kafka") {
        return;
    }
    let provider =
        Provider::start(|call, before| Some(if call.text == "bad" && before < 2 { 503 } else { 200 })).await;
    let broker = Broker::private();
    let database = Server::shared().database("provider").await;
    let weir = provider
        .configured(weir_with_long_timeouts())
        .env("WEIR_STORE", database.url())
        .env("WEIR_BROKER", broker.url())
        .env("WEIR_ROLES", "api,sender")
        .spawn()
        .await;
    let client = operator(&weir);
    wait::until("health is good", TEST_TIMEOUT, async || client.get("/health").await.unwrap().status == 200)
        .await;
    for n in 0..40 {
        configure(&client, &format!("u{n}"), 100, 60).await;
    }
    send(&client, "u0", "bad").await;
    for n in 1..40 {
        send(&client, &format!("u{n}"), "good").await;
    }
    send(&client, "u0", "next").await;
    // Another producer gives user and message alone.
    produce(&broker, "sms-outbound", "foreign", r#"{"userId":"foreign","message":"hi"}"#).await;
    produce(&broker, "sms-outbound", "broken", "not an event").await;
    wait::until("every message is accepted", TEST_TIMEOUT, async || {
        provider.texts_of("u0").last().is_some_and(|last| last == "next")
            && (1..40).all(|n| !provider.texts_of(&format!("u{n}")).is_empty())
            && !provider.texts_of("foreign").is_empty()
    })
    .await;
    assert_eq!(provider.texts_of("u0"), ["bad", "bad", "bad", "next"]);
    for n in 1..40 {
        assert_eq!(provider.texts_of(&format!("u{n}")), ["good"], "u{n}");
    }
    assert_eq!(provider.calls_of("foreign")[0].id.len(), 36);
    let dead = consume(&broker, "sms-outbound.dlq", |letters| !letters.is_empty()).await;
    assert_eq!(dead, [("broken".to_owned(), "not an event".to_owned())]);
    wait::until("every message is logged once", TEST_TIMEOUT, async || deliveries(&weir).len() == 42).await;
}
