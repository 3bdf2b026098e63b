//! One fresh database, and plain access to its tables for tests that look behind the product.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio_postgres::{Client, Error, SimpleQueryMessage};
use url::Url;

use super::connection::{block_on, describe, open};

/// Databases whose tests are over, and since when.
///
/// A new one is a thousand new files, which takes longer than most tests; one that is emptied is a few dozen.
pub(super) type Spare = Arc<Mutex<VecDeque<(String, Instant)>>>;

/// How long a database rests before another test gets it: what its test has left running ends with that test's runtime, a
/// moment later.
const REST: Duration = Duration::from_secs(3);

const EMPTY: &str =
    "DROP SCHEMA public CASCADE; CREATE SCHEMA public; GRANT USAGE ON SCHEMA public TO public";

/// A database of its own for one test. It goes with its server, or to another test.
pub struct Database {
    url: Url,
    ca_file: Option<PathBuf>,
    after: After,
}

/// What becomes of a database after its test.
pub(super) enum After {
    /// It goes with its server.
    Nothing,
    Spare(Spare),
    /// The server is not ours and would keep it for ever.
    Drop {
        server: Url,
    },
}

impl Database {
    pub(super) async fn create(server: Url, ca_file: Option<PathBuf>, hint: &str, after: After) -> Self {
        let administration = Self { url: server.clone(), ca_file: ca_file.clone(), after: After::Nothing };
        let named = |name: &str, after| {
            let mut url = server;
            url.set_path(name);
            Self { url, ca_file, after }
        };
        if let After::Spare(spare) = &after
            && let Some(name) = rested(spare)
        {
            let sessions = format!(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = '{name}'"
            );
            administration.execute(&sessions).await;
            let database = named(&name, after);
            database.execute(EMPTY).await;
            return database;
        }
        let name = unique_name(hint);
        administration.execute(&format!("CREATE DATABASE {name}")).await;
        named(&name, after)
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

    /// A session of one's own, e.g. to hold a lock.
    pub async fn connect(&self) -> Result<Client, Error> {
        open(&self.url, self.ca_file.as_deref()).await
    }

    /// Runs one or more statements in a connection of their own.
    pub async fn execute(&self, sql: &str) {
        let result = async { self.connect().await?.batch_execute(sql).await }.await;
        result.unwrap_or_else(|error| panic!("{}\nin SQL: {sql}", describe(&error)));
    }

    /// The rows of a query, each value as PostgreSQL's text, NULL as None.
    pub async fn query_strings(&self, sql: &str) -> Vec<Vec<Option<String>>> {
        let result = async { self.connect().await?.simple_query(sql).await }.await;
        let messages = result.unwrap_or_else(|error| panic!("{}\nin SQL: {sql}", describe(&error)));
        let rows = messages.iter().filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some(row),
            _ => None,
        });
        rows.map(|row| (0..row.len()).map(|column| row.get(column).map(str::to_owned)).collect()).collect()
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let name = self.url.path().trim_start_matches('/');
        match &self.after {
            After::Nothing => {}
            After::Spare(spare) => {
                let mut spare = spare.lock();
                spare.push_back((name.to_owned(), Instant::now()));
            }
            After::Drop { server } => {
                let sql = format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)");
                let result = block_on(async { open(server, None).await?.batch_execute(&sql).await });
                if let Err(error) = result {
                    eprintln!("left behind on WEIR_TEST_POSTGRES: {sql}: {}", describe(&error));
                }
            }
        }
    }
}

/// The database that has rested for longest, if that is long enough.
fn rested(spare: &Spare) -> Option<String> {
    let mut spare = spare.lock();
    let is_rested = spare.front().is_some_and(|(_, since)| since.elapsed() >= REST);
    is_rested.then(|| spare.pop_front()).flatten().map(|(name, _)| name)
}

/// Lower case, letters, digits and underscores, at most 63 bytes: needs no quotes anywhere.
fn unique_name(hint: &str) -> String {
    let plain = hint.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '_' });
    format!("t_{}_{:016x}", plain.take(40).collect::<String>(), fastrand::u64(..))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::postgres::Server;

    #[tokio::test]
    async fn a_database_that_has_rested_is_used_again_empty_and_alone() {
        if crate::skip("postgres") {
            return;
        }
        let server = Server::shared();
        let create = |spare: &Spare| {
            Database::create(server.url.clone(), None, "again", After::Spare(Arc::clone(spare)))
        };
        let spare = Spare::default();
        let first = create(&spare).await;
        first.execute("CREATE TABLE t (n int); CREATE SEQUENCE s; CREATE TYPE e AS ENUM ('a')").await;
        let (url, session) = (first.url().to_owned(), first.connect().await.unwrap());
        drop(first);
        assert_ne!(create(&spare).await.url(), url, "it has not rested yet");
        spare.lock()[0].1 -= REST;
        let again = create(&spare).await;
        assert_eq!(again.url(), url);
        let left = "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace";
        assert!(again.query_strings(left).await.is_empty());
        assert!(session.batch_execute("SELECT 1").await.is_err(), "whoever was there is gone");
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
