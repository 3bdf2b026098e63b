//! Which engines hold the state.

use weir_store_postgres::Target;

use super::parse::count;
use super::source::{Reader, SettingError};

/// Which engines hold the state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreSettings {
    /// `store`: the engine.
    pub engine: EngineChoice,
    /// `cache`: what stands before it on hot paths.
    pub cache: CacheChoice,
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
    fn parse(text: &str) -> Option<Self> {
        match text {
            "embedded" => Some(Self::Embedded),
            url => url.parse().ok().map(|target| Self::Postgres(Box::new(target))),
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
    pub(super) fn read(reader: &mut Reader) -> Result<Self, SettingError> {
        let embedded = |text: &str| (text == "embedded").then_some(());
        reader.get("broker", (), embedded, "embedded (this version has no other broker)")?;
        let stores = "embedded, or postgres://user:password@host:port/database with sslmode one of disable, prefer, \
                      require, verify-ca, verify-full";
        let caches = "none, redis://[user:password@]host[:port][/database], rediss://… for TLS (with \
                      ?sslrootcert=FILE to trust other authorities than the system's), or redis+cluster://a,b,c";
        Ok(Self {
            cache: reader.get("cache", CacheChoice::None, CacheChoice::parse, caches)?,
            engine: reader.get("store", EngineChoice::Embedded, EngineChoice::parse, stores)?,
            postgres_connections: reader.get(
                "postgres.connections",
                10,
                count(1_000),
                "a number of connections from 1 to 1000",
            )?,
        })
    }
}
