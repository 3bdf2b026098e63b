//! Servers with Redis in front of Postgres, and callers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use weir_testkit::history::Tally;
use weir_testkit::http::Client;
use weir_testkit::postgres::{self, Database};
use weir_testkit::process::Weir;
use weir_testkit::redis::{Options, Server};
use weir_testkit::{skip, wait};

use crate::fixtures::{PATIENCE, configure, message, weir};

/// The contract's bound: 2 s for the API, and room for a busy machine.
pub(super) const ANSWER_WITHIN: Duration = Duration::from_secs(3);
pub(super) const DOWN: &str = "REDIS DOWN — Falling back to Postgres";

pub(super) fn skipped() -> bool {
    skip("postgres") || skip("redis")
}

/// A Redis that forgets what it has not been told to save.
pub(super) fn forgetful() -> Server {
    Server::private(&Options { appendonly: false, ..Options::default() })
}

/// Servers on one database and one Redis.
pub(super) struct Fleet {
    pub(super) database: Database,
    pub(super) weirs: Vec<Weir>,
    pub(super) clients: Vec<Client>,
}

impl Fleet {
    pub(super) async fn start(servers: usize, redis: &str) -> Self {
        let database = postgres::Server::shared().database("redis").await;
        // A server that is busy goes on listening to Postgres, which nothing happens to here.
        let builder = || weir().env("WEIR_STORE", database.url()).env("WEIR_POSTGRES_TIMEOUT", "30s");
        let start = |_| builder().env("WEIR_CACHE", redis).spawn();
        let weirs = join_all((0..servers).map(start)).await;
        let clients: Vec<_> = weirs.iter().map(|weir| Client::new(weir.base_url())).collect();
        let fleet = Self { database, weirs, clients };
        fleet.is_healthy().await;
        fleet
    }

    /// Waits until every server has all its engines.
    pub(super) async fn is_healthy(&self) {
        for client in &self.clients {
            wait::until("health is good", PATIENCE, async || {
                client.get("/health").await.unwrap().status == 200
            })
            .await;
        }
    }

    /// Gives a user limits on one of the servers, and waits until every one has heard of it and seen to it that the old
    /// hash is gone: a new one that is there before they have may go with it.
    pub(super) async fn configure(&self, client: &Client, user: &str, limit: u32, minutes: u32) {
        let before = join_all(self.clients.iter().map(forgotten)).await;
        configure(client, user, limit, minutes).await;
        wait::until("the old hash is gone everywhere", PATIENCE, async || {
            let now = join_all(self.clients.iter().map(forgotten)).await;
            now.iter().zip(&before).all(|(now, before)| now > before)
        })
        .await;
    }

    pub(super) fn first(&self) -> &Client {
        &self.clients[0]
    }

    /// What the table says of a user.
    pub(super) async fn stored(&self, user: &str) -> u32 {
        let select = format!("SELECT current_count::text FROM rate_limit_store WHERE user_id = '{user}'");
        let rows = self.database.query_strings(&select).await;
        rows[0][0].as_deref().unwrap().parse().unwrap()
    }

    pub(super) fn lines(&self, text: &str) -> usize {
        let lines = self.weirs.iter().flat_map(Weir::log_lines);
        lines.filter(|line| line.contains(text)).count()
    }
}

/// How many changes of limits a server has dealt with.
async fn forgotten(client: &Client) -> u64 {
    let metrics = client.get("/metrics").await.expect("an answer");
    let metrics = String::from_utf8_lossy(&metrics.body);
    let count = metrics.lines().find_map(|line| line.strip_prefix("weir_quota_cache_forgotten_total "));
    count.expect("it is counted").parse().expect("a number")
}

/// What a line tells of an outage.
pub(super) fn outage(line: &str) -> Option<&'static str> {
    if line.contains(DOWN) {
        return Some("down");
    }
    line.contains("Redis is back").then_some("back")
}

pub(super) async fn send(client: &Client, user: &str) -> u16 {
    let started = Instant::now();
    let response = client.post("/api/send", &message(user, "m")).await.expect("an answer");
    assert!(started.elapsed() < ANSWER_WITHIN, "an answer took {:?}", started.elapsed());
    response.status
}

/// Callers that send for one user over all servers until told to stop.
pub(super) struct Load {
    stop: Arc<AtomicBool>,
    pub(super) tally: Arc<Tally>,
    callers: Vec<tokio::task::JoinHandle<()>>,
}

impl Load {
    pub(super) fn start(clients: &[Client], user: &'static str) -> Self {
        let (stop, tally) = (Arc::new(AtomicBool::new(false)), Arc::new(Tally::new()));
        let callers = (0..16).map(|n| {
            let (client, stop, tally) =
                (clients[n % clients.len()].clone(), Arc::clone(&stop), Arc::clone(&tally));
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    tally.record(send(&client, user).await);
                }
            })
        });
        Self { callers: callers.collect(), stop, tally }
    }

    /// Waits until so many more were accepted, or the limit is reached.
    pub(super) async fn goes_on(&self, more: usize) {
        let from = self.tally.count(200);
        wait::until("sends are accepted or over the limit", PATIENCE, async || {
            self.tally.count(200) >= from + more || self.tally.count(429) > 0
        })
        .await;
    }

    pub(super) async fn end(self) -> Arc<Tally> {
        self.stop.store(true, Ordering::Relaxed);
        for caller in self.callers {
            caller.await.expect("no caller fails");
        }
        self.tally
    }
}
