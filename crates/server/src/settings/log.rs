//! Settings of the log.

use super::source::{SettingError, SettingsReader};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogSettings {
    /// `log.level`: a level, or directives such as `info,weir_server=debug`.
    pub level: String,
    /// `log.format`.
    pub format: LogFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// `Human` on a terminal, `Json` otherwise.
    Auto,
    Human,
    /// One JSON object per line.
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

/// Whether the text is a level, or a module with its level. Any other word would be taken for a module name and disable all
/// other logs.
fn is_directive(text: &str) -> bool {
    let (module, level) = text.split_once('=').unwrap_or(("", text));
    let plain = module.chars().all(|c| c.is_ascii_alphanumeric() || "_:-".contains(c));
    plain && matches!(level, "error" | "warn" | "info" | "debug" | "trace" | "off")
}
