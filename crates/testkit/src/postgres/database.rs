//! A fresh database for one test, with direct access to its tables.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio_postgres::{Client, Error, SimpleQueryMessage};
use url::Url;

use super::connection::{block_on, describe, open};

/// Databases whose tests have ended, with the time of that.
///
/// They are reused because a new database takes a thousand new files, longer than most tests run, while emptying one takes
/// a few dozen.
pub(super) type IdleDatabases = Arc<Mutex<VecDeque<(String, Instant)>>>;

/// How long a database stays unused before another test gets it: tasks of the old test end with its runtime, shortly after
/// the database is dropped.
const IDLE_BEFORE_REUSE: Duration = Duration::from_secs(3);

const RESET: &str =
    "DROP SCHEMA public CASCADE; CREATE SCHEMA public; GRANT USAGE ON SCHEMA public TO public";

/// A database for one test. Afterwards it is reused, dropped, or removed with its server.
pub struct Database {
    url: Url,
    ca_file: Option<PathBuf>,
    cleanup: Cleanup,
}

/// What to do with a database when its test ends.
pub(super) enum Cleanup {
    /// It is removed with its server.
    Nothing,
    Reuse(IdleDatabases),
    /// It is dropped, because the server is external.
    Drop {
        server: Url,
    },
}

impl Database {
    pub(super) async fn create(server: Url, ca_file: Option<PathBuf>, hint: &str, cleanup: Cleanup) -> Self {
        let administration =
            Self { url: server.clone(), ca_file: ca_file.clone(), cleanup: Cleanup::Nothing };
        let named = |name: &str, cleanup| {
            let mut url = server;
            url.set_path(name);
            Self { url, ca_file, cleanup }
        };
        if let Cleanup::Reuse(idle) = &cleanup
            && let Some(name) = take_idle(idle)
        {
            let sessions = format!(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = '{name}'"
            );
            administration.execute(&sessions).await;
            let database = named(&name, cleanup);
            database.execute(RESET).await;
            return database;
        }
        let name = unique_name(hint);
        administration.execute(&format!("CREATE DATABASE {name}")).await;
        named(&name, cleanup)
    }

    /// `postgres://user:password@127.0.0.1:port/name`; with TLS the host is `localhost` and `sslmode=require` is set.
    pub fn url(&self) -> &str {
        self.url.as_str()
    }

    /// The same database through a proxy at `addr`.
    pub fn url_via(&self, addr: SocketAddr) -> String {
        let mut url = self.url.clone();
        // `localhost` stays, because the certificate is made out to it.
        if self.ca_file.is_none() {
            url.set_ip_host(addr.ip()).expect("a postgres URL takes an IP address as host");
        }
        url.set_port(Some(addr.port())).expect("a postgres URL takes a port");
        url.into()
    }

    /// The database of this name on another server, such as a standby.
    #[must_use]
    pub fn on(&self, server: &super::Server) -> Self {
        let mut url = server.url.clone();
        url.set_path(self.url.path());
        Self { url, ca_file: server.ca_file.clone(), cleanup: Cleanup::Nothing }
    }

    /// The URL of this database on either of two servers, of which one accepts writes.
    #[must_use]
    pub fn url_with(&self, other: &super::Server) -> String {
        let (own, other) = (self.url.authority(), other.addr());
        self.url.as_str().replacen(own, &format!("{own},{other}"), 1)
    }

    /// Opens a session, such as one that holds a lock.
    pub async fn connect(&self) -> Result<Client, Error> {
        open(&self.url, self.ca_file.as_deref()).await
    }

    /// Runs one or more statements in a new connection.
    pub async fn execute(&self, sql: &str) {
        let result = async { self.connect().await?.batch_execute(sql).await }.await;
        result.unwrap_or_else(|error| panic!("{}\nin SQL: {sql}", describe(&error)));
    }

    /// The rows of a query. Values are in PostgreSQL's text format, NULL is `None`.
    pub async fn query_strings(&self, sql: &str) -> Vec<Vec<Option<String>>> {
        let result = async { self.connect().await?.simple_query(sql).await }.await;
        let messages = result.unwrap_or_else(|error| panic!("{}\nin SQL: {sql}", describe(&error)));
        let rows = messages.iter().filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some(row),
            _ => None,
        });
        rows.map(|row| (0..row.len()).map(|column| row.get(column).map(str::to_owned)).collect()).collect()
    }

    /// The highest count of a user of quota that the audit accepts.
    pub async fn quota_count_max(&self, user: &str) -> u32 {
        let sql = format!(
            "SELECT greatest(rate_limit, kept_count) FROM rate_limit_store WHERE user_id = '{}'",
            user.replace('\'', "''")
        );
        let rows = self.query_strings(&sql).await;
        let count = rows.first().and_then(|row| row.first()?.as_deref()?.parse().ok());
        count.unwrap_or_else(|| panic!("{user} is not configured: {rows:?}"))
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let name = self.url.path().trim_start_matches('/');
        match &self.cleanup {
            Cleanup::Nothing => {}
            Cleanup::Reuse(idle) => {
                let mut idle = idle.lock();
                idle.push_back((name.to_owned(), Instant::now()));
            }
            Cleanup::Drop { server } => {
                let sql = format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)");
                let result = block_on(async { open(server, None).await?.batch_execute(&sql).await });
                if let Err(error) = result {
                    eprintln!("left behind on WEIR_TEST_POSTGRES: {sql}: {}", describe(&error));
                }
            }
        }
    }
}

/// Takes the database that was unused for longest, if that is long enough.
fn take_idle(idle: &IdleDatabases) -> Option<String> {
    let mut idle = idle.lock();
    let is_ready = idle.front().is_some_and(|(_, since)| since.elapsed() >= IDLE_BEFORE_REUSE);
    is_ready.then(|| idle.pop_front()).flatten().map(|(name, _)| name)
}

/// A name of lower case letters, digits and underscores, at most 63 bytes, which needs no quoting.
fn unique_name(hint: &str) -> String {
    let plain = hint.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '_' });
    format!("t_{}_{:016x}", plain.take(40).collect::<String>(), fastrand::u64(..))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::postgres::Server;

    #[tokio::test]
    async fn an_idle_database_is_emptied_disconnected_and_reused() {
        if crate::skip("postgres") {
            return;
        }
        let server = Server::shared();
        let create = |idle: &IdleDatabases| {
            Database::create(server.url.clone(), None, "again", Cleanup::Reuse(Arc::clone(idle)))
        };
        let idle = IdleDatabases::default();
        let first = create(&idle).await;
        first.execute("CREATE TABLE t (n int); CREATE SEQUENCE s; CREATE TYPE e AS ENUM ('a')").await;
        let (url, session) = (first.url().to_owned(), first.connect().await.unwrap());
        drop(first);
        assert_ne!(create(&idle).await.url(), url, "it was not unused for long enough");
        idle.lock()[0].1 -= IDLE_BEFORE_REUSE;
        let again = create(&idle).await;
        assert_eq!(again.url(), url);
        let left = "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace";
        assert!(again.query_strings(left).await.is_empty());
        assert!(session.batch_execute("SELECT 1").await.is_err(), "old sessions are closed");
    }

    #[test]
    fn names_are_unique_and_plain_whatever_the_hint() {
        let hint = "Tier: Ä/limits; DROP TABLE x".repeat(3);
        let name = unique_name(&hint);
        assert!(name.len() <= 63, "{name}");
        assert!(name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_'), "{name}");
        assert_ne!(name, unique_name(&hint));
    }
}
