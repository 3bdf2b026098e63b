//! Finds files whose modes let other users of this machine read secrets or change what credentials are checked against.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::settings::Settings;
use crate::settings::store::BrokerChoice;

/// Bits of a file's mode that grant access to the group and to others.
const READ: u32 = 0o044;
const WRITE: u32 = 0o022;

/// The secret fields of a JWKS's keys: those of a private key and of a symmetric key.
const PRIVATE_FIELDS: [&str; 2] = ["d", "k"];

/// A file that other users may read or change.
#[derive(Debug, PartialEq, Eq)]
struct ExposedFile {
    path: PathBuf,
    problem: &'static str,
    /// The command that restricts the file.
    remedy: String,
}

/// Logs each file with secrets that others can read or change. The start continues, because in a container there may be no
/// other users.
pub(crate) fn warn_about_exposed_files(settings: &Settings) {
    for ExposedFile { path, problem, remedy } in find(settings) {
        tracing::warn!(path = %path.display(), "{problem}: {remedy}");
    }
}

fn find(settings: &Settings) -> Vec<ExposedFile> {
    let data = &settings.process.data;
    let files = std::fs::read_dir(data).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let mut secret: Vec<PathBuf> = files.filter(|path| path.is_file()).collect();
    secret.sort();
    secret.extend(settings.file_with_secrets.clone());
    secret.extend(settings.request.keys_file.clone());
    secret.extend(settings.tls.as_ref().map(|tls| tls.key.clone()));
    if let BrokerChoice::Kafka(brokers) = &settings.store.broker {
        secret.extend(brokers.key_file().map(Path::to_owned));
    }
    let mut exposed: Vec<_> = secret.iter().filter_map(|path| check(path, READ | WRITE)).collect();
    exposed.extend(check(data, WRITE));
    if let Some(file) = &settings.auth.jwks_file {
        // Everybody may read public keys, but whoever can change them can sign tokens.
        let bits = if has_private_keys(file) { READ | WRITE } else { WRITE };
        exposed.extend(check(file, bits));
    }
    exposed
}

/// Returns the file if it grants others any of these bits. A file that cannot be inspected is reported where it is read.
fn check(path: &Path, bits: u32) -> Option<ExposedFile> {
    let granted = std::fs::metadata(path).ok()?.permissions().mode() & bits;
    let (problem, change) = if granted & READ != 0 {
        ("other users of this machine can read this file, which holds secrets", "go-rwx")
    } else if granted & WRITE != 0 {
        ("other users of this machine can change this, and with it who may call", "go-w")
    } else {
        return None;
    };
    let remedy = format!("chmod {change} {}", path.display());
    Some(ExposedFile { path: path.to_owned(), problem, remedy })
}

fn has_private_keys(jwks: &Path) -> bool {
    let set: Option<Value> = std::fs::read(jwks).ok().and_then(|text| serde_json::from_slice(&text).ok());
    let keys = set.as_ref().and_then(|set| set["keys"].as_array());
    keys.into_iter().flatten().any(|key| PRIVATE_FIELDS.iter().any(|field| key.get(*field).is_some()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::source::{Sources, flatten_toml};

    fn write(path: &Path, text: &str, mode: u32) {
        std::fs::write(path, text).unwrap();
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    }

    /// Returns the remedies for a directory that has a data directory, a settings file, key files and a JWKS file.
    fn remedies(directory: &Path) -> Vec<String> {
        let path = |name: &str| directory.join(name).to_str().unwrap().to_owned();
        let text = std::fs::read_to_string(path("weir.toml")).unwrap();
        let values = flatten_toml(Path::new("weir.toml"), &text).unwrap();
        let environment = [
            ("DATA", "data"),
            ("REQUEST_KEYS_FILE", "keys"),
            ("JWKS_FILE", "jwks.json"),
            ("TLS_CERT", "cert.pem"),
            ("TLS_KEY", "tls.key"),
        ];
        let environment = environment.map(|(name, file)| (format!("WEIR_{name}"), path(file)));
        let sources = Sources {
            environment: environment.into_iter().collect(),
            file: Some((PathBuf::from(path("weir.toml")), values)),
            ..Sources::default()
        };
        let exposed = find(&Settings::read(sources).unwrap());
        let prefix = format!("{}/", directory.display());
        exposed.into_iter().map(|exposed| exposed.remedy.replace(&prefix, "")).collect()
    }

    #[test]
    fn files_with_secrets_that_others_can_read_are_found_with_a_remedy() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        std::fs::create_dir(path("data")).unwrap();
        std::fs::set_permissions(path("data"), PermissionsExt::from_mode(0o755)).unwrap();
        let public = r#"{"keys":[{"kty":"EC"}]}"#;
        let files = ["data/admin.key", "data/weir.db", "keys", "tls.key"];
        let fill = |mode: u32, settings: &str, jwks: &str| {
            for name in files {
                write(&path(name), "x", mode);
            }
            write(&path("weir.toml"), settings, mode);
            write(&path("jwks.json"), jwks, mode);
        };
        let secret = "store = \"postgres://u:secret@h/d\"";
        fill(0o600, secret, public);
        assert_eq!(remedies(directory.path()), [""; 0]);
        fill(0o644, "roles = \"api\"", public);
        let secrets = files.map(|name| format!("chmod go-rwx {name}"));
        assert_eq!(remedies(directory.path()), secrets, "public keys and plain settings are no secret");
        fill(0o640, secret, r#"{"keys":[{"kty":"EC","d":"x"}]}"#);
        let all = ["data/admin.key", "data/weir.db", "weir.toml", "keys", "tls.key", "jwks.json"];
        assert_eq!(remedies(directory.path()), all.map(|name| format!("chmod go-rwx {name}")));
        fill(0o600, secret, public);
        write(&path("jwks.json"), public, 0o664);
        std::fs::set_permissions(path("data"), PermissionsExt::from_mode(0o775)).unwrap();
        assert_eq!(remedies(directory.path()), ["chmod go-w data", "chmod go-w jwks.json"]);
    }
}
