//! How the brokers are connected to: TLS, and the credentials of SASL. Both need OpenSSL, which is a feature of the build.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use rdkafka::config::ClientConfig;

/// Whether this build can use TLS and SASL.
pub const HAS_TLS: bool = cfg!(feature = "kafka-tls");

/// What a connection needs besides an address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Security {
    pub sasl: Option<Sasl>,
    /// The authorities that brokers' certificates must come from; `None` for those of the system.
    pub ca: Option<PathBuf>,
    /// The files of the certificate to present, and of its key.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// Credentials. `Debug` does not show the password.
#[derive(Clone, PartialEq, Eq)]
pub struct Sasl {
    pub mechanism: SaslMechanism,
    pub username: String,
    pub password: String,
}

/// How credentials are proven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SaslMechanism {
    Plain,
    ScramSha256,
    ScramSha512,
}

impl SaslMechanism {
    const ALL: [Self; 3] = [Self::Plain, Self::ScramSha256, Self::ScramSha512];

    /// The name in the protocol.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "PLAIN",
            Self::ScramSha256 => "SCRAM-SHA-256",
            Self::ScramSha512 => "SCRAM-SHA-512",
        }
    }
}

/// The text names no mechanism.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is not PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512")]
pub struct UnknownMechanism;

impl FromStr for SaslMechanism {
    type Err = UnknownMechanism;

    fn from_str(text: &str) -> Result<Self, UnknownMechanism> {
        Self::ALL.into_iter().find(|mechanism| mechanism.name() == text).ok_or(UnknownMechanism)
    }
}

impl fmt::Debug for Sasl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sasl")
            .field("mechanism", &self.mechanism)
            .field("username", &self.username)
            .finish_non_exhaustive()
    }
}

impl Security {
    /// Adds the security of connections to a client's configuration.
    pub(super) fn apply(&self, is_encrypted: bool, config: &mut ClientConfig) {
        // A build without TLS does not know the other settings. Without any of them a connection is plain.
        match (is_encrypted, &self.sasl) {
            (false, None) => return,
            (true, None) => config.set("security.protocol", "ssl"),
            (false, Some(_)) => config.set("security.protocol", "sasl_plaintext"),
            (true, Some(_)) => config.set("security.protocol", "sasl_ssl"),
        };
        if let Some(Sasl { mechanism, username, password }) = &self.sasl {
            config.set("sasl.mechanism", mechanism.name());
            config.set("sasl.username", username).set("sasl.password", password);
        }
        if is_encrypted {
            // An OpenSSL that is compiled in does not know where the system has its authorities.
            let ca = self.ca.as_ref().map_or("probe".into(), |file| file.to_string_lossy());
            config.set("ssl.ca.location", ca);
            if let Some((certificate, key)) = &self.identity {
                config.set("ssl.certificate.location", certificate.to_string_lossy());
                config.set("ssl.key.location", key.to_string_lossy());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_not_shown() {
        let (username, password) = ("weir".to_owned(), "hunter2".to_owned());
        let sasl = Sasl { mechanism: SaslMechanism::Plain, username, password };
        let security = Security { sasl: Some(sasl), ..Security::default() };
        assert!(!format!("{security:?}").contains("hunter2"), "{security:?}");
    }

    #[test]
    fn mechanisms_are_named_as_in_the_protocol() {
        for mechanism in SaslMechanism::ALL {
            assert_eq!(mechanism.name().parse(), Ok(mechanism));
        }
        for unknown in ["", "plain", "SCRAM-SHA-1", "GSSAPI"] {
            assert_eq!(unknown.parse::<SaslMechanism>(), Err(UnknownMechanism));
        }
    }
}
