//! One fresh database, and plain access to its tables for tests that look behind the product.

use std::net::SocketAddr;
use std::path::PathBuf;

use tokio_postgres::{Client, Error, SimpleQueryMessage};
use url::Url;

use super::connection::{block_on, describe, open};

/// A database of its own for one test. It goes with its server.
pub struct Database {
    url: Url,
    ca_file: Option<PathBuf>,
    /// Set when the server is not ours and so would keep the database for ever.
    drop_from: Option<Url>,
}

impl Database {
    pub(super) async fn create(server: Url, ca_file: Option<PathBuf>, hint: &str, drop_after: bool) -> Self {
        let name = unique_name(hint);
        let mut url = server.clone();
        url.set_path(&name);
        let administration = Self { url: server.clone(), ca_file: ca_file.clone(), drop_from: None };
        administration.execute(&format!("CREATE DATABASE {name}")).await;
        Self { url, ca_file, drop_from: drop_after.then_some(server) }
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
        let Some(server) = self.drop_from.take() else {
            return;
        };
        let sql = format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", self.url.path().trim_start_matches('/'));
        let result = block_on(async { open(&server, None).await?.batch_execute(&sql).await });
        if let Err(error) = result {
            eprintln!("left behind on WEIR_TEST_POSTGRES: {sql}: {}", describe(&error));
        }
    }
}

/// Lower case, letters, digits and underscores, at most 63 bytes: needs no quotes anywhere.
fn unique_name(hint: &str) -> String {
    let plain = hint.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '_' });
    format!("t_{}_{:016x}", plain.take(40).collect::<String>(), fastrand::u64(..))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_plain_whatever_the_hint() {
        let hint = "Tier: Ä/limits; DROP TABLE x".repeat(3);
        let name = unique_name(&hint);
        assert!(name.len() <= 63, "{name}");
        assert!(name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_'), "{name}");
        assert_ne!(name, unique_name(&hint));
    }
}
