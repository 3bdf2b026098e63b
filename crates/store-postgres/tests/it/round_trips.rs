//! Counts the round trips of batches: a transaction holds its locks during each of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use weir_core::ManualClock;
use weir_store::quota::QuotaStore;
use weir_store_conformance::request::fixtures::{claim, report_batch, submissions, submit_batch, success};
use weir_store_conformance::{START, fixtures};
use weir_testkit::postgres::Server;

use crate::fixtures::PostgresFixture;

/// Counts the round trips of the pool's connections: how often a client sends something after a response.
#[derive(Default)]
struct RoundTrips {
    trips: AtomicUsize,
}

/// The state of one connection through the relay.
#[derive(Default)]
struct Traffic {
    /// Whether it is one of the pool's connections, recognized by its settings, and not the listener's.
    is_pooled: AtomicBool,
    /// Whether the last bytes came from the client.
    is_asking: AtomicBool,
}

async fn relay(listener: TcpListener, upstream: std::net::SocketAddr, counter: Arc<RoundTrips>) {
    while let Ok((client, _)) = listener.accept().await {
        let server = TcpStream::connect(upstream).await.expect("a connection to the server");
        let traffic = Arc::new(Traffic::default());
        let (from_client, to_client) = client.into_split();
        let (from_server, to_server) = server.into_split();
        tokio::spawn(forward(from_client, to_server, Arc::clone(&traffic), Some(Arc::clone(&counter))));
        tokio::spawn(forward(from_server, to_client, traffic, None));
    }
}

/// Forwards bytes. `counter` is given for those from the client.
async fn forward(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    traffic: Arc<Traffic>,
    counter: Option<Arc<RoundTrips>>,
) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        let bytes = &buffer[..count];
        let was_asking = traffic.is_asking.swap(counter.is_some(), Ordering::Relaxed);
        if let Some(counter) = &counter {
            let settings = b"enable_seqscan";
            if bytes.windows(settings.len()).any(|window| window == settings) {
                traffic.is_pooled.store(true, Ordering::Relaxed);
            }
            if !was_asking && traffic.is_pooled.load(Ordering::Relaxed) {
                counter.trips.fetch_add(1, Ordering::Relaxed);
            }
        }
        if to.write_all(bytes).await.is_err() {
            return;
        }
    }
}

/// An engine with one connection, which goes through the relay.
struct RelayedEngine {
    h: PostgresFixture,
    counter: Arc<RoundTrips>,
}

impl RelayedEngine {
    async fn open() -> Self {
        let server = Server::shared();
        let database = Arc::new(server.database("trips").await);
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let at = listener.local_addr().expect("an address");
        let counter = Arc::new(RoundTrips::default());
        tokio::spawn(relay(listener, server.addr(), Arc::clone(&counter)));
        let url = database.url_via(at);
        Self { h: PostgresFixture::via(&url, 1, database, ManualClock::at(START)).await, counter }
    }

    /// Counts the round trips of a call.
    async fn count_trips<T>(&self, call: impl Future<Output = T>) -> (usize, T) {
        let before = self.counter.trips.load(Ordering::Relaxed);
        let outcome = call.await;
        (self.counter.trips.load(Ordering::Relaxed) - before, outcome)
    }
}

#[tokio::test]
async fn a_batch_of_sends_takes_two_round_trips_once_its_statements_are_prepared() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let relayed = RelayedEngine::open().await;
    let h = &relayed.h;
    h.engine
        .configure(&fixtures::user("alice"), fixtures::limits(1_000, 60))
        .await
        .expect("alice has limits");
    // At first each of the two needs one more, which prepares its statements.
    for (sends, expected) in [(3, 4), (3, 2), (1, 2), (2, 2)] {
        let batch = fixtures::sends("alice", sends);
        let (trips, sent) = relayed.count_trips(h.engine.send_batch(batch.into())).await;
        assert_eq!((sent.expect("they are sent").len(), trips), (sends, expected));
    }
}

#[tokio::test]
async fn request_batches_take_a_fixed_number_of_round_trips() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let relayed = RelayedEngine::open().await;
    let h = &relayed.h;
    for round in ["first", "second", "third"] {
        let is_prepared = round != "first";
        let (submit, _) = relayed.count_trips(submit_batch(h, submissions(h, round, 3), None)).await;
        let (claimed, jobs) = relayed.count_trips(claim(h, 3)).await;
        let (report, _) = relayed.count_trips(report_batch(h, jobs.iter().map(success).collect())).await;
        let limits = Some(fixtures::limits(100, 1));
        let (limited, _) = relayed
            .count_trips(submit_batch(h, submissions(h, &format!("{round} limited"), 2), limits))
            .await;
        let (_, jobs) = relayed.count_trips(claim(h, 9)).await;
        relayed.count_trips(report_batch(h, jobs.iter().map(success).collect())).await;
        if is_prepared {
            // A claim first checks whether anything is due.
            assert_eq!((submit, claimed, report, limited), (1, 3, 2, 2), "{round}");
        }
    }
}
