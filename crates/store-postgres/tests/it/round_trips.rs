//! How often a batch waits for the server: every round trip of a transaction holds its locks for as long.

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

use crate::fixtures::OnPostgres;

/// Counts the round trips of the pool's connections: how often a client that has been answered sends something.
#[derive(Default)]
struct Counter {
    trips: AtomicUsize,
}

/// One connection through the relay.
#[derive(Default)]
struct Traffic {
    /// Whether it is the pool's, which is known by its settings, and not the one that listens.
    is_pooled: AtomicBool,
    /// Whether the last bytes came from the client.
    is_asking: AtomicBool,
}

async fn relay(listener: TcpListener, upstream: std::net::SocketAddr, counter: Arc<Counter>) {
    while let Ok((client, _)) = listener.accept().await {
        let server = TcpStream::connect(upstream).await.expect("the server is there");
        let traffic = Arc::new(Traffic::default());
        let (from_client, to_client) = client.into_split();
        let (from_server, to_server) = server.into_split();
        tokio::spawn(pass(from_client, to_server, Arc::clone(&traffic), Some(Arc::clone(&counter))));
        tokio::spawn(pass(from_server, to_client, traffic, None));
    }
}

/// Passes bytes on; `counter` is there for those of the client.
async fn pass(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    traffic: Arc<Traffic>,
    counter: Option<Arc<Counter>>,
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

/// An engine of one connection, through the relay.
struct Relayed {
    h: OnPostgres,
    counter: Arc<Counter>,
}

impl Relayed {
    async fn open() -> Self {
        let server = Server::shared();
        let database = Arc::new(server.database("trips").await);
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let at = listener.local_addr().expect("an address");
        let counter = Arc::new(Counter::default());
        tokio::spawn(relay(listener, server.addr(), Arc::clone(&counter)));
        let url = database.url_via(at);
        Self { h: OnPostgres::via(&url, 1, database, ManualClock::at(START)).await, counter }
    }

    /// How many round trips a call takes.
    async fn trips<T>(&self, call: impl Future<Output = T>) -> (usize, T) {
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
    let relayed = Relayed::open().await;
    let h = &relayed.h;
    h.engine
        .configure(&fixtures::user("alice"), fixtures::limits(1_000, 60))
        .await
        .expect("alice has limits");
    // At first, what each of the two needs is prepared in one more.
    for (sends, expected) in [(3, 4), (3, 2), (1, 2), (2, 2)] {
        let batch = fixtures::sends("alice", sends);
        let (trips, sent) = relayed.trips(h.engine.send_batch(batch.into())).await;
        assert_eq!((sent.expect("they are sent").len(), trips), (sends, expected));
    }
}

#[tokio::test]
async fn request_batches_take_no_more_round_trips_than_they_must() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let relayed = Relayed::open().await;
    let h = &relayed.h;
    for round in ["first", "second", "third"] {
        let is_prepared = round != "first";
        let (submit, _) = relayed.trips(submit_batch(h, submissions(h, round, 3), None)).await;
        let (claimed, jobs) = relayed.trips(claim(h, 3)).await;
        let (report, _) = relayed.trips(report_batch(h, jobs.iter().map(success).collect())).await;
        let limits = Some(fixtures::limits(100, 1));
        let (limited, _) =
            relayed.trips(submit_batch(h, submissions(h, &format!("{round} limited"), 2), limits)).await;
        let (_, jobs) = relayed.trips(claim(h, 9)).await;
        relayed.trips(report_batch(h, jobs.iter().map(success).collect())).await;
        if is_prepared {
            // A claim looks first whether anything is due.
            assert_eq!((submit, claimed, report, limited), (1, 3, 2, 2), "{round}");
        }
    }
}
