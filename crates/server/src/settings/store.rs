//! The choice of engines, and their settings.

use std::time::Duration;

use weir_queue::kafka::Brokers;
use weir_store_postgres::PostgresTarget;

use super::http::HttpSettings;
use super::kafka::SecuritySettings;
use super::parse::{boolean, count, duration};
use super::source::{SettingError, SettingsReader};

/// The time that a call needs besides the brokers' confirmation, to lock and save its rows.
const KAFKA_MARGIN: Duration = Duration::from_millis(500);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreSettings {
    /// `store`.
    pub engine: EngineChoice,
    /// `cache`: serves hot paths in front of the store.
    pub cache: CacheChoice,
    /// `broker`: carries messages.
    pub broker: BrokerChoice,
    /// `kafka.timeout`: how long Kafka may take to confirm a batch.
    pub kafka_timeout: Duration,
    /// `redis.sale_timeout`: how long Redis may take to decide a sale.
    pub redis_sale_timeout: Duration,
    /// `kafka.group`: the consumer group of the senders.
    pub kafka_group: String,
    /// `kafka.partitions`: the partitions of topics that Weir creates.
    pub kafka_partitions: usize,
    /// `postgres.connections`: the most connections that this process opens.
    pub postgres_connections: usize,
    /// `postgres.formats`: which formats of rows are written to a database that an earlier version has created;
    /// `request/stored_form.rs` acts on it.
    pub formats: Formats,
}

/// Which formats of rows are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Formats {
    /// Those that servers of the version before can read.
    #[default]
    Compatible,
    /// Those of this version. All servers are of this version or a later one.
    Newest,
}

impl Formats {
    fn parse(text: &str) -> Option<Self> {
        match text {
            "compatible" => Some(Self::Compatible),
            "newest" => Some(Self::Newest),
            _ => None,
        }
    }
}

/// The engine that holds the state.
#[derive(Clone, Debug)]
pub enum EngineChoice {
    /// SQLite in the data directory.
    Embedded,
    /// A Postgres server.
    Postgres(Box<PostgresTarget>),
}

impl PartialEq for EngineChoice {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Embedded, Self::Embedded) => true,
            (Self::Postgres(a), Self::Postgres(b)) => a.address() == b.address(),
            _ => false,
        }
    }
}

impl Eq for EngineChoice {}

impl EngineChoice {
    /// Applies `postgres.timeout` and `postgres.allow_unsafe_durability`.
    fn with(self, timeout: Duration, allow_unsafe_durability: bool) -> Self {
        match self {
            Self::Embedded => Self::Embedded,
            Self::Postgres(target) => Self::Postgres(Box::new(
                target.with_call_timeout(timeout).allowing_unsafe_durability(allow_unsafe_durability),
            )),
        }
    }

    fn parse(text: &str) -> Option<Self> {
        match text {
            "embedded" => Some(Self::Embedded),
            url => url.parse().ok().map(|target| Self::Postgres(Box::new(target))),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BrokerChoice {
    /// The store's own queue.
    Embedded,
    /// Kafka.
    Kafka(Brokers),
}

impl BrokerChoice {
    fn parse(text: &str) -> Option<Self> {
        match text {
            "embedded" => Some(Self::Embedded),
            url => url.parse().ok().map(Self::Kafka),
        }
    }
}

#[derive(Clone, Debug)]
pub enum CacheChoice {
    None,
    /// A Redis server or cluster.
    Redis(Box<weir_store_redis::RedisTarget>),
}

impl PartialEq for CacheChoice {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::None, Self::None) => true,
            (Self::Redis(a), Self::Redis(b)) => a.address() == b.address(),
            _ => false,
        }
    }
}

impl Eq for CacheChoice {}

impl CacheChoice {
    /// Applies `redis.timeout`.
    fn with(self, timeout: Duration) -> Self {
        match self {
            Self::None => Self::None,
            Self::Redis(target) => Self::Redis(Box::new(target.with_call_timeout(timeout))),
        }
    }

    fn parse(text: &str) -> Option<Self> {
        match text {
            "none" => Some(Self::None),
            url => url.parse().ok().map(|target| Self::Redis(Box::new(target))),
        }
    }
}

impl StoreSettings {
    pub(crate) fn read(reader: &mut SettingsReader) -> Result<Self, SettingError> {
        let stores = "embedded, or postgres://user:password@host:port[,host:port]/database with sslmode one of disable, \
                      prefer, require, verify-ca, verify-full, and target_session_attrs, if given, read-write";
        let caches = "none, redis://[user:password@]host[:port][/database], rediss://… for TLS (with \
                      ?sslrootcert=FILE to trust other authorities than the system's), or redis+cluster://a,b,c; Sentinel is \
                      not supported: name an address that follows the primary, such as a virtual IP or HAProxy, or use \
                      Redis Cluster";
        let engine = reader.get("store", EngineChoice::Embedded, EngineChoice::parse, stores)?;
        let cache = reader.get("cache", CacheChoice::None, CacheChoice::parse, caches)?;
        let span = "a duration from 1ms to 24h, such as 500ms or 2s";
        let mut timeout =
            |name, default_ms| reader.get(name, Duration::from_millis(default_ms), duration, span);
        let postgres_timeout = timeout("postgres.timeout", 1_500)?;
        let redis_timeout = timeout("redis.timeout", 250)?;
        let redis_sale_timeout = timeout("redis.sale_timeout", 1_500)?;
        let kafka_timeout = timeout("kafka.timeout", 1_000)?;
        let allow_unsafe = reader.get("postgres.allow_unsafe_durability", false, boolean, "true or false")?;
        let brokers = "embedded, kafka://host:port[,host:port], or kafka+ssl://… for TLS";
        let security = SecuritySettings::read(reader)?;
        let broker = match reader.get("broker", BrokerChoice::Embedded, BrokerChoice::parse, brokers)? {
            BrokerChoice::Embedded => BrokerChoice::Embedded,
            BrokerChoice::Kafka(brokers) => BrokerChoice::Kafka(security.apply(brokers)?),
        };
        Ok(Self {
            broker,
            kafka_timeout,
            redis_sale_timeout,
            kafka_group: reader.get(
                "kafka.group",
                "weir-sender".to_owned(),
                |text| (1..=249).contains(&text.len()).then(|| text.to_owned()),
                "the name of a consumer group, 1 to 249 characters",
            )?,
            kafka_partitions: reader.get(
                "kafka.partitions",
                12,
                count(10_000),
                "a number of partitions from 1 to 10000",
            )?,
            cache: cache.with(redis_timeout),
            engine: engine.with(postgres_timeout, allow_unsafe),
            postgres_connections: reader.get(
                "postgres.connections",
                10,
                count(1_000),
                "a number of connections from 1 to 1000",
            )?,
            formats: reader.get(
                "postgres.formats",
                Formats::default(),
                Formats::parse,
                "compatible or newest",
            )?,
        })
    }

    /// Refuses a broker timeout that is longer than a call may take: callers would get 503 for messages that are queued.
    pub(super) fn check(&self, call_timeout: Duration) -> Result<(), SettingError> {
        let longest = call_timeout.max(HttpSettings::TIMEOUT) - KAFKA_MARGIN;
        if self.kafka_timeout > longest {
            let allowed = format!("at most {longest:?}, which is {KAFKA_MARGIN:?} less than http.timeout");
            return Err(SettingError::new("kafka.timeout", format!("{:?}", self.kafka_timeout), allowed));
        }
        Ok(())
    }
}
