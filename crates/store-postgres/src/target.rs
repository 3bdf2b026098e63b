//! Parses `postgres://` URLs with libpq's parameters: several hosts, and `sslmode`.

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use tokio_postgres::config::{Host, SslMode, TargetSessionAttrs};
use url::{Url, form_urlencoded};

use crate::primary::KnownPrimary;

/// The default timeout of a call, well within the API's.
const CALL_TIMEOUT: Duration = Duration::from_millis(1_500);

/// Where the database is and how to reach it.
#[derive(Clone, Debug)]
pub struct PostgresTarget {
    /// The servers in the order of the URL. One of them accepts writes.
    pub(crate) hosts: Vec<tokio_postgres::Config>,
    pub(crate) trust: Trust,
    /// The timeout of a call to the database, however many statements it has. Also of the wait for a free connection, and of
    /// connecting.
    pub(crate) call_timeout: Duration,
    /// Whether to use a server that may lose commits.
    pub(crate) allow_unsafe_durability: bool,
    /// Shared by clones.
    pub(crate) known_primary: Arc<KnownPrimary>,
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
    /// Another `target_session_attrs` than Weir needs.
    #[error("has target_session_attrs={0}; Weir writes, so it must be read-write, which is the default")]
    SessionAttributes(String),
    /// Hosts that do not fit together.
    #[error("names its hosts twice, or not as many ports as hosts, or hostaddr with several hosts")]
    Hosts,
    /// Refused by the driver.
    #[error("is not understood: {0}")]
    Driver(#[from] tokio_postgres::Error),
}

impl FromStr for PostgresTarget {
    type Err = PostgresTargetError;

    fn from_str(text: &str) -> Result<Self, PostgresTargetError> {
        let (scheme, rest) = text.split_once("://").ok_or(PostgresTargetError::Shape)?;
        if !matches!(scheme, "postgres" | "postgresql") {
            return Err(PostgresTargetError::Shape);
        }
        let (address, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, database) = address.split_once('/').unwrap_or((address, ""));
        let (login, hosts) = authority.rsplit_once('@').unwrap_or(("", authority));
        let parameters = Parameters::read(query)?;
        let hosts = parameters.hosts(hosts)?;
        let mut configs = Vec::with_capacity(hosts.len());
        for host in &hosts {
            configs.push(config(login, host, database, &parameters.others)?);
        }
        let has_addresses = |config: &tokio_postgres::Config| !config.get_hostaddrs().is_empty();
        if configs.len() > 1 && configs.iter().any(has_addresses) {
            return Err(PostgresTargetError::Hosts);
        }
        let (ssl_mode, trust) = trust(parameters.ssl_mode.as_deref(), parameters.root_certificate)?;
        for config in &mut configs {
            config.ssl_mode(ssl_mode);
        }
        let target = Self {
            hosts: configs,
            trust,
            call_timeout: CALL_TIMEOUT,
            allow_unsafe_durability: false,
            known_primary: Arc::default(),
        };
        Ok(target.with_call_timeout(CALL_TIMEOUT))
    }
}

/// Parses the URL of one host. `Url` encodes what operators leave plain in passwords, and the driver decodes it.
fn config(
    login: &str,
    host: &str,
    database: &str,
    parameters: &[&str],
) -> Result<tokio_postgres::Config, PostgresTargetError> {
    let at = if login.is_empty() { "" } else { "@" };
    let mut url = Url::parse(&format!("postgres://{login}{at}{host}/{database}"))
        .map_err(|_invalid| PostgresTargetError::Shape)?;
    if !parameters.is_empty() {
        url.set_query(Some(&parameters.join("&")));
    }
    let mut config: tokio_postgres::Config = url.as_str().parse()?;
    if config.get_hosts().is_empty() && config.get_hostaddrs().is_empty() {
        return Err(PostgresTargetError::Shape);
    }
    config.target_session_attrs(TargetSessionAttrs::ReadWrite);
    config.tcp_user_timeout(Duration::from_secs(5)).keepalives_idle(Duration::from_secs(15));
    if config.get_application_name().is_none() {
        config.application_name("weir");
    }
    Ok(config)
}

/// The parameters of a URL. The driver does not know libpq's TLS parameters, and reads `host` as one host.
#[derive(Default)]
struct Parameters<'a> {
    ssl_mode: Option<String>,
    root_certificate: Option<PathBuf>,
    hosts: Option<String>,
    ports: Option<String>,
    /// The rest as it stands in the URL.
    others: Vec<&'a str>,
}

impl<'a> Parameters<'a> {
    fn read(query: &'a str) -> Result<Self, PostgresTargetError> {
        let mut parameters = Self::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let Some((name, value)) = form_urlencoded::parse(pair.as_bytes()).next() else { continue };
            match name.as_ref() {
                "sslmode" => parameters.ssl_mode = Some(value.into_owned()),
                "sslrootcert" if value == "system" => {}
                "sslrootcert" => parameters.root_certificate = Some(PathBuf::from(value.as_ref())),
                "host" => parameters.hosts = Some(value.into_owned()),
                "port" => parameters.ports = Some(value.into_owned()),
                "target_session_attrs" if matches!(value.as_ref(), "read-write" | "primary") => {}
                "target_session_attrs" => {
                    return Err(PostgresTargetError::SessionAttributes(value.into_owned()));
                }
                _ => parameters.others.push(pair),
            }
        }
        Ok(parameters)
    }

    /// Returns each host with its port as it stands in a URL: those of `authority`, or of the parameters `host` and `port`.
    fn hosts(&self, authority: &str) -> Result<Vec<String>, PostgresTargetError> {
        let Some(hosts) = &self.hosts else {
            if self.ports.is_some() {
                return Err(PostgresTargetError::Hosts);
            }
            return Ok(authority.split(',').map(str::to_owned).collect());
        };
        let hosts: Vec<&str> = hosts.split(',').collect();
        let ports: Vec<&str> = self.ports.as_deref().unwrap_or("5432").split(',').collect();
        if !authority.is_empty() || !(ports.len() == 1 || ports.len() == hosts.len()) {
            return Err(PostgresTargetError::Hosts);
        }
        let ports = ports.iter().cycle();
        Ok(hosts.iter().zip(ports).map(|(host, port)| format!("{}:{port}", in_url(host))).collect())
    }
}

/// Returns a host, an IPv6 address or the directory of a socket as it stands in a URL.
fn in_url(host: &str) -> String {
    if host.contains(':') {
        format!("[{host}]")
    } else {
        form_urlencoded::byte_serialize(host.as_bytes()).collect()
    }
}

impl PostgresTarget {
    /// Sets the timeout of a call.
    #[must_use]
    pub fn with_call_timeout(mut self, call_timeout: Duration) -> Self {
        self.call_timeout = call_timeout;
        let connect_timeout = self.connect_timeout();
        for config in &mut self.hosts {
            config.connect_timeout(connect_timeout);
        }
        self
    }

    /// Returns the timeout of connecting to one host: the first statements need the rest of a call's.
    pub(crate) fn connect_timeout(&self) -> Duration {
        self.call_timeout * 2 / 3
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

    /// Returns the hosts and ports without credentials, for messages.
    #[must_use]
    pub fn address(&self) -> String {
        self.hosts.iter().map(address).collect::<Vec<_>>().join(",")
    }
}

/// Returns the host and port of a server.
pub(crate) fn address(config: &tokio_postgres::Config) -> String {
    let host = match config.get_hosts().first() {
        Some(Host::Tcp(host)) => host.clone(),
        Some(Host::Unix(path)) => path.display().to_string(),
        None => config.get_hostaddrs().first().map(ToString::to_string).unwrap_or_default(),
    };
    format!("{host}:{}", config.get_ports().first().copied().unwrap_or(5432))
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
        assert_eq!(parse(base).hosts[0].get_ssl_mode(), SslMode::Prefer);
        assert_eq!(parse(&format!("{base}?sslmode=disable")).hosts[0].get_ssl_mode(), SslMode::Disable);
        assert_eq!(parse(&format!("{base}?sslmode=require")).trust, Trust::Anyone);
        let root = Some(PathBuf::from("/ca.pem"));
        let with_root = format!("{base}?sslrootcert=%2Fca.pem&sslmode=");
        assert_eq!(parse(&format!("{with_root}require")).trust, Trust::Authority(root.clone()));
        assert_eq!(parse(&format!("{with_root}verify-ca")).trust, Trust::Authority(root.clone()));
        assert_eq!(parse(&format!("{with_root}verify-full")).trust, Trust::Host(root));
    }

    #[test]
    fn other_parameters_reach_the_driver() {
        let target = parse("postgresql://u@h/d?sslmode=require&application_name=billing&options=-c%20a%3D1");
        assert_eq!(target.hosts[0].get_application_name(), Some("billing"));
        assert_eq!(target.hosts[0].get_options(), Some("-c a=1"));
        assert_eq!(target.address(), "h:5432");
    }

    #[test]
    fn several_hosts_are_separated_by_commas_before_the_database_or_in_the_parameter_host() {
        for (url, address) in [
            ("postgres://u:p@a:1,b:2/d", "a:1,b:2"),
            ("postgres://u:p@a,[::1]:2,c/d?target_session_attrs=read-write", "a:5432,::1:2,c:5432"),
            ("postgres://u:p@/d?host=a,b&port=1,2&target_session_attrs=primary", "a:1,b:2"),
            ("postgres:///d?user=u&password=p&host=a,::1&port=7", "a:7,::1:7"),
            ("postgres:///d?user=u&password=p&host=/run/a,/run/b", "/run/a:5432,/run/b:5432"),
        ] {
            let target = parse(url);
            assert_eq!(target.address(), address, "{url}");
            for config in &target.hosts {
                assert_eq!(config.get_hosts().len(), 1, "{url}");
                assert_eq!(config.get_target_session_attrs(), TargetSessionAttrs::ReadWrite);
                let login = (config.get_user(), config.get_password(), config.get_dbname());
                assert_eq!(login, (Some("u"), Some("p".as_bytes()), Some("d")), "{url}");
            }
        }
        let one = parse("postgres://u:p%25%40%2F@a/d");
        assert_eq!(one.hosts[0].get_password(), Some("p%@/".as_bytes()));
    }

    #[test]
    fn hosts_that_cannot_be_used_are_refused() {
        for bad in [
            "postgres:///d",
            "postgres://a,,b/d",
            "postgres://a:x,b/d",
            "postgres://a/d?host=b",
            "postgres:///d?host=a,b&port=1,2,3",
            "postgres://a/d?port=1",
            "postgres://a,b/d?hostaddr=127.0.0.1,127.0.0.2",
            "postgres://a,b/d?target_session_attrs=any",
            "postgres://a/d?target_session_attrs=standby",
        ] {
            assert!(bad.parse::<PostgresTarget>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_refusal_never_repeats_the_password() {
        for bad in ["mysql://u:secret@h/d", "not a url secret", "postgres://u:secret@h/d?sslmode=maybe"] {
            assert!(!bad.parse::<PostgresTarget>().unwrap_err().to_string().contains("secret"), "{bad}");
        }
    }
}
