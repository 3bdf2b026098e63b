//! Failover of Postgres: a standby that confirms every commit is promoted under load. Nothing that was acknowledged is lost, no
//! limit is exceeded, and servers move to the new primary by themselves.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::{StreamExt, stream};
use http::Method;
use parking_lot::Mutex;
use serde_json::{Value, json};
use weir_server::auth::jwt::{self, Claims};
use weir_testkit::clock::FakeClock;
use weir_testkit::http::{Client, Response};
use weir_testkit::postgres::{Database, Server};
use weir_testkit::process::Weir;
use weir_testkit::{skip, wait};

use crate::fixtures::{FAR_FUTURE, TEST_TIMEOUT, configure, deliveries, message, wait_until_delivered, weir};
use crate::sale::fixtures::create_active;

const JWT_SECRET: &str = "a-secret-that-all-servers-of-a-test-share";
const ADMIN_KEY: &str = "the-key-of-the-operator";
const KEYS: &str = "a:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
const WEBHOOK_SECRET: &str = "whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";

/// The limit of the users that reach it, in an hour.
const LIMIT: usize = 300;
const LIMITED_USERS: usize = 2;
/// The slots of a window, and the time that all of them are requested for.
const WINDOW_MAX: u64 = 50;
const AT: &str = "2026-06-01T12:00:00Z";
/// Acknowledgements of each kind before the fault, and again after it.
const ENOUGH: usize = 60;
/// How far the clock of the new primary is behind, in seconds.
const HOUR: i64 = 3_600;

/// A primary, its standby, and two servers that know both.
struct Cluster {
    primary: Server,
    standby: Server,
    database: Database,
    servers: Vec<Weir>,
}

impl Cluster {
    async fn start(standby_clock: &FakeClock) -> Self {
        let primary = Server::private();
        let database = primary.database("failover").await;
        let standby = primary.standby(standby_clock).await;
        let mut cluster = Self { primary, standby, database, servers: Vec::new() };
        for _ in 0..2 {
            let server = cluster.serve().await;
            cluster.servers.push(server);
        }
        let client = cluster.client(0);
        for user in (0..LIMITED_USERS).map(limited) {
            configure(&client, &user, u32::try_from(LIMIT).unwrap(), 60).await;
        }
        configure(&client, "unlimited", 1_000_000, 60).await;
        let config = json!({"configName": "default", "maxPerWindow": WINDOW_MAX, "windowSize": "PT4S"});
        assert_eq!(client.post("/admin/rate-limit/config", &config).await.unwrap().status, 200);
        create_active(&client, "W", 100_000).await;
        cluster
    }

    /// Starts a server that knows both hosts.
    async fn serve(&self) -> Weir {
        let settings = [
            ("WEIR_STORE", self.database.url_with(&self.standby)),
            ("WEIR_JWT_SECRET", JWT_SECRET.to_owned()),
            ("WEIR_ADMIN_KEY", ADMIN_KEY.to_owned()),
            ("WEIR_REQUEST_KEYS", KEYS.to_owned()),
            ("WEIR_WEBHOOK_SECRET", WEBHOOK_SECRET.to_owned()),
            // Messages that were claimed when the primary failed can be claimed again soon.
            ("WEIR_SENDER_VISIBILITY", "2s".to_owned()),
        ];
        settings.iter().fold(weir(), |builder, (name, value)| builder.env(name, value)).spawn().await
    }

    /// A client with all credentials.
    fn client(&self, server: usize) -> Client {
        let claims = Claims {
            sub: "a@b.c".into(),
            exp: FAR_FUTURE,
            tenant_id: Some("acme".into()),
            scope: Some("requests:create requests:read".into()),
        };
        let token = jwt::sign(JWT_SECRET, &claims).unwrap();
        Client::new(self.servers[server].base_url())
            .with_header("x-admin-key", ADMIN_KEY)
            .with_header("authorization", &format!("Bearer {token}"))
    }

    /// The number of connections of Weir to a server.
    async fn connections(&self, server: &Server) -> String {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'weir'";
        self.database.on(server).query_strings(sql).await[0][0].clone().unwrap()
    }
}

fn limited(n: usize) -> String {
    format!("limited-{n}")
}

/// What callers were told.
#[derive(Default)]
struct Acknowledged {
    /// User and message.
    sends: Mutex<Vec<(String, String)>>,
    /// Request ids by idempotency key.
    requests: Mutex<BTreeMap<String, String>>,
    /// Scheduled times by event.
    slots: Mutex<BTreeMap<String, Value>>,
    /// Purchase numbers by buyer.
    purchases: Mutex<BTreeMap<String, Value>>,
}

impl Acknowledged {
    fn counts(&self) -> [usize; 4] {
        let limited = self.sends.lock().iter().filter(|(user, _)| user != "unlimited").count();
        let others = self.sends.lock().len() - limited;
        [others, self.requests.lock().len(), self.slots.lock().len(), self.purchases.lock().len()]
    }

    /// Waits until each kind has this many more than `counts`.
    async fn wait_for_more(&self, counts: [usize; 4], what: &str) {
        wait::until(what, TEST_TIMEOUT, async || {
            self.counts().iter().zip(counts).all(|(now, before)| *now >= before + ENOUGH)
        })
        .await;
    }

    async fn send(&self, client: &Client, user: &str, text: String) {
        if let Some(_sent) = success(client.post("/api/send", &message(user, &text)).await, 200) {
            self.sends.lock().push((user.to_owned(), text));
        }
    }

    async fn submit(&self, client: &Client, key: String) {
        let body = json!({"idempotencyKey": key, "requestType": "pay", "payload": {"key": key}});
        if let Some(body) = success(client.post("/v1/requests", &body).await, 202) {
            self.requests.lock().insert(key, body["requestId"].as_str().unwrap().to_owned());
        }
    }

    async fn assign(&self, client: &Client, event: String) {
        let body = json!({"eventId": event, "configName": "default", "requestedTime": AT});
        if let Some(body) = success(client.post("/api/v1/slots", &body).await, 201) {
            self.slots.lock().insert(event, body["scheduledTime"].clone());
        }
    }

    async fn buy(&self, client: &Client, buyer: String) {
        let headers = [("content-type", "application/json"), ("x-user-id", buyer.as_str())];
        let body = json!({"sku": "W", "qty": 1}).to_string();
        let response = client.request(Method::POST, "/api/v1/purchases", &headers, body).await;
        if let Some(body) = success(response, 200).filter(|body| body["success"] == true) {
            self.purchases.lock().insert(buyer, body["data"]["purchaseNo"].clone());
        }
    }
}

/// The body of a response with the expected status. While the primary fails, calls may be refused with 503, and nothing else.
fn success(response: Result<Response, weir_testkit::http::Error>, expected: u16) -> Option<Value> {
    let response = response.expect("servers stay up");
    assert!(
        [expected, 429, 503].contains(&response.status),
        "{} {:?}",
        response.status,
        String::from_utf8_lossy(&response.body)
    );
    (response.status == expected).then(|| response.json())
}

/// Callers of every capability on both servers.
struct Load {
    acknowledged: Arc<Acknowledged>,
    stop: Arc<AtomicBool>,
    callers: Vec<tokio::task::JoinHandle<()>>,
}

impl Load {
    fn start(cluster: &Cluster) -> Self {
        let (acknowledged, stop) = (Arc::<Acknowledged>::default(), Arc::new(AtomicBool::new(false)));
        let callers = (0..16).map(|caller| {
            let (client, acknowledged) = (cluster.client(caller % 2), Arc::clone(&acknowledged));
            let stop = Arc::clone(&stop);
            tokio::spawn(async move {
                for n in 0.. {
                    if stop.load(Ordering::SeqCst) {
                        break;
                    }
                    let name = format!("{caller}-{n}");
                    match caller / 2 % 4 {
                        // One of eight sends is of a user who will reach the limit.
                        0 if n % 8 == 0 => {
                            acknowledged.send(&client, &limited(n / 8 % LIMITED_USERS), name).await;
                        }
                        0 => acknowledged.send(&client, "unlimited", name).await,
                        1 => acknowledged.submit(&client, name).await,
                        2 => acknowledged.assign(&client, name).await,
                        _ => acknowledged.buy(&client, name).await,
                    }
                }
            })
        });
        Self { callers: callers.collect(), acknowledged, stop }
    }

    async fn stop(self) -> Arc<Acknowledged> {
        self.stop.store(true, Ordering::SeqCst);
        for caller in self.callers {
            caller.await.expect("a caller");
        }
        self.acknowledged
    }
}

async fn in_parallel<T>(items: impl IntoIterator<Item = T>, check: impl AsyncFn(T)) {
    stream::iter(items).for_each_concurrent(32, |item| check(item)).await;
}

/// Expects that the new primary has all that was acknowledged, and that no limit is exceeded.
async fn expect_nothing_lost(cluster: &Cluster, acknowledged: &Acknowledged) {
    let client = cluster.client(1);
    let requests = acknowledged.requests.lock().clone();
    in_parallel(requests, async |(key, id)| {
        let body = json!({"idempotencyKey": key, "requestType": "pay", "payload": {"key": key}});
        let again = client.post("/v1/requests", &body).await.unwrap();
        assert_eq!((again.status, again.header("idempotent-replayed")), (202, Some("true")), "{key}");
        assert_eq!(again.json()["requestId"], id, "{key}");
    })
    .await;
    let slots = acknowledged.slots.lock().clone();
    in_parallel(slots, async |(event, scheduled)| {
        let slot = client.get(&format!("/api/v1/slots/{event}")).await.unwrap().json();
        assert_eq!(slot["scheduledTime"], scheduled, "{event}");
    })
    .await;
    let purchases = acknowledged.purchases.lock().clone();
    in_parallel(purchases, async |(buyer, number)| {
        let headers = [("x-user-id", buyer.as_str())];
        let bought = client.request(Method::GET, "/api/v1/purchases?sku=W", &headers, "").await.unwrap();
        assert_eq!(bought.json()["data"]["purchaseNo"], number, "{buyer}");
    })
    .await;
    let full = "SELECT count(*) FROM rate_limit_window_counter WHERE slot_count > 50";
    assert_eq!(cluster.database.on(&cluster.standby).query_strings(full).await[0][0].as_deref(), Some("0"));

    for user in (0..LIMITED_USERS).map(limited) {
        // At least the rest of the limit; what is allowed beyond it would be seen below.
        in_parallel(0..LIMIT + 10, async |n| acknowledged.send(&client, &user, format!("rest-{n}")).await)
            .await;
        let allowed = acknowledged.sends.lock().iter().filter(|(sender, _)| *sender == user).count();
        assert!(allowed <= LIMIT, "{user} was allowed {allowed} of {LIMIT}");
        let row = client.get(&format!("/api/config/{user}")).await.unwrap().json();
        assert_eq!(row["currentCount"], LIMIT, "{user}");
    }
    let books = wait_until_delivered(&client).await;
    assert_eq!(books["ok"], true, "{books}");
    let delivered: Vec<_> = cluster.servers.iter().flat_map(deliveries).collect();
    let delivered: HashSet<_> = delivered.into_iter().collect();
    let sends = acknowledged.sends.lock();
    let lost: Vec<_> = sends.iter().filter(|sent| !delivered.contains(*sent)).collect();
    assert!(lost.is_empty(), "{} of {} were not delivered: {lost:?}", lost.len(), sends.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_acknowledged_is_lost_when_the_primary_crashes_and_a_standby_is_promoted() {
    if skip("postgres") {
        return;
    }
    let mut cluster = Cluster::start(&FakeClock::new()).await;
    cluster.standby.pause();
    let unconfirmed =
        cluster.client(0).post("/api/send", &message("unlimited", "unconfirmed")).await.unwrap();
    assert_eq!(unconfirmed.status, 503, "a commit that the standby has not confirmed is not acknowledged");
    cluster.standby.resume();

    let load = Load::start(&cluster);
    load.acknowledged.wait_for_more([0; 4], "calls are acknowledged").await;
    cluster.primary.crash();
    cluster.standby.promote().await;
    let counts = load.acknowledged.counts();
    load.acknowledged.wait_for_more(counts, "servers use the new primary without a restart").await;
    let acknowledged = load.stop().await;
    expect_nothing_lost(&cluster, &acknowledged).await;

    cluster.primary.start_demoted().await;
    let third = cluster.serve().await;
    cluster.servers.push(third);
    let disconnect = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'weir'";
    cluster.database.on(&cluster.standby).execute(disconnect).await;
    for server in 0..3 {
        let client = cluster.client(server);
        wait::until("the standby that was the primary is not used", TEST_TIMEOUT, async || {
            client.post("/api/send", &message("unlimited", "m")).await.unwrap().status == 200
        })
        .await;
    }
    wait::until("no connection to a standby stays open", TEST_TIMEOUT, async || {
        cluster.connections(&cluster.primary).await == "0"
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_primary_is_replaced_and_not_used_again_when_it_wakes_up() {
    if skip("postgres") {
        return;
    }
    let clock = FakeClock::new();
    clock.set(-HOUR);
    let mut cluster = Cluster::start(&clock).await;
    let load = Load::start(&cluster);
    load.acknowledged.wait_for_more([0; 4], "calls are acknowledged").await;
    cluster.primary.pause();
    cluster.standby.promote().await;
    let counts = load.acknowledged.counts();
    load.acknowledged.wait_for_more(counts, "servers use the new primary without a restart").await;
    let acknowledged = load.stop().await;

    // The old primary wakes up, accepts writes, and waits for no standby, while the new one does not answer.
    let client = cluster.client(0);
    cluster.primary.resume();
    cluster.primary.wait_for_standbys("").await;
    cluster.standby.pause();
    let is_refused = |line: &str| line.contains("accepts writes but was replaced");
    wait::until("the old primary is refused", TEST_TIMEOUT, async || {
        assert_eq!(client.post("/api/send", &message("unlimited", "m")).await.unwrap().status, 503);
        cluster.servers[0].log_lines().iter().any(|line| is_refused(line))
    })
    .await;
    cluster.standby.resume();
    wait::until("the new primary is used again", TEST_TIMEOUT, async || {
        client.post("/api/send", &message("unlimited", "m")).await.unwrap().status == 200
    })
    .await;
    expect_nothing_lost(&cluster, &acknowledged).await;
}
