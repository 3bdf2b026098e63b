//! Connects to the server that accepts writes, among the hosts of a URL. The others are its standbys, which may be promoted.
//!
//! A promoted server is on a higher timeline than the one it replaces. Connections to a server on a lower timeline than another
//! connection has seen are not opened and not used any longer: that server was replaced, and what it still commits is lost.

use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres::{Client, Config, SimpleQueryMessage, Socket};
use tokio_postgres_rustls::MakeRustlsConnect;
use weir_store::{Error, Result};

use crate::error::classify;
use crate::target::{PostgresTarget, address};
use crate::{ENGINE, is_refusal, tls};

/// How long the last known primary may take to answer before the other hosts are tried, too.
const HEAD_START: Duration = Duration::from_millis(250);

/// The name of a WAL file begins with the timeline in eight hexadecimal digits.
const TIMELINE: &str = "SELECT pg_walfile_name(pg_current_wal_lsn())";

/// What the connections of this process have found out about the hosts of a URL.
#[derive(Debug, Default)]
pub(crate) struct KnownPrimary {
    /// The position of the host that accepted writes last.
    host: AtomicUsize,
    /// The highest timeline that a connection has seen.
    timeline: AtomicU32,
}

impl KnownPrimary {
    /// Whether no connection has seen a higher timeline.
    pub(crate) fn is_latest(&self, timeline: u32) -> bool {
        timeline >= self.timeline.load(Ordering::Acquire)
    }
}

/// The task of a connection; it must be polled for the client to work.
pub(crate) type Driving =
    tokio_postgres::Connection<Socket, <MakeRustlsConnect as MakeTlsConnect<Socket>>::Stream>;

/// An open connection to the primary.
pub(crate) struct Link {
    pub(crate) client: Client,
    pub(crate) driving: Driving,
    /// The server's timeline. Zero if there is only one host.
    pub(crate) timeline: u32,
}

/// Connects to the host that accepts writes. The last known one has a head start, because the others are standbys, which would
/// log in a client in vain. It must not hold up the others for longer: a frozen machine accepts connections and never answers.
pub(crate) async fn connect(target: &PostgresTarget) -> Result<Link> {
    if let [only] = &target.hosts[..] {
        let (client, driving) = open(target, only).await?;
        return Ok(Link { client, driving, timeline: 0 });
    }
    let known = &target.known_primary;
    let preferred = known.host.load(Ordering::Relaxed);
    let attempt = |host: usize| {
        async move {
            let outcome = tokio::time::timeout(target.connect_timeout(), connect_to(target, host)).await;
            (host, outcome.unwrap_or_else(|elapsed| Err(Error::unavailable(ENGINE, elapsed))))
        }
        .boxed()
    };
    let mut failures = Vec::new();
    let mut attempts = FuturesUnordered::new();
    let mut first = attempt(preferred);
    match tokio::time::timeout(HEAD_START, &mut first).await {
        Ok((_, Ok(link))) => return Ok(link),
        Ok((host, Err(error))) => failures.push((address(&target.hosts[host]), error)),
        Err(_slow) => attempts.push(first),
    }
    attempts.extend((0..target.hosts.len()).filter(|host| *host != preferred).map(attempt));
    while let Some((host, outcome)) = attempts.next().await {
        match outcome {
            Ok(link) => {
                known.host.store(host, Ordering::Relaxed);
                return Ok(link);
            }
            Err(error) => failures.push((address(&target.hosts[host]), error)),
        }
    }
    let is_transient = failures.iter().any(|(_, error)| error.is_transient());
    let error = NoPrimary { failures };
    Err(if is_transient { Error::unavailable(ENGINE, error) } else { Error::failed(ENGINE, error) })
}

async fn connect_to(target: &PostgresTarget, host: usize) -> Result<Link> {
    let (client, mut driving) = open(target, &target.hosts[host]).await?;
    let timeline = tokio::select! {
        timeline = timeline(&client) => timeline?,
        ended = &mut driving => {
            ended.map_err(classify)?;
            return Err(Error::unavailable(ENGINE, "the connection was closed"));
        }
    };
    let latest = target.known_primary.timeline.fetch_max(timeline, Ordering::AcqRel);
    if timeline < latest {
        let reason = format!(
            "the server accepts writes but was replaced: it is on timeline {timeline}, and a server on timeline {latest} \
             has been promoted; stop the old one, or restart Weir if the database was restored"
        );
        return Err(Error::unavailable(ENGINE, reason));
    }
    Ok(Link { client, driving, timeline })
}

async fn open(target: &PostgresTarget, config: &Config) -> Result<(Client, Driving)> {
    config.connect(tls::connector(&target.trust)?).await.map_err(classify)
}

async fn timeline(client: &Client) -> Result<u32> {
    let messages = client.simple_query(TIMELINE).await.map_err(classify)?;
    let file = messages.iter().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => row.get(0),
        _ => None,
    });
    let timeline = file.and_then(|file| u32::from_str_radix(file.get(..8)?, 16).ok());
    timeline.ok_or_else(|| Error::failed(ENGINE, format!("not the name of a WAL file: {file:?}")))
}

/// Why none of several hosts can be used.
#[derive(Debug)]
pub(crate) struct NoPrimary {
    failures: Vec<(String, Error)>,
}

impl NoPrimary {
    /// Whether every host has refused permanently. One that is starting or unreachable may be the primary.
    pub(crate) fn is_refusal(&self) -> bool {
        self.failures.iter().all(|(_, error)| is_refusal(error))
    }
}

impl fmt::Display for NoPrimary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no host accepts writes")?;
        for (host, error) in &self.failures {
            write!(f, "; {host}: ")?;
            match error.cause() {
                Some(cause) => write_causes(cause, f)?,
                None => write!(f, "{error}")?,
            }
        }
        Ok(())
    }
}

fn write_causes(error: &(dyn std::error::Error + 'static), f: &mut fmt::Formatter<'_>) -> fmt::Result {
    write!(f, "{error}")?;
    error.source().map_or(Ok(()), |cause| {
        f.write_str(": ")?;
        write_causes(cause, f)
    })
}

impl std::error::Error for NoPrimary {}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use weir_testkit::postgres::{Database, Server};

    use super::*;

    fn port_of(listener: &TcpListener) -> u16 {
        listener.local_addr().expect("an address").port()
    }

    /// The URL of a database with other hosts before its own.
    fn behind(hosts: &str, database: &Database) -> PostgresTarget {
        let (login, rest) = database.url().split_once('@').expect("a login");
        format!("{login}@{hosts},{rest}").parse().expect("a URL")
    }

    async fn failure(target: &PostgresTarget) -> Error {
        connect(target).await.err().expect("no host can be used")
    }

    #[tokio::test]
    async fn hosts_that_are_down_or_never_answer_do_not_hold_up_the_primary() {
        if weir_testkit::skip("postgres") {
            return;
        }
        let database = Server::shared().database("hosts").await;
        let silent = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let target = behind(&format!("127.0.0.1:{},127.0.0.1:1", port_of(&silent)), &database);
        let link = connect(&target).await.expect("the third host is the primary");
        assert!(link.timeline >= 1);
        assert_eq!(target.known_primary.host.load(Ordering::Relaxed), 2, "it is tried first from now on");
    }

    #[tokio::test]
    async fn a_server_behind_the_known_timeline_is_refused() {
        if weir_testkit::skip("postgres") {
            return;
        }
        let database = Server::shared().database("timeline").await;
        let target = behind("127.0.0.1:1", &database);
        let link = connect(&target).await.expect("a connection");
        target.known_primary.timeline.store(link.timeline + 1, Ordering::Release);
        assert!(!target.known_primary.is_latest(link.timeline));
        let error = failure(&target).await;
        assert!(error.is_transient(), "{error:?}");
        let sentence = error.with_causes().to_string();
        assert!(sentence.contains("127.0.0.1:1: ") && sentence.contains("was replaced"), "{sentence}");
    }

    #[tokio::test]
    async fn a_start_does_not_wait_for_hosts_that_all_refuse_but_for_one_that_may_be_starting() {
        if weir_testkit::skip("postgres") {
            return;
        }
        let server = Server::shared();
        let refusing =
            format!("postgres://nobody:wrong@{0},{0}/postgres", server.addr()).parse().expect("a URL");
        assert!(is_refusal(&failure(&refusing).await));
        let starting = format!("postgres://nobody:wrong@{},127.0.0.1:1/postgres", server.addr());
        let error = failure(&starting.parse().expect("a URL")).await;
        assert!(error.is_transient() && !is_refusal(&error), "{error:?}");
    }
}
