//! The settings, their sources and their allowed values.
//!
//! There is one struct per concern. A setting has one dotted name: `http.timeout` in `weir.toml` is `WEIR_HTTP_TIMEOUT` in
//! the environment; the few settings with a flag are listed in [`source::FLAGS`]. Flags win over the environment, which wins
//! over the file. A wrong setting stops the start with a sentence that says what is allowed.

pub(crate) mod audit;
pub(crate) mod auth;
pub(crate) mod console;
pub(crate) mod edge;
pub(crate) mod http;
mod kafka;
pub(crate) mod lane;
pub mod log;
pub(crate) mod parse;
pub(crate) mod process;
pub mod secret;
pub mod source;
pub mod store;
pub mod tls;
pub(crate) mod traces;

use std::path::PathBuf;

use self::source::{SettingError, SettingsReader, Sources};
use crate::gateway::settings::GatewaySettings;
use crate::quota::settings::SenderSettings;
use crate::request::settings::RequestSettings;
use crate::sale::settings::SaleSettings;
use crate::slot::settings::SlotSettings;
use crate::tier::settings::TierSettings;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    pub process: process::ProcessSettings,
    pub store: store::StoreSettings,
    pub auth: auth::AuthSettings,
    pub http: http::HttpSettings,
    /// `http.tls`; plain HTTP without it.
    pub tls: Option<tls::TlsSettings>,
    pub audit: audit::AuditSettings,
    pub lane: lane::LaneLimits,
    pub sender: SenderSettings,
    pub request: RequestSettings,
    pub slot: SlotSettings,
    pub gateway: GatewaySettings,
    pub tier: TierSettings,
    pub sale: SaleSettings,
    pub edge: edge::EdgeSettings,
    pub log: log::LogSettings,
    pub traces: traces::TraceSettings,
    pub console: console::ConsoleSettings,
    /// The settings file, if it contains a URL with a password.
    pub file_with_secrets: Option<PathBuf>,
    /// `WEIR_…` variables that this version does not know.
    pub unknown_variables: Vec<String>,
}

impl Settings {
    /// Reads every setting.
    /// Fails with the first setting that is wrong, or that is in the file and unknown.
    pub fn read(sources: Sources) -> Result<Self, SettingError> {
        let mut reader = SettingsReader::new(sources);
        let process = process::ProcessSettings::read(&mut reader)?;
        let mut settings = Self {
            store: store::StoreSettings::read(&mut reader)?,
            auth: auth::AuthSettings::read(&mut reader, &process)?,
            sale: SaleSettings::read(&mut reader, process::is_loopback(process.listen))?,
            process,
            http: http::HttpSettings::read(&mut reader)?,
            tls: tls::TlsSettings::read(&mut reader)?,
            audit: audit::AuditSettings::read(&mut reader)?,
            lane: lane::LaneLimits::read(&mut reader)?,
            sender: SenderSettings::read(&mut reader)?,
            request: RequestSettings::read(&mut reader)?,
            slot: SlotSettings::read(&mut reader)?,
            gateway: GatewaySettings::read(&mut reader)?,
            tier: TierSettings::read(&mut reader)?,
            edge: edge::EdgeSettings::read(&mut reader)?,
            log: log::LogSettings::read(&mut reader)?,
            traces: traces::TraceSettings::read(&mut reader)?,
            console: console::ConsoleSettings::read(&mut reader)?,
            file_with_secrets: reader.file_with_secrets(),
            unknown_variables: Vec::new(),
        };
        settings.unknown_variables = reader.unknown_variables();
        reader.finish()?;
        settings.http.check()?;
        settings.store.check(settings.http.timeout)?;
        Ok(settings)
    }
}

#[cfg(test)]
mod tests;
