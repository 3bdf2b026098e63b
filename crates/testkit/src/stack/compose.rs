//! Reads what Weir's compose files say: `compose.yaml`, what it includes, and the variables of the image.
//!
//! Knows the part of Compose that those files use. Anchors are YAML's; `${NAME:-default}` is replaced here.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// A compose file with everything that it includes.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Compose {
    include: Vec<String>,
    pub services: BTreeMap<String, Service>,
    /// The named volumes.
    pub volumes: BTreeMap<String, Value>,
    /// Where the paths of the services begin.
    #[serde(skip)]
    pub directory: PathBuf,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Service {
    pub image: String,
    pub build: Option<Value>,
    pub command: Vec<String>,
    /// A variable without a value is passed on if it is set.
    environment: BTreeMap<String, Value>,
    /// `127.0.0.1:8000:80`.
    pub ports: Vec<String>,
    /// `name:/path` or `./file:/path:ro`.
    pub volumes: Vec<String>,
    pub depends_on: BTreeMap<String, Dependency>,
    pub healthcheck: Option<HealthCheck>,
    pub profiles: Vec<String>,
    pub restart: Option<String>,
    pub mem_limit: Option<String>,
}

#[derive(Debug, Deserialize)]
pub struct Dependency {
    pub condition: String,
}

#[derive(Debug, Deserialize)]
pub struct HealthCheck {
    /// `CMD` and a command, or `CMD-SHELL` and a line.
    pub test: Vec<String>,
}

impl Compose {
    /// Reads `compose.yaml` in the root of the repository. `variable` returns the values of variables that are set.
    pub fn read(root: &Path, variable: &dyn Fn(&str) -> Option<String>) -> Result<Self, String> {
        Self::read_file(&root.join("compose.yaml"), variable)
    }

    fn read_file(file: &Path, variable: &dyn Fn(&str) -> Option<String>) -> Result<Self, String> {
        let mut compose: Self = read_yaml(file, variable)?;
        compose.directory = file.parent().unwrap_or(Path::new(".")).to_owned();
        for included in std::mem::take(&mut compose.include) {
            let included = Self::read_file(&compose.directory.join(included), variable)?;
            if !compose.services.is_empty() {
                return Err(format!("{} has services beside those that it includes", file.display()));
            }
            compose = included;
        }
        Ok(compose)
    }
}

impl Service {
    /// The variables that have a value.
    pub fn environment(&self) -> BTreeMap<String, String> {
        let text = |value: &Value| match value {
            Value::Null => None,
            Value::String(text) => Some(text.clone()),
            other => Some(other.to_string()),
        };
        self.environment.iter().filter_map(|(name, value)| Some((name.clone(), text(value)?))).collect()
    }

    /// The names of all variables.
    pub fn variables(&self) -> impl Iterator<Item = &str> {
        self.environment.keys().map(String::as_str)
    }
}

/// The variables that a Dockerfile sets.
pub fn image_environment(dockerfile: &str) -> BTreeMap<String, String> {
    let words = dockerfile.lines().filter(|line| !line.starts_with('#')).flat_map(str::split_whitespace);
    let pairs = words.filter_map(|word| word.split_once('='));
    let pairs = pairs.filter(|(name, _)| name.starts_with("WEIR_"));
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// The variables of an environment file, `NAME=value` a line.
pub fn environment_file(file: &Path) -> BTreeMap<String, String> {
    let text = fs::read_to_string(file).unwrap_or_default();
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let pairs = lines.filter_map(|line| line.split_once('='));
    pairs.map(|(name, value)| (name.trim().to_owned(), value.trim().to_owned())).collect()
}

/// Reads a YAML file and replaces the variables in it.
fn read_yaml<T: DeserializeOwned>(
    file: &Path,
    variable: &dyn Fn(&str) -> Option<String>,
) -> Result<T, String> {
    let explain = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
    let text = fs::read_to_string(file).map_err(|error| explain(&error))?;
    let mut value: Value = serde_saphyr::from_str(&text).map_err(|error| explain(&error))?;
    interpolate_all(&mut value, variable)?;
    serde_json::from_value(value).map_err(|error| explain(&error))
}

fn interpolate_all(value: &mut Value, variable: &dyn Fn(&str) -> Option<String>) -> Result<(), String> {
    match value {
        Value::String(text) => *text = interpolate(text, variable)?,
        Value::Array(items) => items.iter_mut().try_for_each(|item| interpolate_all(item, variable))?,
        Value::Object(items) => items.values_mut().try_for_each(|item| interpolate_all(item, variable))?,
        _ => {}
    }
    Ok(())
}

/// Replaces each `${NAME:-default}`, the innermost first, because they may be nested.
fn interpolate(text: &str, variable: &dyn Fn(&str) -> Option<String>) -> Result<String, String> {
    let mut text = text.to_owned();
    while let Some(start) = text.rfind("${") {
        let inner = &text[start + 2..];
        let length = inner.find('}').ok_or_else(|| format!("no }} after ${{ in {text}"))?;
        let (name, default) = inner[..length].split_once(":-").unwrap_or((&inner[..length], ""));
        let value = variable(name).filter(|value| !value.is_empty()).unwrap_or_else(|| default.to_owned());
        text = format!("{}{value}{}", &text[..start], &inner[length + 1..]);
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_win_over_defaults_which_may_be_nested() {
        let none = |_: &str| None;
        let text = "${A:-x://${B:-b}@h}/${C}";
        assert_eq!(interpolate(text, &none).unwrap(), "x://b@h/");
        let some = |name: &str| (name == "B").then(|| "secret".to_owned());
        assert_eq!(interpolate(text, &some).unwrap(), "x://secret@h/");
        let all = |name: &str| Some(name.to_lowercase()).filter(|name| name == "a");
        assert_eq!(interpolate(text, &all).unwrap(), "a/");
        assert!(interpolate("${A", &none).is_err());
    }

    #[test]
    fn anchors_numbers_and_variables_without_a_value_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(directory.path().join(name), text).unwrap();
        write("compose.yaml", "include: [inner/stack.yml]\n");
        fs::create_dir(directory.path().join("inner")).unwrap();
        let inner = "
services:
  a: &a
    image: x:1
    environment:
      N: 1
      T: \"true\"
      U: ${U:-u}
      PASSED_ON:
    depends_on: {b: {condition: service_healthy}}
  b:
    <<: *a
    command: [run, --port, \"80\"]
volumes: {data: }
";
        write("inner/stack.yml", inner);
        let compose = Compose::read(directory.path(), &|_| None).unwrap();
        assert_eq!(compose.directory, directory.path().join("inner"));
        let a = &compose.services["a"];
        let expected = [("N", "1"), ("T", "true"), ("U", "u")];
        let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(a.environment(), BTreeMap::from(expected));
        assert!(a.variables().any(|name| name == "PASSED_ON"));
        assert_eq!(a.depends_on["b"].condition, "service_healthy");
        assert_eq!(compose.services["b"].image, "x:1");
        assert_eq!(compose.services["b"].command, ["run", "--port", "80"]);
        assert!(compose.volumes.contains_key("data"));
    }
}
