//! Settings: what can be set, where it is read from, and what is allowed.
//!
//! One struct a concern. A setting has one dotted name: `http.timeout` in `weir.toml` is `WEIR_HTTP_TIMEOUT` in the
//! environment; the few that have a flag are listed in [`source::FLAGS`]. Flags win, then the environment, then the
//! file. A setting that is wrong stops the start with a sentence that says what is allowed.

pub(crate) mod auth;
pub(crate) mod edge;
pub(crate) mod http;
pub(crate) mod lane;
pub mod log;
pub(crate) mod parse;
pub(crate) mod process;
pub mod source;
pub mod store;

use std::path::PathBuf;

use self::source::{SettingError, SettingsReader, Sources};
use crate::gateway::settings::GatewaySettings;
use crate::quota::settings::SenderSettings;
use crate::request::settings::RequestSettings;
use crate::sale::settings::SaleSettings;
use crate::slot::settings::SlotSettings;
use crate::tier::settings::TierSettings;

/// Everything that can be set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Where the process listens and keeps its files, and what it does.
    pub process: process::ProcessSettings,
    /// Which engines it uses.
    pub store: store::StoreSettings,
    /// Who may call.
    pub auth: auth::AuthSettings,
    /// Bounds on connections and requests.
    pub http: http::HttpSettings,
    /// Bounds on batching.
    pub lane: lane::LaneSettings,
    /// How the sender takes messages.
    pub sender: SenderSettings,
    /// How requests are accepted and worked on.
    pub request: RequestSettings,
    /// How slots are assigned and dispatched.
    pub slot: SlotSettings,
    /// Where AI calls are passed on to.
    pub gateway: GatewaySettings,
    /// What the tiers allow, and the policies of the file.
    pub tier: TierSettings,
    /// How sales are guarded.
    pub sale: SaleSettings,
    /// What one address may do.
    pub edge: edge::EdgeSettings,
    /// What is logged and how.
    pub log: log::LogSettings,
    /// The file of settings, if it holds a secret: a URL with a password.
    pub file_with_secrets: Option<PathBuf>,
    /// `WEIR_…` variables that mean nothing to this version.
    pub unknown_variables: Vec<String>,
}

impl Settings {
    /// Reads every setting.
    /// The first setting that is wrong, or unknown to the file.
    pub fn read(sources: Sources) -> Result<Self, SettingError> {
        let mut reader = SettingsReader::new(sources);
        let mut settings = Self {
            process: process::ProcessSettings::read(&mut reader)?,
            store: store::StoreSettings::read(&mut reader)?,
            auth: auth::AuthSettings::read(&mut reader)?,
            http: http::HttpSettings::read(&mut reader)?,
            lane: lane::LaneSettings::read(&mut reader)?,
            sender: SenderSettings::read(&mut reader)?,
            request: RequestSettings::read(&mut reader)?,
            slot: SlotSettings::read(&mut reader)?,
            gateway: GatewaySettings::read(&mut reader)?,
            tier: TierSettings::read(&mut reader)?,
            sale: SaleSettings::read(&mut reader)?,
            edge: edge::EdgeSettings::read(&mut reader)?,
            log: log::LogSettings::read(&mut reader)?,
            file_with_secrets: reader.file_with_secrets(),
            unknown_variables: Vec::new(),
        };
        settings.unknown_variables = reader.unknown_variables();
        reader.finish()?;
        settings.process.refuse_strangers(&settings.auth)?;
        settings.http.check()?;
        settings.store.check(settings.http.timeout)?;
        Ok(settings)
    }
}

#[cfg(test)]
mod tests;
