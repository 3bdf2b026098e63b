//! Fixtures for tests: a running server on either engine, and its callers.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde_json::{Value, json};
use weir_core::{Clock, ManualClock, Timestamp};
use weir_queue::kafka::{Brokers, KafkaPublisher, KafkaSource, PublisherSettings, SourceSettings};
use weir_queue::publish::{OutgoingEvent, Publisher};
use weir_queue::{Message, MessageSource, Settlement};
use weir_server::Server;
use weir_server::auth::jwt::{self, Claims};
use weir_server::settings::Settings;
use weir_server::settings::source::{Sources, flatten_toml};
use weir_testkit::http::Client;
use weir_testkit::kafka::Broker;
use weir_testkit::postgres::{self, Database};
use weir_testkit::process::{Builder, Weir};
use weir_testkit::status_counts::StatusCounts;
use weir_testkit::wait;

use crate::contract;

/// When the tokens of tests expire, in seconds since 1970.
pub(crate) const FAR_FUTURE: u64 = 4_000_000_000;

/// Timeout of conditions that tests wait for.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(30);

/// Long timeouts, for tests that must not fail when a busy machine makes the engines slow.
pub(crate) const LONG_TIMEOUTS: [(&str, &str); 5] = [
    ("WEIR_HTTP_TIMEOUT", "10s"),
    ("WEIR_POSTGRES_TIMEOUT", "9s"),
    ("WEIR_REDIS_TIMEOUT", "9s"),
    ("WEIR_REDIS_SALE_TIMEOUT", "9s"),
    ("WEIR_KAFKA_TIMEOUT", "8s"),
];

/// The engine that a test runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Store {
    Embedded,
    Postgres,
}

/// Generates a test of each function for each engine. `WEIR_TEST_SKIP` can skip those on Postgres.
macro_rules! on_each_engine {
    ($($name:ident),* $(,)?) => {
        mod embedded {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    super::$name($crate::fixtures::Store::Embedded).await;
                }
            )*
        }
        mod postgres {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    if !weir_testkit::skip("postgres") {
                        super::$name($crate::fixtures::Store::Postgres).await;
                    }
                }
            )*
        }
    };
}
pub(crate) use on_each_engine;

/// A builder for the `weir` binary under test.
pub(crate) fn weir() -> Builder {
    contract::enforce();
    Weir::builder(env!("CARGO_BIN_EXE_weir"))
}

/// [`weir`] with the timeouts of [`LONG_TIMEOUTS`].
pub(crate) fn weir_with_long_timeouts() -> Builder {
    LONG_TIMEOUTS.iter().fold(weir(), |builder, (name, value)| builder.env(name, value))
}

/// A server in its own process, and its database on Postgres.
pub(crate) struct Running {
    pub(crate) weir: Weir,
    pub(crate) database: Option<Database>,
}

impl Running {
    pub(crate) async fn start(store: Store) -> Self {
        Self::start_with(store, &[]).await
    }

    /// Adds settings as environment variables.
    pub(crate) async fn start_with(store: Store, settings: &[(&str, &str)]) -> Self {
        let mut builder = weir();
        for (name, value) in settings {
            builder = builder.env(name, value);
        }
        match store {
            Store::Embedded => Self { weir: builder.spawn().await, database: None },
            Store::Postgres => {
                let database = postgres::Server::shared().database("it").await;
                // Short, so that another server can soon claim the messages of a killed one.
                let builder = builder.env("WEIR_STORE", database.url()).env("WEIR_SENDER_VISIBILITY", "2s");
                let weir = builder.spawn().await;
                Self { weir, database: Some(database) }
            }
        }
    }

    /// A second server on the same database.
    pub(crate) async fn second(&self) -> Weir {
        self.second_with(&[]).await
    }

    /// Adds settings as environment variables.
    pub(crate) async fn second_with(&self, settings: &[(&str, &str)]) -> Weir {
        let database = self.database.as_ref().expect("only servers on Postgres share a database");
        let builder = weir().env("WEIR_STORE", database.url());
        settings.iter().fold(builder, |builder, (name, value)| builder.env(name, value)).spawn().await
    }

    pub(crate) fn client(&self) -> Client {
        Client::new(self.weir.base_url())
    }

    pub(crate) fn operator(&self) -> Client {
        operator(&self.weir)
    }
}

/// A client with the operator's key.
pub(crate) fn operator(weir: &Weir) -> Client {
    Client::new(weir.base_url()).with_header("x-admin-key", &weir.admin_key())
}

/// A server in this process with a clock that tests advance.
pub(crate) struct InProcess {
    pub(crate) client: Client,
    pub(crate) clock: ManualClock,
    server: Server,
    data: tempfile::TempDir,
    _database: Option<Database>,
}

impl InProcess {
    pub(crate) async fn start(store: Store) -> Self {
        Self::start_with(store, &[]).await
    }

    /// Adds settings as environment variables.
    pub(crate) async fn start_with(store: Store, settings: &[(&str, &str)]) -> Self {
        Self::start_with_file(store, settings, None).await
    }

    /// Adds a file of settings.
    pub(crate) async fn start_with_file(
        store: Store,
        settings: &[(&str, &str)],
        file: Option<&Path>,
    ) -> Self {
        contract::enforce();
        let data = tempfile::tempdir().expect("a directory");
        let file = file.map(|path| {
            let text = std::fs::read_to_string(path).expect("a file");
            (path.to_owned(), flatten_toml(path, &text).expect("TOML"))
        });
        let mut sources = Sources { file, ..Sources::default() };
        let mut set = |name: &str, value: &str| sources.environment.insert(name.into(), value.into());
        set("WEIR_LISTEN", "127.0.0.1:0");
        set("WEIR_GRPC_LISTEN", "127.0.0.1:0");
        for (name, value) in settings {
            set(name, value);
        }
        set("WEIR_DATA", data.path().to_str().expect("a plain path"));
        let database = match store {
            Store::Embedded => None,
            Store::Postgres => Some(postgres::Server::shared().database("it").await),
        };
        if let Some(database) = &database {
            set("WEIR_STORE", database.url());
        }
        let clock = ManualClock::at(Timestamp::from_seconds(1_767_225_600));
        let manual: Arc<dyn Clock> = Arc::new(clock.clone());
        let settings = Settings::read(sources).expect("valid settings");
        let server = Server::start(settings, Some(manual)).await.expect("a server");
        let client = Client::new(format!("http://{}", server.address()));
        Self { client, clock, server, data, _database: database }
    }

    pub(crate) fn grpc_address(&self) -> SocketAddr {
        self.server.grpc_address().expect("the role api")
    }

    /// A client with a token for this user.
    pub(crate) fn caller(&self, user: &str) -> Client {
        let secret = std::fs::read_to_string(self.data.path().join("jwt.secret")).expect("a secret");
        let claims = Claims { sub: user.into(), exp: FAR_FUTURE, tenant_id: None, scope: None };
        let token = jwt::sign(&secret, &claims).expect("a token");
        self.client.clone().with_header("authorization", &format!("Bearer {token}"))
    }

    /// A client with the operator's key.
    pub(crate) fn operator(&self) -> Client {
        let key = std::fs::read_to_string(self.data.path().join("admin.key")).expect("a key");
        self.client.clone().with_header("x-admin-key", key.trim())
    }

    pub(crate) async fn stop(self) {
        assert!(self.server.stop().await, "the server must stop in time");
    }
}

/// Configures a user, which must succeed.
pub(crate) async fn configure(client: &Client, user: &str, limit: u32, minutes: u32) {
    let body = json!({"userId": user, "rateLimit": limit, "timeWindow": minutes});
    let response = client.post("/api/config", &body).await.expect("an answer");
    assert_eq!(response.status, 200, "{:?}", response.body);
}

pub(crate) fn message(user: &str, text: &str) -> Value {
    json!({"userId": user, "message": text})
}

/// Sends `count` messages concurrently, spread over `clients`, and counts the responses by status.
pub(crate) async fn send_in_parallel(clients: &[Client], user: &str, count: usize) -> StatusCounts {
    let sends =
        (0..count).map(|n| {
            let client = &clients[n % clients.len()];
            async move {
                client.post("/api/send", &message(user, &format!("m{n}"))).await.expect("an answer").status
            }
        });
    let counts = StatusCounts::new();
    for status in join_all(sends).await {
        counts.record(status);
    }
    counts
}

/// Waits until every accepted message is delivered. Returns the audit.
pub(crate) async fn wait_until_delivered(operator: &Client) -> Value {
    wait::until("every accepted message is delivered", TEST_TIMEOUT, async || {
        audit(operator).await["quota"]["inFlight"] == 0
    })
    .await;
    audit(operator).await
}

pub(crate) async fn audit(operator: &Client) -> Value {
    let response = operator.get("/admin/audit").await.expect("an answer");
    assert_eq!(response.status, 200, "{:?}", response.body);
    response.json()
}

/// The `SMS SENT` lines of a server's log, as (user, message).
pub(crate) fn deliveries(weir: &Weir) -> Vec<(String, String)> {
    let field = |line: &Value, name: &str| line[name].as_str().unwrap_or_default().to_owned();
    let lines = weir.log_lines().into_iter().filter(|line| line.contains("SMS SENT"));
    lines
        .map(|line| serde_json::from_str::<Value>(&line).expect("a JSON log line"))
        .map(|line| (field(&line, "userId"), field(&line, "payload")))
        .collect()
}

fn brokers(broker: &Broker) -> Brokers {
    broker.url().parse().expect("a Kafka URL")
}

/// Publishes an event to a topic as if from outside Weir.
pub(crate) async fn produce(broker: &Broker, topic: &str, key: &str, payload: &str) {
    produce_event(broker, topic, OutgoingEvent::new(key, payload.into())).await;
}

pub(crate) async fn produce_event(broker: &Broker, topic: &str, event: OutgoingEvent) {
    let settings = PublisherSettings { timeout: TEST_TIMEOUT, ..PublisherSettings::default() };
    let publisher = KafkaPublisher::open(&brokers(broker), settings).expect("a publisher");
    let results = publisher.publish(topic, vec![event]).await;
    assert!(results[0].is_confirmed(), "{results:?}");
}

/// Reads a topic from its beginning until `is_complete`. Returns (key, payload).
pub(crate) async fn consume(
    broker: &Broker,
    topic: &str,
    is_complete: impl Fn(&[(String, String)]) -> bool,
) -> Vec<(String, String)> {
    let texts = |messages: &[Message]| -> Vec<(String, String)> {
        let text = |payload: &[u8]| String::from_utf8_lossy(payload).into_owned();
        messages.iter().map(|message| (message.key.clone(), text(&message.payload))).collect()
    };
    texts(&consume_messages(broker, topic, |messages| is_complete(&texts(messages))).await)
}

/// As [`consume`], with the traces of the events.
pub(crate) async fn consume_messages(
    broker: &Broker,
    topic: &str,
    is_complete: impl Fn(&[Message]) -> bool,
) -> Vec<Message> {
    let dead_letters =
        KafkaPublisher::open(&brokers(broker), PublisherSettings::default()).expect("a publisher");
    let settings = SourceSettings { group: "reader".to_owned(), ..SourceSettings::default() };
    let source =
        KafkaSource::open(&brokers(broker), topic, &settings, Arc::new(dead_letters)).expect("a source");
    let mut events = Vec::new();
    let deadline = Instant::now() + TEST_TIMEOUT;
    while !is_complete(&events) && Instant::now() < deadline {
        source.wait(topic, Duration::from_millis(100)).await;
        let claim = source.claim(topic, 100, TEST_TIMEOUT).await.expect("a claim");
        let done = claim.messages.iter().map(|message| message.position).collect();
        events.extend(claim.messages.iter().cloned());
        if !claim.messages.is_empty() {
            let settlement = Settlement { done, ..Settlement::default() };
            source.settle(&claim.receipt, settlement).await.expect("a settlement");
        }
    }
    events
}
