//! Settings of connections to Kafka: TLS and credentials.

use std::path::PathBuf;

use weir_queue::kafka::{Brokers, HAS_TLS, Sasl, SaslMechanism, Security};

use super::parse::{certificates_file, private_key_file};
use super::source::{SettingError, SettingsReader};

/// How a build gets TLS.
const REMEDY: &str = "build it where OpenSSL's headers are installed (libssl-dev and pkg-config), or with the feature \
                      kafka-tls-vendored";

/// How to connect to the brokers, before it is known which they are.
pub(super) struct SecuritySettings {
    mechanism: Option<SaslMechanism>,
    username: Option<String>,
    password: Option<String>,
    ca: Option<PathBuf>,
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
}

impl SecuritySettings {
    pub(super) fn read(reader: &mut SettingsReader) -> Result<Self, SettingError> {
        // Compose files pass on variables that are empty.
        let text = |text: &str| Some((!text.is_empty()).then(|| text.to_owned()));
        let mechanism = |text: &str| if text.is_empty() { Some(None) } else { text.parse().ok().map(Some) };
        let mechanisms = "PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512";
        let certificates = "a file of certificates in PEM that can be read";
        let key = "a file with an unencrypted private key in PEM that can be read";
        Ok(Self {
            mechanism: reader.get("kafka.sasl_mechanism", None, mechanism, mechanisms)?,
            username: reader.get("kafka.username", None, text, "a name")?,
            password: reader.get("kafka.password", None, text, "a password")?,
            ca: reader.get("kafka.ca", None, certificates_file, certificates)?,
            cert: reader.get("kafka.cert", None, certificates_file, certificates)?,
            key: reader.get("kafka.key", None, private_key_file, key)?,
        })
    }

    /// Returns brokers that are connected to in this way.
    /// Fails when the settings contradict each other, or ask for what this build cannot do.
    pub(super) fn apply(self, brokers: Brokers) -> Result<Brokers, SettingError> {
        let security = self.check(&brokers, HAS_TLS).map_err(SettingError::conflict)?;
        Ok(brokers.with_security(security))
    }

    /// Fails with a sentence that says what to change.
    fn check(self, brokers: &Brokers, has_tls: bool) -> Result<Security, String> {
        let is_encrypted = brokers.is_encrypted();
        if !has_tls && (is_encrypted || self.mechanism.is_some()) {
            let wanted =
                if is_encrypted { "broker is kafka+ssl://…" } else { "kafka.sasl_mechanism is set" };
            return Err(format!(
                "{wanted}, but this binary was built without TLS and SASL for Kafka; {REMEDY}"
            ));
        }
        let named = [("kafka.ca", &self.ca), ("kafka.cert", &self.cert), ("kafka.key", &self.key)];
        if let Some((name, _)) = named.iter().find(|(_, file)| file.is_some() && !is_encrypted) {
            return Err(format!(
                "{name} is set, but broker is kafka://…, which is not encrypted; use kafka+ssl://…"
            ));
        }
        let sasl = match (self.mechanism, self.username, self.password) {
            (None, None, None) => None,
            (Some(mechanism), Some(username), Some(password)) => Some(Sasl { mechanism, username, password }),
            (mechanism, username, password) => {
                let set = [
                    ("kafka.sasl_mechanism", mechanism.is_some()),
                    ("kafka.username", username.is_some()),
                    ("WEIR_KAFKA_PASSWORD", password.is_some()),
                ];
                let missing: Vec<&str> =
                    set.into_iter().filter(|(_, is_set)| !is_set).map(|(name, _)| name).collect();
                return Err(format!(
                    "kafka.sasl_mechanism, kafka.username and WEIR_KAFKA_PASSWORD belong together; {} missing",
                    match &missing[..] {
                        [one] => format!("{one} is"),
                        more => format!("{} are", more.join(" and ")),
                    }
                ));
            }
        };
        let identity = match (self.cert, self.key) {
            (None, None) => None,
            (Some(cert), Some(key)) => Some((cert, key)),
            (Some(_), None) => {
                return Err("kafka.cert is set and kafka.key is not; set both, or neither".to_owned());
            }
            (None, Some(_)) => {
                return Err("kafka.key is set and kafka.cert is not; set both, or neither".to_owned());
            }
        };
        Ok(Security { sasl, ca: self.ca, identity })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn no_settings() -> SecuritySettings {
        SecuritySettings { mechanism: None, username: None, password: None, ca: None, cert: None, key: None }
    }

    fn refused(settings: SecuritySettings, broker: &str, has_tls: bool) -> String {
        settings.check(&broker.parse().unwrap(), has_tls).unwrap_err()
    }

    #[test]
    fn a_build_without_tls_says_how_to_get_it() {
        assert_eq!(no_settings().check(&"kafka://a".parse().unwrap(), false), Ok(Security::default()));
        let sentence = refused(no_settings(), "kafka+ssl://a", false);
        assert!(sentence.contains("kafka+ssl://") && sentence.contains("libssl-dev"), "{sentence}");
        let scram = SecuritySettings { mechanism: Some(SaslMechanism::ScramSha256), ..no_settings() };
        let sentence = refused(scram, "kafka://a", false);
        assert!(sentence.contains("kafka.sasl_mechanism") && sentence.contains("libssl-dev"), "{sentence}");
    }

    #[test]
    fn settings_that_belong_together_are_set_together() {
        let file = || Some(PathBuf::from("file.pem"));
        let sentence = refused(SecuritySettings { ca: file(), ..no_settings() }, "kafka://a", true);
        assert!(sentence.starts_with("kafka.ca is set") && sentence.contains("kafka+ssl://"), "{sentence}");
        let sentence = refused(SecuritySettings { cert: file(), ..no_settings() }, "kafka+ssl://a", true);
        assert!(sentence.contains("kafka.key is not"), "{sentence}");
        let sentence = refused(SecuritySettings { key: file(), ..no_settings() }, "kafka+ssl://a", true);
        assert!(sentence.contains("kafka.cert is not"), "{sentence}");
        let plain = SecuritySettings { mechanism: Some(SaslMechanism::Plain), ..no_settings() };
        let sentence = refused(plain, "kafka+ssl://a", true);
        assert!(sentence.contains("kafka.username and WEIR_KAFKA_PASSWORD are missing"), "{sentence}");
        let password = SecuritySettings { password: Some("hunter2".to_owned()), ..no_settings() };
        let sentence = refused(password, "kafka://a", true);
        assert!(sentence.contains("kafka.sasl_mechanism and kafka.username are missing"), "{sentence}");
        assert!(!sentence.contains("hunter2"), "{sentence}");
    }
}
