//! Which engines hold the state.

use std::time::Duration;

use weir_queue::kafka::Brokers;
use weir_store_postgres::Target;

use super::parse::{boolean, count, duration};
use super::source::{Reader, SettingError};

/// What is left of the API's timeout after it is enough for the rows to be locked and saved.
const KAFKA_TIMEOUT_MAX: Duration = Duration::from_millis(1_500);

/// Which engines hold the state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreSettings {
    /// `store`: the engine.
    pub engine: EngineChoice,
    /// `cache`: what stands before it on hot paths.
    pub cache: CacheChoice,
    /// `broker`: what carries messages.
    pub broker: BrokerChoice,
    /// `kafka.timeout`: how long Kafka may take to confirm a batch.
    pub kafka_timeout: Duration,
    /// `kafka.group`: the senders that share the messages.
    pub kafka_group: String,
    /// `kafka.partitions`: of topics that Weir makes.
    pub kafka_partitions: usize,
    /// `postgres.connections`: the most connections this process makes.
    pub postgres_connections: usize,
}

/// The engine that holds the state.
#[derive(Clone, Debug)]
pub enum EngineChoice {
    /// SQLite in the data directory.
    Embedded,
    /// A Postgres server.
    Postgres(Box<Target>),
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
    /// The same, with `postgres.allow_unsafe_durability`.
    fn allowing_unsafe_durability(self, is_allowed: bool) -> Self {
        match self {
            Self::Embedded => Self::Embedded,
            Self::Postgres(target) => Self::Postgres(Box::new(target.allowing_unsafe_durability(is_allowed))),
        }
    }

    fn parse(text: &str) -> Option<Self> {
        match text {
            "embedded" => Some(Self::Embedded),
            url => url.parse().ok().map(|target| Self::Postgres(Box::new(target))),
        }
    }
}

/// What carries messages.
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

/// What stands before the store.
#[derive(Clone, Debug)]
pub enum CacheChoice {
    /// Nothing.
    None,
    /// A Redis server or cluster.
    Redis(Box<weir_store_redis::Target>),
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
    fn parse(text: &str) -> Option<Self> {
        match text {
            "none" => Some(Self::None),
            url => url.parse().ok().map(|target| Self::Redis(Box::new(target))),
        }
    }
}

impl StoreSettings {
    pub(crate) fn read(reader: &mut Reader) -> Result<Self, SettingError> {
        let stores = "embedded, or postgres://user:password@host:port/database with sslmode one of disable, prefer, \
                      require, verify-ca, verify-full";
        let caches = "none, redis://[user:password@]host[:port][/database], rediss://… for TLS (with \
                      ?sslrootcert=FILE to trust other authorities than the system's), or redis+cluster://a,b,c";
        let engine = reader.get("store", EngineChoice::Embedded, EngineChoice::parse, stores)?;
        let allow_unsafe = reader.get("postgres.allow_unsafe_durability", false, boolean, "true or false")?;
        Ok(Self {
            broker: reader.get(
                "broker",
                BrokerChoice::Embedded,
                BrokerChoice::parse,
                "embedded, or kafka://host:port[,host:port]",
            )?,
            kafka_timeout: reader.get(
                "kafka.timeout",
                Duration::from_secs(1),
                |text| duration(text).filter(|timeout| *timeout <= KAFKA_TIMEOUT_MAX),
                "a duration from 1ms to 1500ms (a call has 2s)",
            )?,
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
            cache: reader.get("cache", CacheChoice::None, CacheChoice::parse, caches)?,
            engine: engine.allowing_unsafe_durability(allow_unsafe),
            postgres_connections: reader.get(
                "postgres.connections",
                10,
                count(1_000),
                "a number of connections from 1 to 1000",
            )?,
        })
    }
}
