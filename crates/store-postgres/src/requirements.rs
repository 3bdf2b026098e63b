//! What Weir requires of a database: text in UTF-8, and commits that survive a crash.
//!
//! Checked once, when the engine is opened. Sessions set `synchronous_commit` themselves, because a role or a database may have
//! another default than the server.

use tokio_postgres::Client;
use weir_store::{Error, Result};

use crate::ENGINE;
use crate::error::classify;
use crate::target::PostgresTarget;

/// The settings of every session. A response means that the commit is on disk; `remote_apply` promises more and is left as it is.
pub(crate) const SESSION_SETTINGS: &str = "
    SET client_encoding = 'UTF8';
    SELECT set_config('synchronous_commit', 'on', false)
     WHERE current_setting('synchronous_commit') <> 'remote_apply';";

/// `true` because a server that only speaks Postgres's protocol may not know every setting.
const READ: &str = "
    SELECT current_database()::text, current_setting('server_encoding'), current_setting('client_encoding'),
           coalesce(current_setting('synchronous_commit', true), 'unknown'),
           coalesce(current_setting('fsync', true), 'unknown'),
           coalesce(current_setting('full_page_writes', true), 'unknown')";

const SYNCHRONOUS: &str = "synchronous_commit";

/// The only encoding that holds every name and message.
const ENCODING: &str = "UTF8";

/// Why a database cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsuitable {
    /// It cannot hold every text.
    #[error(
        "the encoding of the database {database:?} is {encoding} and must be UTF8; make another one with CREATE \
         DATABASE … ENCODING 'UTF8' TEMPLATE template0"
    )]
    Encoding {
        /// The name of the database.
        database: String,
        /// The encoding of the database or the session.
        encoding: String,
    },
    /// Its schema is for other versions of Weir.
    #[error("{0}")]
    Schema(String),
    /// It may lose commits.
    #[error(
        "the server may lose what it has committed when it crashes, because {settings}; turn that on, or accept the \
         loss with postgres.allow_unsafe_durability = true (WEIR_POSTGRES_ALLOW_UNSAFE_DURABILITY)"
    )]
    Durability {
        /// The unsafe settings, as `name is value`.
        settings: String,
    },
}

/// Returns why the database must not be used, if that is why an engine could not be opened.
#[must_use]
pub fn unsuitable(error: &Error) -> Option<&Unsuitable> {
    error.cause()?.downcast_ref()
}

/// Checks, with the settings of a session, that the database can be used.
pub(crate) async fn check(client: &Client, target: &PostgresTarget) -> Result<()> {
    client.batch_execute(SESSION_SETTINGS).await.map_err(classify)?;
    let row = client.query_one(READ, &[]).await.map_err(classify)?;
    let text = |column: usize| row.try_get::<_, String>(column).map_err(classify);
    let (database, encodings) = (text(0)?, [text(1)?, text(2)?]);
    check_encoding(database, encodings).map_err(|reason| Error::failed(ENGINE, reason))?;
    let Err(reason) = check_durability(&text(3)?, &text(4)?, &text(5)?) else { return Ok(()) };
    if !target.allow_unsafe_durability {
        return Err(Error::failed(ENGINE, reason));
    }
    tracing::warn!(
        address = %target.address(),
        "{reason}: this was accepted by postgres.allow_unsafe_durability"
    );
    Ok(())
}

fn check_encoding(database: String, encodings: [String; 2]) -> Result<(), Unsuitable> {
    match encodings.into_iter().find(|encoding| encoding != ENCODING) {
        Some(encoding) => Err(Unsuitable::Encoding { database, encoding }),
        None => Ok(()),
    }
}

/// Without `full_page_writes` a page that was half written at a power failure is not repaired.
fn check_durability(synchronous_commit: &str, fsync: &str, full_page_writes: &str) -> Result<(), Unsuitable> {
    let is_safe = |name: &str, value: &str| value == "on" || (name, value) == (SYNCHRONOUS, "remote_apply");
    let settings =
        [(SYNCHRONOUS, synchronous_commit), ("fsync", fsync), ("full_page_writes", full_page_writes)];
    let unsafe_ones = settings.into_iter().filter(|(name, value)| !is_safe(name, value));
    let settings: Vec<String> = unsafe_ones.map(|(name, value)| format!("{name} is {value}")).collect();
    if settings.is_empty() {
        Ok(())
    } else {
        Err(Unsuitable::Durability { settings: settings.join(" and ") })
    }
}

#[cfg(test)]
mod tests {
    use weir_testkit::postgres::{Database, Options, Server};

    use super::*;
    use crate::Postgres;
    use crate::connection::Connection;

    fn target(database: &Database) -> PostgresTarget {
        database.url().parse().expect("a Postgres URL")
    }

    fn name(database: &Database) -> String {
        database.url().rsplit('/').next().expect("a name").to_owned()
    }

    async fn setting(database: &Database, name: &str) -> String {
        let connection = Connection::open(&target(database)).await.expect("a session");
        let row = connection.client().query_one("SELECT current_setting($1)", &[&name]).await.expect("a row");
        row.get(0)
    }

    #[test]
    fn only_settings_that_survive_a_crash_are_safe() {
        assert_eq!(check_durability("on", "on", "on"), Ok(()));
        assert_eq!(check_durability("remote_apply", "on", "on"), Ok(()));
        for (commit, fsync, pages, named) in [
            ("off", "on", "on", "synchronous_commit is off"),
            ("local", "on", "on", "synchronous_commit is local"),
            ("on", "off", "on", "fsync is off"),
            ("on", "on", "off", "full_page_writes is off"),
            ("on", "unknown", "remote_apply", "fsync is unknown and full_page_writes is remote_apply"),
        ] {
            let sentence = check_durability(commit, fsync, pages).expect_err(named).to_string();
            assert!(sentence.contains(named), "{sentence}");
        }
    }

    #[tokio::test]
    async fn every_session_waits_for_its_commits_whatever_the_default() {
        if weir_testkit::skip("postgres") {
            return;
        }
        let database = Server::shared().database("commits").await;
        let _engine = Postgres::open(target(&database), 1).await.expect("it opens");
        let name = name(&database);
        for (default, expected) in
            [("off", "on"), ("local", "on"), ("remote_write", "on"), ("remote_apply", "remote_apply")]
        {
            database.execute(&format!("ALTER DATABASE {name} SET synchronous_commit = {default}")).await;
            assert_eq!(setting(&database, SYNCHRONOUS).await, expected, "{default}");
        }
        database.execute(&format!("ALTER DATABASE {name} SET client_encoding = 'LATIN1'")).await;
        assert_eq!(setting(&database, "client_encoding").await, ENCODING);
        // Another test may reuse this database.
        database.execute(&format!("ALTER DATABASE {name} RESET ALL")).await;
    }

    #[tokio::test]
    async fn a_database_in_another_encoding_is_not_touched() {
        if weir_testkit::skip("postgres") {
            return;
        }
        let server = Server::shared().database("encoding").await;
        for encoding in ["LATIN1", "SQL_ASCII"] {
            let other = format!("{}_{}", name(&server), encoding.to_lowercase());
            let create =
                format!("CREATE DATABASE {other} TEMPLATE template0 LOCALE 'C' ENCODING '{encoding}'");
            server.execute(&create).await;
            let target: PostgresTarget = server.url().replace(&name(&server), &other).parse().expect("a URL");
            let error = Postgres::open(target.clone().allowing_unsafe_durability(true), 1)
                .await
                .expect_err("it must be refused");
            let expected = Unsuitable::Encoding { database: other.clone(), encoding: encoding.to_owned() };
            assert_eq!(unsuitable(&error), Some(&expected));
            assert!(!error.is_transient(), "waiting does not help");
            server.execute(&format!("DROP DATABASE {other} WITH (FORCE)")).await;
        }
    }

    #[tokio::test]
    async fn a_server_that_may_lose_commits_is_used_only_when_that_is_accepted() {
        if weir_testkit::skip("postgres") {
            return;
        }
        for name in ["fsync", "full_page_writes"] {
            let settings = vec![(name.to_owned(), "off".to_owned())];
            let server = Server::with_options(&Options { settings, ..Options::default() });
            let database = server.database("unsafe").await;
            let error = Postgres::open(target(&database), 1).await.expect_err("it must be refused");
            let expected = Unsuitable::Durability { settings: format!("{name} is off") };
            assert_eq!(unsuitable(&error), Some(&expected));
            let accepted = target(&database).allowing_unsafe_durability(true);
            Postgres::open(accepted, 1).await.expect("it was accepted");
        }
    }
}
