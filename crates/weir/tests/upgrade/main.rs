//! An upgrade under load, and back: servers of the last release (`WEIR_OLD_BINARY`) and of this version on one Postgres. Nothing that
//! was acknowledged is lost, no limit is exceeded, and no key is accepted twice. `make upgrade` builds the old binary and runs this.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use http::Method;
use jiff::Timestamp;
use parking_lot::Mutex;
use serde_json::{Value, json};
use weir_server::auth::jwt::{self, Claims};
use weir_testkit::http::{Client, Response};
use weir_testkit::postgres::{Database, Server};
use weir_testkit::process::Weir;
use weir_testkit::wait;

const JWT_SECRET: &str = "development-only-jwt-secret-32-bytes";
const ADMIN_KEY: &str = "development-only-admin-key";
const SETTINGS: [(&str, &str); 9] = [
    ("WEIR_JWT_SECRET", JWT_SECRET),
    ("WEIR_ADMIN_KEY", ADMIN_KEY),
    ("WEIR_WEBHOOK_SECRET", "whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="),
    ("WEIR_REQUEST_KEYS", "a:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="),
    ("WEIR_HTTP_TIMEOUT", "10s"),
    ("WEIR_POSTGRES_TIMEOUT", "9s"),
    ("WEIR_SALE_USER_PER_SECOND", "0"),
    ("WEIR_EDGE_PER_IP_PER_SECOND", "0"),
    ("WEIR_POSTGRES_CONNECTIONS", "6"),
];
const NEWEST: (&str, &str) = ("WEIR_POSTGRES_FORMATS", "newest");
const WAIT: Duration = Duration::from_secs(120);
const QUOTA: u64 = 10;
const STOCK: u32 = 200;
const PER_WINDOW: u64 = 7;
const AT: &str = "2027-06-01T12:00:00Z";
/// How many rounds of the load each phase lasts at least.
const ROUNDS: usize = 12;

fn old_binary() -> PathBuf {
    std::env::var_os("WEIR_OLD_BINARY").expect("WEIR_OLD_BINARY: `make upgrade` sets it").into()
}

async fn start(binary: &str, database: &Database, more: &[(&str, &str)]) -> Weir {
    let builder = Weir::builder(binary).env("WEIR_STORE", database.url());
    SETTINGS.iter().chain(more).fold(builder, |builder, (name, value)| builder.env(name, value)).spawn().await
}

async fn start_old(database: &Database) -> Weir {
    start(old_binary().to_str().expect("a plain path"), database, &[]).await
}

async fn start_new(database: &Database, more: &[(&str, &str)]) -> Weir {
    start(env!("CARGO_BIN_EXE_weir"), database, more).await
}

async fn stop(mut weir: Weir) {
    weir.terminate();
    assert!(weir.wait(WAIT).await.success(), "it finishes what it has accepted");
}

fn client(weir: &Weir) -> Client {
    let claims = Claims {
        sub: "a@b.c".into(),
        exp: 4_000_000_000,
        tenant_id: Some("acme".into()),
        scope: Some("requests:create requests:read".into()),
    };
    let token = jwt::sign(JWT_SECRET, &claims).expect("a token");
    Client::new(weir.base_url())
        .with_header("authorization", &format!("Bearer {token}"))
        .with_header("x-admin-key", ADMIN_KEY)
}

/// What callers were told.
#[derive(Default)]
struct Acknowledged {
    /// By user: how many sends were accepted, and of how many the fate is unknown.
    sends: HashMap<String, (u64, u64)>,
    /// By key: the id of its request.
    requests: BTreeMap<String, String>,
    /// By event: its time.
    slots: BTreeMap<String, Timestamp>,
    /// By buyer: the number of the purchase.
    purchases: BTreeMap<String, String>,
}

/// Callers of all servers that are in service.
#[derive(Default)]
struct Load {
    servers: Mutex<Vec<Client>>,
    acknowledged: Mutex<Acknowledged>,
    rounds: AtomicUsize,
    is_over: AtomicBool,
}

impl Load {
    fn serve(&self, servers: &[&Weir]) {
        *self.servers.lock() = servers.iter().map(|weir| client(weir)).collect();
    }

    /// The server at this place, counted around.
    fn server(&self, place: usize) -> Client {
        let servers = self.servers.lock();
        servers[place % servers.len()].clone()
    }

    /// Calls until a server answers, for calls that may be repeated. One that is stopping does not, or answers 503.
    async fn insist(&self, first: usize, call: impl AsyncFn(Client) -> Option<Response>) -> Response {
        let mut answer = None;
        let place = AtomicUsize::new(first);
        wait::until("a server answers", WAIT, async || {
            let server = self.server(place.fetch_add(1, Ordering::Relaxed));
            answer = call(server).await.filter(|answer| answer.status < 500);
            answer.is_some()
        })
        .await;
        answer.expect("the condition above was met")
    }

    async fn run(&self) {
        while !self.is_over.load(Ordering::SeqCst) {
            let round = self.rounds.load(Ordering::SeqCst);
            let calls = (0..4).map(|n| async move {
                let n = round * 4 + n;
                tokio::join!(self.send(n), self.submit(n), self.assign(n), self.buy(n));
            });
            join_all(calls).await;
            self.rounds.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Waits until the load has gone on for a while.
    async fn go_on(&self) {
        let until = self.rounds.load(Ordering::SeqCst) + ROUNDS;
        wait::until("the load goes on", WAIT, async || self.rounds.load(Ordering::SeqCst) >= until).await;
    }

    /// Sends twice for one of a few users, whose quotas are soon used up.
    async fn send(&self, n: usize) {
        let user = format!("user-{}", n / 40);
        let body = json!({"userId": user, "message": "hello"});
        // A new config starts a new count, so one caller alone makes it, once.
        if n.is_multiple_of(40) {
            let config = json!({"userId": user, "rateLimit": QUOTA, "timeWindow": 600});
            let configured = self.insist(n, async |server| {
                match server.get(&format!("/api/config/{user}")).await.ok()? {
                    missing if missing.status == 404 => server.post("/api/config", &config).await.ok(),
                    found => Some(found),
                }
            });
            assert_eq!(configured.await.status, 200);
        }
        for place in [n, n + 1] {
            let answer = self.server(place).post("/api/send", &body).await;
            let mut acknowledged = self.acknowledged.lock();
            let (accepted, unknown) = acknowledged.sends.entry(user.clone()).or_default();
            match answer {
                Ok(answer) if answer.status == 200 => *accepted += 1,
                Ok(answer) if answer.status == 429 || answer.status == 404 => {}
                // It may have been counted.
                _ => *unknown += 1,
            }
        }
    }

    /// Submits one key at two servers at the same time.
    async fn submit(&self, n: usize) {
        let key = format!("key-{n}");
        let body = json!({"idempotencyKey": key, "requestType": "pay", "payload": {"n": n}});
        let submit = async |server: Client| server.post("/v1/requests", &body).await.ok();
        let (first, second) = tokio::join!(self.insist(n, submit), self.insist(n + 1, submit));
        for answer in [&first, &second] {
            assert_eq!(answer.status, 202, "{:?}", answer.body);
        }
        let [first, second] = [first, second].map(|answer| text(&answer.json()["requestId"]));
        assert_eq!(first, second, "one key is one request");
        self.acknowledged.lock().requests.insert(key, first);
    }

    async fn assign(&self, n: usize) {
        let event = format!("event-{n}");
        let body = json!({"eventId": event, "configName": "default", "requestedTime": AT});
        let assign = async |server: Client| server.post("/api/v1/slots", &body).await.ok();
        let (first, second) = tokio::join!(self.insist(n, assign), self.insist(n + 1, assign));
        let [first, second] = [first, second].map(|answer| {
            assert!(answer.status == 200 || answer.status == 201, "{:?}", answer.body);
            // The last release wrote no zeros at the end.
            text(&answer.json()["scheduledTime"]).parse::<Timestamp>().expect("a time")
        });
        assert_eq!(first, second, "an event has one slot");
        self.acknowledged.lock().slots.insert(event, first);
    }

    async fn buy(&self, n: usize) {
        let buyer = format!("buyer-{n}");
        let body = json!({"sku": "widget", "qty": 1}).to_string();
        let buy = async |server: Client| {
            let headers = [("content-type", "application/json"), ("x-user-id", buyer.as_str())];
            server.request(Method::POST, "/api/v1/purchases", &headers, body.clone()).await.ok()
        };
        let (first, second) = tokio::join!(self.insist(n, buy), self.insist(n + 1, buy));
        for answer in [first, second] {
            let answer = answer.json();
            if answer["success"] == json!(true) {
                let number = text(&answer["data"]["purchaseNo"]);
                assert_eq!(
                    self.acknowledged.lock().purchases.insert(buyer.clone(), number),
                    None,
                    "one per buyer"
                );
            }
        }
    }

    /// Compares what callers were told with what the servers say.
    async fn check(&self, database: &Database) {
        let counts = |sql: &'static str| async move {
            let rows = database.query_strings(sql).await;
            let pair = |row: Vec<Option<String>>| {
                let mut values = row.into_iter().map(Option::unwrap_or_default);
                (values.next().unwrap_or_default(), values.next().unwrap_or_default())
            };
            rows.into_iter().map(pair).collect::<HashMap<_, _>>()
        };
        let sent = counts("SELECT user_id, current_count FROM rate_limit_store").await;
        let requests = counts("SELECT request_id, status FROM request_record").await;
        let slots = counts("SELECT window_start, count(*) FROM rate_limit_event_slot GROUP BY 1").await;
        let buyers = counts("SELECT user_id, count(*) FROM purchases GROUP BY 1").await;
        let acknowledged = self.acknowledged.lock();
        for (user, (accepted, unknown)) in &acknowledged.sends {
            let counted: u64 = sent[user].parse().expect("a number");
            assert!(
                *accepted <= counted && counted <= accepted + unknown,
                "{user}: {accepted} {counted} {unknown}"
            );
            assert!(counted <= QUOTA, "{user} sent {counted}");
        }
        assert_eq!(requests.len(), acknowledged.requests.len(), "no request is lost or accepted twice");
        for id in acknowledged.requests.values() {
            assert!(requests.contains_key(id), "{id} is lost");
        }
        let assigned: u64 = slots.values().map(|count| count.parse::<u64>().expect("a number")).sum();
        assert_eq!(assigned, acknowledged.slots.len() as u64, "no slot is lost or assigned twice");
        assert!(
            slots.values().all(|count| count.parse::<u64>().expect("a number") <= PER_WINDOW),
            "{slots:?}"
        );
        assert!(buyers.values().all(|count| count == "1") && buyers.len() <= STOCK as usize, "{buyers:?}");
        for buyer in acknowledged.purchases.keys() {
            assert!(buyers.contains_key(buyer), "the purchase of {buyer} is lost");
        }
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("{value} is no text")).to_owned()
}

async fn prepare(weir: &Weir) {
    let client = client(weir);
    let config = json!({"configName": "default", "maxPerWindow": PER_WINDOW, "windowSize": "PT4S"});
    assert_eq!(client.post("/admin/rate-limit/config", &config).await.expect("an answer").status, 200);
    let time = |seconds| {
        let at = Timestamp::now() + jiff::SignedDuration::from_secs(seconds);
        at.strftime("%Y-%m-%dT%H:%M:%S%.3fZ").to_string()
    };
    let product = json!({"sku": "widget", "productName": "Widget", "initialStock": STOCK,
                         "startTime": time(3), "endTime": time(3_600)});
    assert_eq!(client.post("/api/v1/products", &product).await.expect("an answer").status, 201);
    wait::until("the sale is active", WAIT, async || {
        let status = client.get("/api/v1/sales?sku=widget").await.expect("an answer").json();
        status["data"]["state"] == "ACTIVE"
    })
    .await;
}

/// The error output of an old server, which must not start.
async fn fail_to_start_old(database: &Database) -> String {
    let data = tempfile::tempdir().expect("a directory");
    let mut command = tokio::process::Command::new(old_binary());
    command
        .args(["serve", "--listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0", "--data"])
        .arg(data.path());
    command.envs(SETTINGS).env("WEIR_STORE", database.url()).stdout(Stdio::null()).stderr(Stdio::piped());
    let output = tokio::time::timeout(WAIT, command.kill_on_drop(true).output()).await.expect("it ends");
    let output = output.expect("it can be started");
    assert!(!output.status.success(), "a server of the version before must not start");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_are_upgraded_and_rolled_back_under_load() {
    let database = Server::shared().database("upgrade").await;
    let (old_a, old_b) = (start_old(&database).await, start_old(&database).await);
    prepare(&old_a).await;
    let load = Load::default();
    load.serve(&[&old_a, &old_b]);
    let ((), (new_c, new_d)) = tokio::join!(load.run(), upgrade(&database, &load, old_a, old_b));
    load.check(&database).await;
    // A key of each phase is still known.
    let known = load.acknowledged.lock().requests.clone();
    for (key, id) in known {
        let n: usize = key.trim_start_matches("key-").parse().expect("a number");
        let body = json!({"idempotencyKey": key, "requestType": "pay", "payload": {"n": n}});
        let answer = client(&new_c).post("/v1/requests", &body).await.expect("an answer");
        assert_eq!((answer.status, text(&answer.json()["requestId"])), (202, id));
    }
    wait::until("the books balance", WAIT, async || {
        let audit = client(&new_d).get("/admin/audit").await.expect("an answer");
        audit.json()["ok"] == json!(true)
    })
    .await;
}

/// Replaces two old servers by two new ones, with a way back in between. Ends the load, and returns the new servers.
async fn upgrade(database: &Database, load: &Load, old_a: Weir, old_b: Weir) -> (Weir, Weir) {
    load.go_on().await;

    // The first new server migrates the schema beside the old ones.
    let new_a = start_new(database, &[]).await;
    load.serve(&[&old_a, &old_b, &new_a]);
    load.go_on().await;
    load.serve(&[&old_b, &new_a]);
    stop(old_a).await;
    load.go_on().await;

    // Taken back: only old servers, one of which starts on the migrated schema.
    let old_c = start_old(database).await;
    load.serve(&[&old_b, &old_c]);
    stop(new_a).await;
    load.go_on().await;

    // Upgraded again, this time whole, with one server killed.
    let (new_a, new_b) = (start_new(database, &[]).await, start_new(database, &[]).await);
    load.serve(&[&old_c, &new_a, &new_b]);
    let mut old_b = old_b;
    old_b.kill_9();
    load.go_on().await;
    load.serve(&[&new_a, &new_b]);
    stop(old_c).await;
    load.go_on().await;
    assert!(keys(database).await.iter().all(|key| key.starts_with("key-")), "held back so far");

    // All servers are new: the newest formats, one server after the other. Old servers do not start any more.
    let new_c = start_new(database, &[NEWEST]).await;
    load.serve(&[&new_a, &new_b, &new_c]);
    load.go_on().await;
    load.serve(&[&new_b, &new_c]);
    stop(new_a).await;
    let new_d = start_new(database, &[NEWEST]).await;
    load.serve(&[&new_c, &new_d]);
    stop(new_b).await;
    load.go_on().await;
    let refusal = fail_to_start_old(database).await;
    assert!(refusal.contains("schema version"), "{refusal}");
    assert!(keys(database).await.iter().any(|key| key.starts_with('\u{1}')), "the newest formats are in use");

    load.is_over.store(true, Ordering::SeqCst);
    (new_c, new_d)
}

async fn keys(database: &Database) -> Vec<String> {
    let keys = database.query_strings("SELECT idempotency_key FROM idempotency_record").await;
    keys.into_iter().flatten().flatten().collect()
}
