//! The sender: one log line per message, in order for each user, also after failures.

use std::collections::BTreeMap;

use futures_util::future::join_all;
use weir_testkit::http::Client;
use weir_testkit::process::Weir;
use weir_testkit::wait;

use crate::fixtures::{
    Running, Store, TEST_TIMEOUT, configure, deliveries, message, on_each_engine, wait_until_delivered, weir,
};

const USERS: usize = 5;
const MESSAGES: usize = 60;

/// Each user sends its messages one after the other; the users send concurrently.
async fn send_in_order(clients: &[Client]) {
    join_all((0..USERS).map(|user| async move {
        let name = format!("user-{user}");
        for n in 0..MESSAGES {
            let client = &clients[(user + n) % clients.len()];
            let response = client.post("/api/send", &message(&name, &n.to_string())).await.unwrap();
            assert_eq!(response.status, 200);
        }
    }))
    .await;
}

/// The delivered messages of each user.
fn by_user(deliveries: Vec<(String, String)>) -> BTreeMap<String, Vec<usize>> {
    let mut seen = BTreeMap::<_, Vec<_>>::new();
    for (user, text) in deliveries {
        seen.entry(user).or_default().push(text.parse().expect("a number"));
    }
    seen
}

async fn messages_are_delivered_once_and_in_order_for_each_user(store: Store) {
    let server = Running::start(store).await;
    for user in 0..USERS {
        configure(&server.client(), &format!("user-{user}"), 10_000, 60).await;
    }
    send_in_order(&[server.client()]).await;
    wait_until_delivered(&server.operator()).await;
    let seen = by_user(deliveries(&server.weir));
    assert_eq!(seen.len(), USERS);
    for (user, numbers) in seen {
        assert_eq!(numbers, (0..MESSAGES).collect::<Vec<_>>(), "{user}");
    }
}

async fn a_malformed_event_is_logged_becomes_a_dead_letter_and_is_skipped(store: Store) {
    let mut server = Running::start(store).await;
    configure(&server.client(), "u", 100, 60).await;
    // Stopped, so that no sender reads the tables while they are changed below.
    server.weir.terminate();
    server.weir.wait(TEST_TIMEOUT).await;
    match &server.database {
        Some(database) => {
            database
                .execute(
                    "INSERT INTO queue_message (topic, shard, key, payload)
                     SELECT 'sms-outbound', 3, 'u', convert_to('not an event ' || n::text, 'UTF8') FROM generate_series(1, 3) n;
                     INSERT INTO queue_ledger (topic, slot, accepted) VALUES ('sms-outbound', 99, 3)",
                )
                .await;
        }
        None => {
            let file = rusqlite::Connection::open(server.weir.data_dir().join("weir.db")).unwrap();
            file.execute_batch(
                "INSERT INTO queue_ledger (topic, accepted) VALUES ('sms-outbound', 3);
                 INSERT INTO queue_message (topic, id, key, payload) VALUES
                 ('sms-outbound', 1, 'u', 'not an event 1'), ('sms-outbound', 2, 'u', 'not an event 2'),
                 ('sms-outbound', 3, 'u', 'not an event 3')",
            )
            .unwrap();
        }
    }
    server.weir.restart().await;
    let client = server.client();
    assert_eq!(client.post("/api/send", &message("u", "fine")).await.unwrap().status, 200);
    let line = server.weir.wait_for_log(|line| line.contains("malformed event"), TEST_TIMEOUT).await;
    assert!(line.contains("ERROR") && line.contains("not an event"), "{line}");
    let books = wait_until_delivered(&server.operator()).await;
    assert_eq!((books["ok"].as_bool(), books["quota"]["dead"].as_u64()), (Some(true), Some(3)), "{books}");
    assert_eq!(deliveries(&server.weir), [("u".to_owned(), "fine".to_owned())]);
}

on_each_engine!(
    messages_are_delivered_once_and_in_order_for_each_user,
    a_malformed_event_is_logged_becomes_a_dead_letter_and_is_skipped,
);

async fn with_roles(server: &Running, roles: &str) -> Weir {
    let url = server.database.as_ref().expect("Postgres").url();
    weir().env("WEIR_STORE", url).env("WEIR_ROLES", roles).spawn().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn senders_in_processes_of_their_own_share_the_work_in_order() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let first = Running::start(Store::Postgres).await;
    for user in 0..USERS {
        configure(&first.client(), &format!("user-{user}"), 10_000, 60).await;
    }
    let (api, sender) = tokio::join!(with_roles(&first, "api"), with_roles(&first, "sender"));
    let denied = Client::new(sender.base_url()).post("/api/send", &message("user-0", "x")).await.unwrap();
    assert_eq!(denied.status, 404, "a sender has no API");
    send_in_order(&[first.client(), Client::new(api.base_url())]).await;
    let books = wait_until_delivered(&first.operator()).await;
    assert_eq!(books["quota"]["done"], (USERS * MESSAGES) as u64);
    assert!(deliveries(&api).is_empty(), "an API process delivers nothing");
    let mut all: Vec<_> = [&first.weir, &sender].into_iter().flat_map(stamped).collect();
    // The lines of a batch have the same time; a stable sort keeps their order.
    all.sort_by(|(a, ..), (b, ..)| a.cmp(b));
    let seen = by_user(all.into_iter().map(|(_, user, text)| (user, text)).collect());
    for (user, numbers) in seen {
        assert_eq!(numbers, (0..MESSAGES).collect::<Vec<_>>(), "{user}, over both senders' logs by time");
    }
}

/// Deliveries with the times of their log lines.
fn stamped(weir: &Weir) -> Vec<(String, String, String)> {
    let times = weir.log_lines().into_iter().filter(|line| line.contains("SMS SENT")).map(|line| {
        let line: serde_json::Value = serde_json::from_str(&line).expect("a JSON log line");
        line["timestamp"].as_str().expect("a time").to_owned()
    });
    times.zip(deliveries(weir)).map(|(time, (user, text))| (time, user, text)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sender_that_is_killed_leaves_its_messages_to_the_next() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let first = Running::start(Store::Postgres).await;
    configure(&first.client(), "u", 100_000, 60).await;
    let url = first.database.as_ref().expect("Postgres").url().to_owned();
    let api = weir().env("WEIR_STORE", &url).env("WEIR_ROLES", "api").spawn().await;
    let mut killed = first.weir;
    let client = Client::new(api.base_url());
    let sends = (0..400).map(|n| {
        let client = client.clone();
        async move { client.post("/api/send", &message("u", &n.to_string())).await.unwrap() }
    });
    let sending = tokio::spawn(join_all(sends));
    killed.wait_for_log(|line| line.contains("SMS SENT"), TEST_TIMEOUT).await;
    killed.kill_9();
    let answers = sending.await.expect("callers");
    let accepted = answers.iter().filter(|answer| answer.status == 200).count();
    assert_eq!(accepted, 400);
    let next = weir()
        .env("WEIR_STORE", &url)
        .env("WEIR_ROLES", "sender")
        .env("WEIR_SENDER_VISIBILITY", "1s")
        .spawn()
        .await;
    wait::until("the next sender has delivered the rest", TEST_TIMEOUT * 2, async || {
        let mut seen: Vec<_> = deliveries(&killed).into_iter().chain(deliveries(&next)).collect();
        seen.sort();
        seen.dedup();
        seen.len() == 400
    })
    .await;
}
