//! A `kafka://` or `kafka+ssl://` address with one or more brokers, and how to connect to them.

use std::fmt;
use std::net::Ipv6Addr;
use std::path::Path;
use std::str::FromStr;

use rdkafka::config::ClientConfig;

use super::security::Security;

const SCHEME: &str = "kafka://";
/// The scheme of connections under TLS.
const ENCRYPTED_SCHEME: &str = "kafka+ssl://";
const PORT: u16 = 9092;

/// The brokers to connect to first; they name the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Brokers {
    addresses: Vec<String>,
    is_encrypted: bool,
    security: Security,
}

/// Why an address was refused. Never contains the whole address, which may include a password.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BrokersError {
    #[error("is not a kafka://host:port[,host:port] or kafka+ssl://host:port[,host:port] address")]
    Scheme,
    #[error(
        "names a user; allowed is kafka://host:port[,host:port], and credentials are settings of their own"
    )]
    User,
    #[error(
        "has something behind the brokers; allowed is kafka://host:port[,host:port], without a path or parameters"
    )]
    Rest,
    #[error("has the broker {0:?}; allowed are host, host:port and [IPv6 address]:port, separated by commas")]
    Broker(String),
}

impl Brokers {
    /// The format of librdkafka.
    #[must_use]
    pub fn bootstrap_servers(&self) -> String {
        self.addresses.join(",")
    }

    /// Whether connections are made under TLS.
    #[must_use]
    pub const fn is_encrypted(&self) -> bool {
        self.is_encrypted
    }

    /// The file of the key of the certificate that is presented to brokers.
    #[must_use]
    pub fn key_file(&self) -> Option<&Path> {
        self.security.identity.as_ref().map(|(_certificate, key)| key.as_path())
    }

    #[must_use]
    pub fn with_security(self, security: Security) -> Self {
        Self { security, ..self }
    }

    /// Adds the addresses, and how to connect to them, to a client's configuration.
    pub(super) fn apply(&self, config: &mut ClientConfig) {
        config.set("bootstrap.servers", self.bootstrap_servers());
        self.security.apply(self.is_encrypted, config);
    }
}

impl fmt::Display for Brokers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.is_encrypted { ENCRYPTED_SCHEME } else { SCHEME };
        write!(f, "{scheme}{}", self.bootstrap_servers())
    }
}

impl FromStr for Brokers {
    type Err = BrokersError;

    fn from_str(text: &str) -> Result<Self, BrokersError> {
        let (list, is_encrypted) = match text.strip_prefix(ENCRYPTED_SCHEME) {
            Some(list) => (list, true),
            None => (text.strip_prefix(SCHEME).ok_or(BrokersError::Scheme)?, false),
        };
        if list.contains('@') {
            return Err(BrokersError::User);
        }
        let list = list.strip_suffix('/').unwrap_or(list);
        if list.contains(['/', '?', '#']) {
            return Err(BrokersError::Rest);
        }
        let broker = |text| broker(text).ok_or_else(|| BrokersError::Broker(str::to_owned(text)));
        let addresses = list.split(',').map(broker).collect::<Result<_, _>>()?;
        Ok(Self { addresses, is_encrypted, security: Security::default() })
    }
}

/// One broker, with its port.
fn broker(text: &str) -> Option<String> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (address, port) = rest.split_once(']')?;
            let address: Ipv6Addr = address.parse().ok()?;
            let port = if port.is_empty() { None } else { Some(port.strip_prefix(':')?) };
            (format!("[{address}]"), port)
        }
        None => {
            let (host, port) = text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port)));
            let named = !host.is_empty()
                && host.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_'));
            (named.then(|| host.to_owned())?, port)
        }
    };
    let port = match port {
        None => PORT,
        // `parse` alone would accept a sign.
        Some(digits) if digits.bytes().all(|digit| digit.is_ascii_digit()) => digits.parse().ok()?,
        Some(_) => return None,
    };
    (port > 0).then(|| format!("{host}:{port}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn brokers_are_hosts_with_ports() {
        let parsed = |text: &str| text.parse::<Brokers>().unwrap().bootstrap_servers();
        assert_eq!(parsed("kafka://localhost:9092"), "localhost:9092");
        assert_eq!(parsed("kafka://kafka"), "kafka:9092");
        assert_eq!(parsed("kafka://kafka/"), "kafka:9092");
        assert_eq!(parsed("kafka://a.b-c:1,10.0.0.1:2,d"), "a.b-c:1,10.0.0.1:2,d:9092");
        assert_eq!(parsed("kafka://[::1]:9093,[2001:db8::1]"), "[::1]:9093,[2001:db8::1]:9092");
        assert_eq!("kafka://a,b:1".parse::<Brokers>().unwrap().to_string(), "kafka://a:9092,b:1");
        let encrypted: Brokers = "kafka+ssl://a,b:1".parse().unwrap();
        assert!(encrypted.is_encrypted());
        assert_eq!(encrypted.to_string(), "kafka+ssl://a:9092,b:1");
    }

    #[test]
    fn malformed_addresses_are_refused_with_the_allowed_form() {
        let refused = |text: &str| text.parse::<Brokers>().unwrap_err();
        for text in ["", "localhost:9092", "redis://a", "kafka:a", "http://a", "kafka+tls://a"] {
            assert_eq!(refused(text), BrokersError::Scheme, "{text}");
        }
        for text in ["kafka://a?acks=1", "kafka://a/topic", "kafka://a#b", "kafka://a,b/?x"] {
            assert_eq!(refused(text), BrokersError::Rest, "{text}");
        }
        assert_eq!(refused("kafka://user:secret@a"), BrokersError::User);
        assert!(!refused("kafka://user:secret@a").to_string().contains("secret"));
        for broker in
            ["", "a:", ":1", "a:x", "a:0", "a:65536", "a:+1", "::1", "[::1", "[a]:1", "[::1]1", "a b"]
        {
            assert_eq!(refused(&format!("kafka://{broker}")), BrokersError::Broker(broker.to_owned()));
        }
        assert_eq!(refused("kafka://a,,b"), BrokersError::Broker(String::new()));
        assert!(refused("kafka://a:x").to_string().contains("host:port"));
    }
}
