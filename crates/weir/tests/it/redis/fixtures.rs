//! Servers with Redis in front of Postgres, and their callers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use weir_testkit::http::Client;
use weir_testkit::postgres::{self, Database};
use weir_testkit::process::Weir;
use weir_testkit::redis::{Options, Server};
use weir_testkit::status_counts::StatusCounts;
use weir_testkit::{skip, wait};

use crate::fixtures::{TEST_TIMEOUT, configure, message, weir};

/// The API's timeout of 2 s, with a margin for a busy machine.
pub(super) const ANSWER_WITHIN: Duration = Duration::from_secs(3);
pub(super) const DOWN: &str = "REDIS DOWN — Falling back to Postgres";

pub(super) fn skipped() -> bool {
    skip("postgres") || skip("redis")
}

/// A Redis that persists only on SAVE.
pub(super) fn redis_without_persistence() -> Server {
    Server::private(&Options { appendonly: false, ..Options::default() })
}

/// Several servers on one database and one Redis.
pub(super) struct Fleet {
    pub(super) database: Database,
    pub(super) weirs: Vec<Weir>,
    pub(super) clients: Vec<Client>,
}

impl Fleet {
    pub(super) async fn start(servers: usize, redis: &str) -> Self {
        let database = postgres::Server::shared().database("redis").await;
        // Long, so that a busy server does not lose its connection to Postgres, which has no outage here.
        let builder = || weir().env("WEIR_STORE", database.url()).env("WEIR_POSTGRES_TIMEOUT", "30s");
        let start = |_| builder().env("WEIR_CACHE", redis).spawn();
        let weirs = join_all((0..servers).map(start)).await;
        let clients: Vec<_> = weirs.iter().map(|weir| Client::new(weir.base_url())).collect();
        let fleet = Self { database, weirs, clients };
        fleet.wait_until_healthy().await;
        fleet
    }

    /// Waits until the health of every server is good.
    pub(super) async fn wait_until_healthy(&self) {
        for client in &self.clients {
            wait::until("health is good", TEST_TIMEOUT, async || {
                client.get("/health").await.unwrap().status == 200
            })
            .await;
        }
    }

    /// Configures a user on one server and waits until every server has invalidated the old hash: a new hash that is created
    /// before that may be deleted as well.
    pub(super) async fn configure(&self, client: &Client, user: &str, limit: u32, minutes: u32) {
        let before = join_all(self.clients.iter().map(invalidations)).await;
        configure(client, user, limit, minutes).await;
        wait::until("the old hash is invalidated by every server", TEST_TIMEOUT, async || {
            let now = join_all(self.clients.iter().map(invalidations)).await;
            now.iter().zip(&before).all(|(now, before)| now > before)
        })
        .await;
    }

    pub(super) fn first(&self) -> &Client {
        &self.clients[0]
    }

    /// What the user's row shows as sent and as reserved.
    pub(super) async fn stored_counts(&self, user: &str) -> (usize, usize) {
        let columns = "current_count::text, reserved_count::text";
        let select = format!("SELECT {columns} FROM rate_limit_store WHERE user_id = '{user}'");
        let row = self.database.query_strings(&select).await.remove(0);
        let number = |column: usize| row[column].as_deref().unwrap().parse().unwrap();
        (number(0), number(1))
    }

    /// Waits until the user's row shows so many messages as sent.
    pub(super) async fn wait_for_sent(&self, user: &str, sent: usize) {
        let what = format!("the row of {user} shows {sent} messages as sent");
        wait::until(&what, TEST_TIMEOUT, async || self.stored_counts(user).await.0 == sent).await;
    }

    pub(super) fn count_lines(&self, text: &str) -> usize {
        let lines = self.weirs.iter().flat_map(Weir::log_lines);
        lines.filter(|line| line.contains(text)).count()
    }
}

/// The number of changed limits for which a server has invalidated its cache.
async fn invalidations(client: &Client) -> u64 {
    let metrics = client.get("/metrics").await.expect("an answer");
    let metrics = String::from_utf8_lossy(&metrics.body);
    let count = metrics.lines().find_map(|line| line.strip_prefix("weir_quota_cache_forgotten_total "));
    count.expect("the metric exists").parse().expect("a number")
}

/// Whether a log line reports the start or the end of an outage.
pub(super) fn outage_event(line: &str) -> Option<&'static str> {
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

/// Callers that send for one user on all servers until stopped.
pub(super) struct Load {
    stop: Arc<AtomicBool>,
    pub(super) counts: Arc<StatusCounts>,
    callers: Vec<tokio::task::JoinHandle<()>>,
}

impl Load {
    pub(super) fn start(clients: &[Client], user: &'static str) -> Self {
        let (stop, counts) = (Arc::new(AtomicBool::new(false)), Arc::new(StatusCounts::new()));
        let callers = (0..16).map(|n| {
            let (client, stop, counts) =
                (clients[n % clients.len()].clone(), Arc::clone(&stop), Arc::clone(&counts));
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    counts.record(send(&client, user).await);
                }
            })
        });
        Self { callers: callers.collect(), stop, counts }
    }

    /// Waits until `more` sends were accepted or the limit is reached.
    pub(super) async fn wait_for_more(&self, more: usize) {
        let from = self.counts.count(200);
        wait::until("sends are accepted or over the limit", TEST_TIMEOUT, async || {
            self.counts.count(200) >= from + more || self.counts.count(429) > 0
        })
        .await;
    }

    pub(super) async fn end(self) -> Arc<StatusCounts> {
        self.stop.store(true, Ordering::Relaxed);
        for caller in self.callers {
            caller.await.expect("no caller may fail");
        }
        self.counts
    }
}
