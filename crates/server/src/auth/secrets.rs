//! Generated secrets: created once, stored in the data directory, readable only by their owner.

use std::fs::DirBuilder;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};

use crate::settings::auth::ADMIN_KEY_MIN;
use crate::settings::source::SettingError;

/// A secret in a file of the data directory.
#[derive(Clone, Copy, Debug)]
pub struct SecretFile {
    /// The file's name.
    pub file: &'static str,
    /// The shortest secret that is accepted, in bytes.
    pub bytes_min: usize,
}

/// The operator's key.
pub const ADMIN_KEY: SecretFile = SecretFile { file: "admin.key", bytes_min: ADMIN_KEY_MIN };
/// Signs tokens.
pub const JWT_SECRET: SecretFile = SecretFile { file: "jwt.secret", bytes_min: 32 };
/// Signs callbacks; the secrets of tenants' webhooks are derived from it.
pub const WEBHOOK_SECRET: SecretFile = SecretFile { file: "webhook.secret", bytes_min: 38 };
/// Encrypts payloads of requests.
pub(crate) const REQUEST_KEY: SecretFile = SecretFile { file: "request.key", bytes_min: 43 };

/// The files that a server creates when it starts. If one of them exists, a server has run in this directory.
pub(crate) const SERVER_FILES: [&str; 4] =
    [ADMIN_KEY.file, JWT_SECRET.file, WEBHOOK_SECRET.file, REQUEST_KEY.file];

/// Loads a secret, and creates it if its file does not exist. Processes that start at once agree on one secret.
/// Fails when the directory or file cannot be created or read.
pub fn load_or_create(data: &Path, secret: SecretFile) -> Result<String, SettingError> {
    load_or_create_with(data, secret, generate)
}

/// Loads or creates the webhook secret, in the format of the Standard Webhooks specification.
/// Fails when the directory or file cannot be created or read.
pub fn load_or_create_webhook_secret(data: &Path) -> Result<String, SettingError> {
    load_or_create_with(data, WEBHOOK_SECRET, || Ok(format!("whsec_{}", STANDARD.encode(random_bytes()?))))
}

fn load_or_create_with(
    data: &Path,
    secret: SecretFile,
    generate: impl FnOnce() -> std::io::Result<String>,
) -> Result<String, SettingError> {
    let path = data.join(secret.file);
    try_load_or_create(data, &path, secret.bytes_min, generate).map_err(|error| {
        let allowed = format!("a directory where {} can be stored ({error})", path.display());
        SettingError::new("data", data.display(), allowed)
    })
}

/// Creates the data directory, accessible only to its owner.
pub fn create_directory(data: &Path) -> std::io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(data)
}

fn try_load_or_create(
    data: &Path,
    path: &Path,
    bytes_min: usize,
    generate: impl FnOnce() -> std::io::Result<String>,
) -> std::io::Result<String> {
    if let Some(secret) = load(path, bytes_min)? {
        return Ok(secret);
    }
    create_directory(data)?;
    // Written under another name and then linked, so that no process reads half a secret and the first one wins.
    let mut file = tempfile::Builder::new().permissions(owner_only()).tempfile_in(data)?;
    file.write_all(generate()?.as_bytes())?;
    file.as_file().sync_all()?;
    match file.persist_noclobber(path) {
        Ok(_) => {}
        Err(error) if error.error.kind() == ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error.error),
    }
    load(path, bytes_min)?
        .ok_or_else(|| std::io::Error::other("the file was removed while the server started"))
}

fn load(path: &Path, bytes_min: usize) -> std::io::Result<Option<String>> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let secret = text.trim();
    if secret.len() < bytes_min || secret.chars().any(char::is_control) {
        let problem = format!(
            "it must hold one line of at least {bytes_min} bytes; remove it to have a new one created"
        );
        return Err(std::io::Error::other(problem));
    }
    Ok(Some(secret.to_owned()))
}

fn owner_only() -> std::fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(0o600)
}

/// Returns 256 random bits as text that needs no quoting in a shell.
fn generate() -> std::io::Result<String> {
    random_bytes().map(|bytes| URL_SAFE_NO_PAD.encode(bytes))
}

fn random_bytes() -> std::io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(std::io::Error::other)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const A: SecretFile = SecretFile { file: "a", bytes_min: 16 };
    const B: SecretFile = SecretFile { file: "b", bytes_min: 16 };

    #[test]
    fn a_file_with_a_secret_that_is_too_short_or_malformed_is_refused() {
        let data = tempfile::tempdir().unwrap();
        for bad in ["", "short", "long enough but\non two lines"] {
            std::fs::write(data.path().join("a"), bad).unwrap();
            let sentence = load_or_create(data.path(), A).unwrap_err().to_string();
            assert!(sentence.contains("at least 16 bytes"), "{sentence}");
        }
    }

    #[test]
    fn a_secret_is_created_once_and_only_its_owner_can_read_it() {
        let parent = tempfile::tempdir().unwrap();
        let data = parent.path().join("data");
        let first = load_or_create(&data, A).unwrap();
        assert_eq!(load_or_create(&data, A).unwrap(), first);
        assert_ne!(load_or_create(&data, B).unwrap(), first);
        assert!(first.len() >= 43, "256 bits in base64");
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&data), mode(&data.join("a"))), (0o700, 0o600));
        assert_eq!(std::fs::read_dir(&data).unwrap().count(), 2, "no temporary file is left behind");
    }

    #[test]
    fn a_webhook_secret_has_the_standard_format() {
        let data = tempfile::tempdir().unwrap();
        let secret = load_or_create_webhook_secret(data.path()).unwrap();
        assert!(weir_core::webhook::SigningSecret::parse(&secret).is_ok());
        assert_eq!(load_or_create_webhook_secret(data.path()).unwrap(), secret);
    }

    #[test]
    fn processes_that_start_at_once_agree_on_one_secret() {
        let data = tempfile::tempdir().unwrap();
        let threads: Vec<_> = (0..16)
            .map(|_| {
                let data = data.path().to_owned();
                std::thread::spawn(move || load_or_create(&data, A).unwrap())
            })
            .collect();
        let mut secrets: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        secrets.dedup();
        assert_eq!(secrets.len(), 1);
    }

    #[test]
    fn an_unwritable_directory_is_reported_as_the_setting_data() {
        let sentence = load_or_create(Path::new("/proc/nowhere"), A).unwrap_err().to_string();
        assert!(sentence.contains("data") && sentence.contains("/proc/nowhere"), "{sentence}");
    }
}
