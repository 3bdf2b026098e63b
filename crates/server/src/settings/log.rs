//! What is logged and how.

use super::source::{SettingError, SettingsReader};

/// What is logged and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogSettings {
    /// `log.level`: a level, or directives such as `info,weir_server=debug`.
    pub level: String,
    /// `log.format`: how a line looks.
    pub format: LogFormat,
}

/// How a log line looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// For people on a terminal, JSON otherwise.
    Auto,
    /// For people.
    Human,
    /// One JSON object a line.
    Json,
}

impl LogSettings {
    pub(crate) fn read(reader: &mut SettingsReader) -> Result<Self, SettingError> {
        let format = |text: &str| match text {
            "auto" => Some(LogFormat::Auto),
            "human" => Some(LogFormat::Human),
            "json" => Some(LogFormat::Json),
            _ => None,
        };
        let level = |text: &str| text.split(',').all(is_directive).then(|| text.to_owned());
        let levels = "error, warn, info, debug, trace or off, or a list such as info,weir_server=debug";
        Ok(Self {
            level: reader.get("log.level", "info".to_owned(), level, levels)?,
            format: reader.get("log.format", LogFormat::Auto, format, "auto, human or json")?,
        })
    }
}

/// A level, or a module with its level. Any other word would be taken for a module and turn off all the rest.
fn is_directive(text: &str) -> bool {
    let (module, level) = text.split_once('=').unwrap_or(("", text));
    let plain = module.chars().all(|c| c.is_ascii_alphanumeric() || "_:-".contains(c));
    plain && matches!(level, "error" | "warn" | "info" | "debug" | "trace" | "off")
}
