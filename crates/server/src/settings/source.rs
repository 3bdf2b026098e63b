//! The sources of settings, and the error for a wrong setting.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

/// The settings that have a flag, by dotted name.
pub const FLAGS: [&str; 8] = ["listen", "grpc_listen", "data", "store", "cache", "broker", "roles", "config"];

/// The settings whose values are never shown: they are secrets, or URLs that may hold one.
const SECRETS: [&str; 13] = [
    "admin_key",
    "jwt_secret",
    "webhook_secret",
    "kafka.password",
    "request.keys",
    "ai.authorization",
    "sale.challenge.secret",
    "sale.challenge.interactive_secret",
    "store",
    "cache",
    "broker",
    "downstream",
    "ai.upstream",
];

/// The settings that may be set only in the environment: a file is too easily committed.
const ENVIRONMENT_ONLY: [&str; 8] = [
    "admin_key",
    "jwt_secret",
    "webhook_secret",
    "kafka.password",
    "request.keys",
    "ai.authorization",
    "sale.challenge.secret",
    "sale.challenge.interactive_secret",
];

/// Variables that many programs know, and the settings that they stand for. The `WEIR_…` variable wins.
const ALIASES: [(&str, &str); 2] =
    [("traces.otlp_endpoint", "OTEL_EXPORTER_OTLP_ENDPOINT"), ("traces.service_name", "OTEL_SERVICE_NAME")];

/// The file that is read if it exists and no other is named.
const DEFAULT_FILE: &str = "weir.toml";

/// The values of all sources, not parsed yet.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// Values of flags, by dotted name.
    pub flags: BTreeMap<&'static str, String>,
    /// The environment's `WEIR_…` variables, and those of other names that stand for settings or that the file names.
    pub environment: BTreeMap<String, String>,
    /// The file's values, by dotted name, and where it is.
    pub file: Option<(PathBuf, BTreeMap<String, String>)>,
}

impl Sources {
    /// Reads the process's environment and the file that flags or environment name.
    /// Fails when a named file cannot be read, or the file is not TOML.
    pub fn from_process(flags: BTreeMap<&'static str, String>) -> Result<Self, SettingError> {
        let mut environment: BTreeMap<_, _> = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .filter(|(name, _)| name.starts_with("WEIR_") || is_alias(name))
            .collect();
        let named = flags.get("config").or_else(|| environment.get("WEIR_CONFIG")).map(PathBuf::from);
        let path = named.clone().unwrap_or_else(|| PathBuf::from(DEFAULT_FILE));
        let file = match std::fs::read_to_string(&path) {
            Ok(text) => Some((path.clone(), flatten_toml(&path, &text)?)),
            Err(error) if named.is_none() && error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => {
                return Err(SettingError::new(
                    "config",
                    path.display(),
                    format!("a file that can be read ({error})"),
                ));
            }
        };
        let values = file.iter().flat_map(|(_, values)| values.values());
        for name in values.filter_map(|value| value.strip_prefix("env:")) {
            if let Ok(value) = std::env::var(name) {
                environment.insert(name.to_owned(), value);
            }
        }
        Ok(Self { flags, environment, file })
    }
}

/// Converts the values of a TOML file to text under dotted names, so that all sources are parsed in the same way.
/// Fails when the text is not TOML.
pub fn flatten_toml(path: &Path, text: &str) -> Result<BTreeMap<String, String>, SettingError> {
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
        let line = error.span().map_or(0, |span| text[..span.start].lines().count().max(1));
        let problem = format!("valid TOML (line {line}: {})", error.message());
        SettingError::new("config", path.display(), problem)
    })?;
    let mut values = BTreeMap::new();
    flatten_table("", table, &mut values);
    Ok(values)
}

fn flatten_table(prefix: &str, table: toml::Table, values: &mut BTreeMap<String, String>) {
    for (name, value) in table {
        let key = if prefix.is_empty() { name } else { format!("{prefix}.{name}") };
        match value {
            toml::Value::Table(inner) => flatten_table(&key, inner, values),
            toml::Value::String(text) => {
                values.insert(key, text);
            }
            toml::Value::Array(items) => {
                let items =
                    items.iter().map(|item| item.as_str().map_or_else(|| item.to_string(), str::to_owned));
                values.insert(key, items.collect::<Vec<_>>().join(","));
            }
            other => {
                values.insert(key, other.to_string());
            }
        }
    }
}

/// Reads settings one by one and records their names.
#[derive(Debug)]
pub struct SettingsReader {
    sources: Sources,
    known: BTreeSet<&'static str>,
    /// Prefixes under which the file may have tables of any name.
    tables: BTreeSet<&'static str>,
    /// Variables of the environment that the file's values name.
    variables: BTreeSet<String>,
}

impl SettingsReader {
    #[must_use]
    pub const fn new(sources: Sources) -> Self {
        Self { sources, known: BTreeSet::new(), tables: BTreeSet::new(), variables: BTreeSet::new() }
    }

    /// Returns the value of an environment variable that a value of the file names, or `None` if it is not set.
    pub fn environment_variable(&mut self, name: &str) -> Option<String> {
        self.variables.insert(name.to_owned());
        self.sources.environment.get(name).cloned()
    }

    /// Returns the setting `key`, or `default` if it is not set.
    /// Fails when `parse` refuses the value. `allowed` describes the allowed values.
    pub fn get<T>(
        &mut self,
        key: &'static str,
        default: T,
        parse: impl Fn(&str) -> Option<T>,
        allowed: &str,
    ) -> Result<T, SettingError> {
        let value = self.get_optional(key, parse, allowed)?;
        Ok(value.unwrap_or(default))
    }

    /// Returns the setting `key`, or `None` if it is not set.
    /// Fails like [`Self::get`].
    pub fn get_optional<T>(
        &mut self,
        key: &'static str,
        parse: impl Fn(&str) -> Option<T>,
        allowed: &str,
    ) -> Result<Option<T>, SettingError> {
        let Some((name, text)) = self.text(key)? else {
            return Ok(None);
        };
        match parse(&text) {
            Some(value) => Ok(Some(value)),
            None if SECRETS.contains(&key) || has_password(&text) => Err(SettingError::secret(name, allowed)),
            None => Err(SettingError::new(name, text, allowed)),
        }
    }

    /// Returns the name of a setting in its source, and its text.
    fn text(&mut self, key: &'static str) -> Result<Option<(String, String)>, SettingError> {
        self.known.insert(key);
        let variable = variable(key);
        if let Some(text) = self.sources.flags.get(key) {
            return Ok(Some((format!("--{}", key.replace('_', "-")), text.clone())));
        }
        if let Some(text) = self.sources.environment.get(&variable) {
            return Ok(Some((variable, text.clone())));
        }
        let alias = ALIASES.iter().find(|(setting, _)| *setting == key);
        if let Some((alias, text)) =
            alias.and_then(|(_, alias)| self.sources.environment.get_key_value(*alias))
        {
            return Ok(Some((alias.clone(), text.clone())));
        }
        let Some((path, values)) = &self.sources.file else {
            return Ok(None);
        };
        let Some(text) = values.get(key) else {
            return Ok(None);
        };
        let name = format!("{key} in {}", path.display());
        if ENVIRONMENT_ONLY.contains(&key) {
            return Err(SettingError::secret(
                name,
                &format!("the environment ({variable}) for secrets, not the file"),
            ));
        }
        Ok(Some((name, text.clone())))
    }

    /// Returns the tables of the file under `prefix`, with the values of their fields. Only a file has tables.
    pub fn tables(&mut self, prefix: &'static str) -> BTreeMap<String, BTreeMap<String, String>> {
        self.tables.insert(prefix);
        let mut tables: BTreeMap<String, BTreeMap<String, String>> = BTreeMap::new();
        let values = self.sources.file.iter().flat_map(|(_, values)| values);
        for (key, value) in values {
            let rest = key.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('.'));
            if let Some((name, field)) = rest.and_then(|rest| rest.rsplit_once('.')) {
                tables.entry(name.to_owned()).or_default().insert(field.to_owned(), value.clone());
            }
        }
        tables
    }

    /// Returns the path of the file if it contains a URL with a password. Other secrets are refused in files.
    #[must_use]
    pub fn file_with_secrets(&self) -> Option<PathBuf> {
        let (path, values) = self.sources.file.as_ref()?;
        values.values().any(|value| has_password(value)).then(|| path.clone())
    }

    /// Returns the names of all settings read so far.
    pub fn known(&self) -> impl Iterator<Item = &'static str> {
        self.known.iter().copied()
    }

    /// Returns the `WEIR_…` variables that are no settings: misspelled, or meant for another version.
    #[must_use]
    pub fn unknown_variables(&self) -> Vec<String> {
        let known: BTreeSet<String> = self.known.iter().map(|key| variable(key)).collect();
        let variables = self.sources.environment.keys();
        let is_unknown = |name: &&String| {
            let is_expected = known.contains(*name) || self.variables.contains(*name) || is_alias(name);
            name.starts_with("WEIR_") && !name.starts_with("WEIR_TEST_") && !is_expected
        };
        variables.filter(is_unknown).cloned().collect()
    }

    /// Fails with the first name in the file that is not a setting, most likely because it is misspelled.
    pub fn finish(self) -> Result<(), SettingError> {
        let Some((path, values)) = &self.sources.file else {
            return Ok(());
        };
        let is_in_table = |key: &str| {
            let rest = self.tables.iter().find_map(|prefix| key.strip_prefix(prefix));
            rest.is_some_and(|rest| rest.starts_with('.') && rest[1..].contains('.'))
        };
        match values.keys().find(|key| !self.known.contains(key.as_str()) && !is_in_table(key)) {
            Some(unknown) => Err(SettingError::unknown(unknown, path)),
            None => Ok(()),
        }
    }
}

/// Whether a text is a URL with a password, before the host or as the parameter `password`, which Postgres accepts.
fn has_password(text: &str) -> bool {
    let Some((_scheme, rest)) = text.split_once("://") else { return false };
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let credentials = authority.rsplit_once('@').map(|(credentials, _host)| credentials);
    let password = credentials.and_then(|credentials| credentials.split_once(':'));
    password.is_some_and(|(_user, password)| !password.is_empty()) || rest.contains("password=")
}

fn is_alias(variable: &str) -> bool {
    ALIASES.iter().any(|(_, alias)| *alias == variable)
}

/// Returns the name of a setting in the environment. TLS is the listeners', so its variables leave out `HTTP`.
fn variable(key: &str) -> String {
    let name = if key.starts_with("http.tls.") { &key["http.".len()..] } else { key };
    format!("WEIR_{}", name.replace('.', "_").to_uppercase())
}

/// One sentence: the setting, its value unless it is secret, and what is allowed.
#[derive(Debug, thiserror::Error)]
pub struct SettingError(String);

impl SettingError {
    /// A value that is not allowed.
    pub fn new(name: impl fmt::Display, value: impl fmt::Display, allowed: impl fmt::Display) -> Self {
        Self(format!("{name} is \"{value}\", but must be {allowed}"))
    }

    /// A secret value that is not allowed. The value is not shown.
    pub fn secret(name: impl fmt::Display, allowed: &str) -> Self {
        Self(format!(
            "{name} is set to something that is not allowed (not shown, it may hold a secret): it must be {allowed}"
        ))
    }

    /// A valid value that names something unusable, such as an unsuitable database.
    pub fn unusable(name: impl fmt::Display, value: impl fmt::Display, reason: impl fmt::Display) -> Self {
        Self(format!("{name} is \"{value}\", which cannot be used: {reason}"))
    }

    /// A valid value that conflicts with existing data. `problem` is the whole sentence.
    pub fn conflict(problem: String) -> Self {
        Self(problem)
    }

    fn unknown(key: &str, path: &Path) -> Self {
        Self(format!("{key} in {} is not a setting; weir.default.toml lists all settings", path.display()))
    }
}

impl fmt::Display for SettingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
