//! Parses `postgres://` URLs with libpq's parameters, including `sslmode`.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use tokio_postgres::config::SslMode;
use url::Url;

/// The default timeout of a call, well within the API's.
const CALL_TIMEOUT: Duration = Duration::from_millis(1_500);

/// Where the database is and how to reach it.
#[derive(Clone, Debug)]
pub struct PostgresTarget {
    pub(crate) config: tokio_postgres::Config,
    pub(crate) trust: Trust,
    /// The timeout of a call to the database, however many statements it has. Also of the wait for a free connection, and of
    /// connecting.
    pub(crate) call_timeout: Duration,
    /// Whether to use a server that may lose commits.
    pub(crate) allow_unsafe_durability: bool,
}

/// How far the server's certificate is checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Trust {
    /// `sslmode` up to `require`: at most encryption, no check of the certificate, as in libpq.
    Anyone,
    /// `verify-ca`: the certificate is signed by a trusted authority.
    Authority(Option<PathBuf>),
    /// `verify-full`: and names this host.
    Host(Option<PathBuf>),
}

/// Why a URL was refused. Never contains the URL, which holds a password.
#[derive(Debug, thiserror::Error)]
pub enum PostgresTargetError {
    /// Not a Postgres URL.
    #[error("is not a postgres://user:password@host:port/database URL")]
    Shape,
    /// An unknown `sslmode`.
    #[error("has sslmode={0}; allowed are disable, prefer, require, verify-ca and verify-full")]
    SslMode(String),
    /// Refused by the driver.
    #[error("is not understood: {0}")]
    Driver(#[from] tokio_postgres::Error),
}

impl FromStr for PostgresTarget {
    type Err = PostgresTargetError;

    fn from_str(text: &str) -> Result<Self, PostgresTargetError> {
        let mut url = Url::parse(text).map_err(|_invalid| PostgresTargetError::Shape)?;
        if !matches!(url.scheme(), "postgres" | "postgresql") {
            return Err(PostgresTargetError::Shape);
        }
        let (mut mode, mut root, mut rest) = (None, None, Vec::new());
        for (name, value) in url.query_pairs() {
            match name.as_ref() {
                "sslmode" => mode = Some(value.into_owned()),
                "sslrootcert" if value != "system" => root = Some(PathBuf::from(value.as_ref())),
                "sslrootcert" => {}
                _ => rest.push((name.into_owned(), value.into_owned())),
            }
        }
        // The driver does not know libpq's TLS parameters, so they are removed before it parses the URL.
        url.set_query(None);
        if !rest.is_empty() {
            url.query_pairs_mut().extend_pairs(rest);
        }
        let mut config: tokio_postgres::Config = url.as_str().parse()?;
        let (ssl_mode, trust) = trust(mode.as_deref(), root)?;
        config.ssl_mode(ssl_mode);
        config.tcp_user_timeout(Duration::from_secs(5)).keepalives_idle(Duration::from_secs(15));
        if config.get_application_name().is_none() {
            config.application_name("weir");
        }
        let target = Self { config, trust, call_timeout: CALL_TIMEOUT, allow_unsafe_durability: false };
        Ok(target.with_call_timeout(CALL_TIMEOUT))
    }
}

impl PostgresTarget {
    /// Sets the timeout of a call; connecting has two thirds of it.
    #[must_use]
    pub fn with_call_timeout(mut self, call_timeout: Duration) -> Self {
        self.config.connect_timeout(call_timeout * 2 / 3);
        self.call_timeout = call_timeout;
        self
    }

    /// Returns after how long without a reply the listener reconnects: by default as long as its last reply counts as current.
    pub(crate) fn listen_timeout(&self) -> Duration {
        self.call_timeout * 3 / 5
    }

    /// Allows or refuses a server that may lose commits (`fsync = off`).
    #[must_use]
    pub fn allowing_unsafe_durability(mut self, is_allowed: bool) -> Self {
        self.allow_unsafe_durability = is_allowed;
        self
    }

    /// Returns the host and port without credentials, for messages.
    #[must_use]
    pub fn address(&self) -> String {
        let host = match self.config.get_hosts().first() {
            Some(tokio_postgres::config::Host::Tcp(host)) => host.clone(),
            Some(tokio_postgres::config::Host::Unix(path)) => path.display().to_string(),
            None => "localhost".to_owned(),
        };
        format!("{host}:{}", self.config.get_ports().first().copied().unwrap_or(5432))
    }
}

/// Applies libpq's rules: `require` with a root certificate means `verify-ca`.
fn trust(mode: Option<&str>, root: Option<PathBuf>) -> Result<(SslMode, Trust), PostgresTargetError> {
    Ok(match (mode, root) {
        (Some("disable"), _) => (SslMode::Disable, Trust::Anyone),
        (None | Some("allow" | "prefer"), _) => (SslMode::Prefer, Trust::Anyone),
        (Some("require"), None) => (SslMode::Require, Trust::Anyone),
        (Some("require" | "verify-ca"), root) => (SslMode::Require, Trust::Authority(root)),
        (Some("verify-full"), root) => (SslMode::Require, Trust::Host(root)),
        (Some(other), _) => return Err(PostgresTargetError::SslMode(other.to_owned())),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> PostgresTarget {
        text.parse().unwrap()
    }

    #[test]
    fn sslmode_means_what_it_means_to_libpq() {
        let base = "postgres://u:p@h:1/d";
        assert_eq!(parse(base).config.get_ssl_mode(), SslMode::Prefer);
        assert_eq!(parse(&format!("{base}?sslmode=disable")).config.get_ssl_mode(), SslMode::Disable);
        assert_eq!(parse(&format!("{base}?sslmode=require")).trust, Trust::Anyone);
        let root = Some(PathBuf::from("/ca.pem"));
        let with_root = format!("{base}?sslrootcert=%2Fca.pem&sslmode=");
        assert_eq!(parse(&format!("{with_root}require")).trust, Trust::Authority(root.clone()));
        assert_eq!(parse(&format!("{with_root}verify-ca")).trust, Trust::Authority(root.clone()));
        assert_eq!(parse(&format!("{with_root}verify-full")).trust, Trust::Host(root));
    }

    #[test]
    fn other_parameters_reach_the_driver() {
        let target = parse("postgresql://u@h/d?sslmode=require&application_name=billing");
        assert_eq!(target.config.get_application_name(), Some("billing"));
        assert_eq!(target.address(), "h:5432");
    }

    #[test]
    fn a_refusal_never_repeats_the_password() {
        for bad in ["mysql://u:secret@h/d", "not a url secret", "postgres://u:secret@h/d?sslmode=maybe"] {
            assert!(!bad.parse::<PostgresTarget>().unwrap_err().to_string().contains("secret"), "{bad}");
        }
    }
}
