//! Parses `redis://` URLs: one server or a cluster, plain or TLS.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisConnectionInfo};
use url::Url;

/// The default timeout of a call. Short, so that Postgres can still decide well within the API's timeout.
const CALL_TIMEOUT: Duration = Duration::from_millis(250);

/// Where Redis is and how to reach it.
#[derive(Clone)]
pub struct RedisTarget {
    /// The one server, or the servers of a cluster that are asked for its topology first.
    pub(crate) servers: Vec<Address>,
    pub(crate) is_cluster: bool,
    is_tls: bool,
    username: Option<String>,
    password: Option<String>,
    database: i64,
    /// PEM certificates that are trusted instead of the system's.
    root_certificates: Option<Arc<Vec<u8>>>,
    pub(crate) call_timeout: Duration,
    pub(crate) purpose: Purpose,
}

/// What a Redis is used for. Decides what the log says when it is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Postgres decides without it.
    Cache,
    /// Nothing else may decide sales.
    Sales,
}

impl Purpose {
    /// The prefix of its metrics.
    pub(crate) const fn metric_name(self) -> &'static str {
        match self {
            Self::Cache => "redis",
            Self::Sales => "redis_sale",
        }
    }

    pub(crate) const fn loss_message(self) -> &'static str {
        match self {
            Self::Cache => "REDIS DOWN — Falling back to Postgres",
            Self::Sales => "REDIS DOWN — No sale is decided until it is back",
        }
    }

    pub(crate) const fn recovery_message(self) -> &'static str {
        match self {
            Self::Cache => "Redis is back",
            Self::Sales => "Redis decides sales again",
        }
    }
}

/// A server's host and port.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Address {
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// Why a URL was refused. Never contains the URL, which may hold a password.
#[derive(Debug, thiserror::Error)]
pub enum RedisTargetError {
    /// Not a URL of one of the supported forms.
    #[error(
        "is not redis://[user:password@]host[:port][/database], rediss://… for TLS, or redis+cluster://a,b,c"
    )]
    Shape,
    /// An unknown query parameter.
    #[error("has the parameter {0}; allowed is sslrootcert, a file of trusted certificates, with rediss://")]
    Parameter(String),
    /// The file of trusted certificates cannot be read.
    #[error("names the certificates {path}, which cannot be read: {source}", path = path.display())]
    Certificates {
        /// The path in `sslrootcert`.
        path: PathBuf,
        /// The error of reading it.
        #[source]
        source: std::io::Error,
    },
}

impl FromStr for RedisTarget {
    type Err = RedisTargetError;

    fn from_str(text: &str) -> Result<Self, RedisTargetError> {
        let (scheme, rest) = text.split_once("://").ok_or(RedisTargetError::Shape)?;
        let (is_tls, is_cluster) = match scheme {
            "redis" => (false, false),
            "rediss" => (true, false),
            "redis+cluster" => (false, true),
            "rediss+cluster" => (true, true),
            _ => return Err(RedisTargetError::Shape),
        };
        // The first server carries the credentials and the rest of the URL; the others are only host and port.
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, tail) = rest.split_at(end);
        let mut authorities = authority.split(',');
        let first = authorities.next().ok_or(RedisTargetError::Shape)?;
        let url =
            Url::parse(&format!("redis://{first}{tail}")).map_err(|_invalid| RedisTargetError::Shape)?;
        let mut servers = vec![address(&url)?];
        for other in authorities {
            let url = Url::parse(&format!("redis://{other}")).map_err(|_invalid| RedisTargetError::Shape)?;
            servers.push(address(&url)?);
        }
        let database = match url.path().trim_start_matches('/') {
            "" => 0,
            number => number.parse().map_err(|_invalid| RedisTargetError::Shape)?,
        };
        if (servers.len() > 1 && !is_cluster) || (is_cluster && database != 0) || database < 0 {
            return Err(RedisTargetError::Shape);
        }
        Ok(Self {
            servers,
            is_cluster,
            is_tls,
            username: Some(decode(url.username())?).filter(|name| !name.is_empty()),
            password: url.password().map(decode).transpose()?,
            database,
            root_certificates: root_certificates(&url, is_tls)?,
            call_timeout: CALL_TIMEOUT,
            purpose: Purpose::Cache,
        })
    }
}

impl RedisTarget {
    /// Sets the timeout of a call.
    #[must_use]
    pub const fn with_call_timeout(mut self, call_timeout: Duration) -> Self {
        self.call_timeout = call_timeout;
        self
    }

    /// Uses this Redis for sales, which have no fallback: sets the timeout of a call, and what the log says of a loss.
    #[must_use]
    pub const fn for_sales(mut self, call_timeout: Duration) -> Self {
        self.call_timeout = call_timeout;
        self.purpose = Purpose::Sales;
        self
    }

    /// Returns the hosts and ports without credentials, for messages.
    #[must_use]
    pub fn address(&self) -> String {
        self.servers.iter().map(Address::to_string).collect::<Vec<_>>().join(",")
    }

    /// Creates a client of one server.
    pub(crate) fn client(&self, server: &Address) -> redis::RedisResult<redis::Client> {
        let Address { host, port } = server.clone();
        let mut login = RedisConnectionInfo::default().set_db(self.database);
        if let Some(username) = &self.username {
            login = login.set_username(username);
        }
        if let Some(password) = &self.password {
            login = login.set_password(password);
        }
        if !self.is_tls {
            return redis::Client::open(info(ConnectionAddr::Tcp(host, port), login)?);
        }
        // An error means that a provider is installed already. Weir uses ring everywhere.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let address = ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None };
        let certificates = redis::TlsCertificates {
            client_tls: None,
            root_cert: self.root_certificates.as_ref().map(|pem| pem.to_vec()),
        };
        redis::Client::build_with_tls(info(address, login)?, certificates)
    }
}

fn info(address: ConnectionAddr, login: RedisConnectionInfo) -> redis::RedisResult<ConnectionInfo> {
    Ok(address.into_connection_info()?.set_redis_settings(login))
}

impl fmt::Debug for RedisTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RedisTarget").field(&self.address()).finish()
    }
}

fn address(url: &Url) -> Result<Address, RedisTargetError> {
    let host = url.host_str().filter(|host| !host.is_empty()).ok_or(RedisTargetError::Shape)?;
    let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
    Ok(Address { host, port: url.port().unwrap_or(6379) })
}

fn root_certificates(url: &Url, is_tls: bool) -> Result<Option<Arc<Vec<u8>>>, RedisTargetError> {
    let mut certificates = None;
    for (name, value) in url.query_pairs() {
        if name != "sslrootcert" || !is_tls {
            return Err(RedisTargetError::Parameter(name.into_owned()));
        }
        let path = PathBuf::from(value.as_ref());
        let pem = std::fs::read(&path).map_err(|source| RedisTargetError::Certificates { path, source })?;
        certificates = Some(Arc::new(pem));
    }
    Ok(certificates)
}

fn decode(text: &str) -> Result<String, RedisTargetError> {
    let decoded = percent_decode(text.as_bytes()).ok_or(RedisTargetError::Shape)?;
    String::from_utf8(decoded).map_err(|_invalid| RedisTargetError::Shape)
}

/// Decodes `%41` to `A`. The `url` crate leaves credentials encoded.
fn percent_decode(text: &[u8]) -> Option<Vec<u8>> {
    let mut decoded = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [first, others @ ..] = rest {
        rest = others;
        if *first != b'%' {
            decoded.push(*first);
            continue;
        }
        let (digits, others) = rest.split_at_checked(2)?;
        decoded.push(u8::from_str_radix(str::from_utf8(digits).ok()?, 16).ok()?);
        rest = others;
    }
    Some(decoded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_of_a_server_and_of_a_cluster_are_parsed() {
        let one: RedisTarget = "redis://user:p%40ss@cache:7000/3".parse().unwrap();
        assert_eq!((one.address().as_str(), one.database, one.is_cluster), ("cache:7000", 3, false));
        assert_eq!((one.username.as_deref(), one.password.as_deref()), (Some("user"), Some("p@ss")));
        let bare: RedisTarget = "redis://localhost".parse().unwrap();
        assert_eq!((bare.address().as_str(), bare.username, bare.password), ("localhost:6379", None, None));
        let cluster: RedisTarget = "redis+cluster://:secret@a:1,b:2,[::1]:3".parse().unwrap();
        assert_eq!(cluster.address(), "a:1,b:2,[::1]:3");
        assert!(cluster.is_cluster && !format!("{cluster:?}").contains("secret"));
        assert!("rediss+cluster://a".parse::<RedisTarget>().unwrap().is_tls);
    }

    #[test]
    fn other_urls_are_refused() {
        for bad in [
            "",
            "redis",
            "redis://",
            "http://a",
            "redis://a,b",
            "redis://a/x",
            "redis://a/-1",
            "redis+cluster://a/1",
            "redis://a?tls=yes",
            "redis://a?sslrootcert=x",
            "rediss://a?sslrootcert=/nonexistent/ca.pem",
            "redis+cluster://a,,b",
        ] {
            assert!(bad.parse::<RedisTarget>().is_err(), "{bad}");
        }
    }
}
