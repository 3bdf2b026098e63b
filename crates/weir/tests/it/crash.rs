//! `kill -9` at any time: every send that got 200 is counted, and its message is delivered.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use weir_testkit::http::Client;
use weir_testkit::wait;

use crate::fixtures::{
    Running, Store, TEST_TIMEOUT, configure, deliveries, message, on_each_engine, wait_until_delivered,
};

const USERS: usize = 4;
const CALLERS: usize = 16;

/// Sends until stopped. Returns the messages that got 200.
async fn send_until(
    stop: Arc<AtomicBool>,
    sent: Arc<AtomicUsize>,
    client: Client,
    caller: usize,
) -> Vec<(String, String)> {
    let mut accepted = Vec::new();
    let mut n = 0;
    while !stop.load(Ordering::SeqCst) {
        let (user, text) = (format!("user-{}", (caller + n) % USERS), format!("{caller}-{n}"));
        n += 1;
        match client.post("/api/send", &message(&user, &text)).await {
            Ok(response) if response.status == 200 => {
                accepted.push((user, text));
                sent.fetch_add(1, Ordering::SeqCst);
            }
            // Expected: the server is being killed.
            _ => tokio::task::yield_now().await,
        }
    }
    accepted
}

async fn everything_answered_with_200_survives_kill_9(store: Store) {
    let mut server = Running::start(store).await;
    for n in 0..USERS {
        configure(&server.client(), &format!("user-{n}"), 1_000_000, 60).await;
    }
    let mut accepted: Vec<(String, String)> = Vec::new();
    let mut delivered: HashSet<(String, String)> = HashSet::new();
    for round in 0..3 {
        let (stop, sent) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let callers: Vec<_> = (0..CALLERS)
            .map(|caller| send_until(stop.clone(), sent.clone(), server.client(), round * CALLERS + caller))
            .map(tokio::spawn)
            .collect();
        wait::until("a few hundred sends are accepted", TEST_TIMEOUT, async || {
            sent.load(Ordering::SeqCst) > 300
        })
        .await;
        server.weir.kill_9();
        stop.store(true, Ordering::SeqCst);
        for caller in callers {
            accepted.extend(caller.await.expect("a caller"));
        }
        delivered.extend(deliveries(&server.weir));
        server.weir.restart().await;
    }
    let books = wait_until_delivered(&server.operator()).await;
    delivered.extend(deliveries(&server.weir));
    assert_eq!(books["ok"], true, "{books}");
    let counted = books["quota"]["accepted"].as_u64().unwrap();
    assert!(counted >= accepted.len() as u64, "{counted} counted, {} answered", accepted.len());
    let lost: Vec<_> = accepted.iter().filter(|sent| !delivered.contains(*sent)).collect();
    assert!(lost.is_empty(), "{} of {} were never delivered: {lost:?}", lost.len(), accepted.len());
    let mut rows = 0;
    for n in 0..USERS {
        let row = server.client().get(&format!("/api/config/user-{n}")).await.unwrap().json();
        rows += row["currentCount"].as_u64().unwrap();
    }
    assert_eq!(rows, counted, "the rows count exactly the accepted messages");
}

on_each_engine!(everything_answered_with_200_survives_kill_9);
