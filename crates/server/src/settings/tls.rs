//! Settings of TLS on the listeners.

use std::path::PathBuf;

use super::source::{SettingError, SettingsReader};

/// The names of the settings, as errors show them.
pub(crate) const CERT: &str = "http.tls.cert (WEIR_TLS_CERT)";
pub(crate) const KEY: &str = "http.tls.key (WEIR_TLS_KEY)";
pub(crate) const CLIENT_CA: &str = "http.tls.client_ca (WEIR_TLS_CLIENT_CA)";

/// The files of TLS. They are read at the start and again when they change (`tls.rs`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsSettings {
    /// `http.tls.cert`: the certificate and its chain.
    pub cert: PathBuf,
    /// `http.tls.key`: the private key of the certificate.
    pub key: PathBuf,
    /// `http.tls.client_ca`: the authorities that callers' certificates must come from; without it callers need none.
    pub client_ca: Option<PathBuf>,
}

impl TlsSettings {
    /// Reads the settings of TLS; `None` is plain HTTP.
    /// Fails when only some of the files are named.
    pub(crate) fn read(reader: &mut SettingsReader) -> Result<Option<Self>, SettingError> {
        let file = |text: &str| Some((!text.is_empty()).then(|| PathBuf::from(text)));
        let allowed = "the path of a PEM file, or nothing";
        let cert = reader.get("http.tls.cert", None, file, allowed)?;
        let key = reader.get("http.tls.key", None, file, allowed)?;
        let client_ca = reader.get("http.tls.client_ca", None, file, allowed)?;
        let incomplete = |set: &str, missing: &str| {
            let remedy = "set both for TLS, or neither for plain HTTP";
            Err(SettingError::conflict(format!("{set} is set and {missing} is not; {remedy}")))
        };
        match (cert, key, client_ca) {
            (Some(cert), Some(key), client_ca) => Ok(Some(Self { cert, key, client_ca })),
            (None, None, None) => Ok(None),
            (Some(_), None, _) => incomplete(CERT, KEY),
            (None, Some(_), _) => incomplete(KEY, CERT),
            (None, None, Some(_)) => incomplete(CLIENT_CA, CERT),
        }
    }
}
