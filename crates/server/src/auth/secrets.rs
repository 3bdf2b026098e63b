//! Secrets that nobody gave: made once, kept in the data directory, readable by its owner alone.

use std::fs::{DirBuilder, File};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};

use crate::settings::auth::ADMIN_KEY_MIN;
use crate::settings::source::SettingError;

/// A secret that lives in a file of the data directory.
#[derive(Clone, Copy, Debug)]
pub struct Secret {
    /// The file's name.
    pub file: &'static str,
    /// The shortest that is accepted, in bytes.
    pub bytes_min: usize,
}

/// The operator's key.
pub const ADMIN_KEY: Secret = Secret { file: "admin.key", bytes_min: ADMIN_KEY_MIN };
/// The key tokens are signed with.
pub const JWT_SECRET: Secret = Secret { file: "jwt.secret", bytes_min: 32 };

/// What callbacks are signed with, and what the secrets of tenants' webhooks are derived from.
pub const WEBHOOK_SECRET: Secret = Secret { file: "webhook.secret", bytes_min: 38 };

/// What payloads of requests are sealed with.
pub(crate) const REQUEST_KEY: Secret = Secret { file: "request.key", bytes_min: 43 };

/// Files that only the start of a server makes: where one of them is, a server has run.
pub(crate) const MADE_BY_SERVERS: [&str; 4] =
    [ADMIN_KEY.file, JWT_SECRET.file, WEBHOOK_SECRET.file, REQUEST_KEY.file];

/// The secret of that name, made if it is not there. Processes that start at once agree on one.
/// Fails when the directory or file cannot be made or read.
pub fn load_or_create(data: &Path, secret: Secret) -> Result<String, SettingError> {
    load_or_make(data, secret, generate)
}

/// The secret of webhooks, made if it is not there, in the form their standard gives it.
/// Fails when the directory or file cannot be made or read.
pub fn load_or_create_webhook_secret(data: &Path) -> Result<String, SettingError> {
    load_or_make(data, WEBHOOK_SECRET, || Ok(format!("whsec_{}", STANDARD.encode(random()?))))
}

fn load_or_make(
    data: &Path,
    secret: Secret,
    make: impl FnOnce() -> std::io::Result<String>,
) -> Result<String, SettingError> {
    let path = data.join(secret.file);
    try_load_or_create(data, &path, secret.bytes_min, make).map_err(|error| {
        let allowed = format!("a directory where {} can be kept ({error})", path.display());
        SettingError::new("data", data.display(), allowed)
    })
}

/// Makes the data directory, for its owner alone.
pub fn create_directory(data: &Path) -> std::io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(data)
}

fn try_load_or_create(
    data: &Path,
    path: &Path,
    bytes_min: usize,
    make: impl FnOnce() -> std::io::Result<String>,
) -> std::io::Result<String> {
    if let Some(secret) = load(path, bytes_min)? {
        return Ok(secret);
    }
    create_directory(data)?;
    // Written whole under another name and then linked: nobody ever reads half a secret, and the first one wins.
    let draft = tempfile::Builder::new().permissions(owner_only()).tempfile_in(data)?;
    draft.as_file().write_all_synced(make()?.as_bytes())?;
    match draft.persist_noclobber(path) {
        Ok(_) => {}
        Err(error) if error.error.kind() == ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error.error),
    }
    load(path, bytes_min)?.ok_or_else(|| std::io::Error::other("it is gone again"))
}

fn load(path: &Path, bytes_min: usize) -> std::io::Result<Option<String>> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let secret = text.trim();
    if secret.len() < bytes_min || secret.chars().any(char::is_control) {
        let problem =
            format!("it must hold one line of at least {bytes_min} bytes; remove it to have a new one made");
        return Err(std::io::Error::other(problem));
    }
    Ok(Some(secret.to_owned()))
}

fn owner_only() -> std::fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(0o600)
}

/// 256 bits from the system, as text that survives a shell.
fn generate() -> std::io::Result<String> {
    random().map(|bytes| URL_SAFE_NO_PAD.encode(bytes))
}

fn random() -> std::io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(std::io::Error::other)?;
    Ok(bytes)
}

trait WriteAllSynced {
    fn write_all_synced(&self, bytes: &[u8]) -> std::io::Result<()>;
}

impl WriteAllSynced for File {
    fn write_all_synced(&self, bytes: &[u8]) -> std::io::Result<()> {
        let mut file = self;
        file.write_all(bytes)?;
        self.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const A: Secret = Secret { file: "a", bytes_min: 16 };
    const B: Secret = Secret { file: "b", bytes_min: 16 };

    #[test]
    fn a_file_with_a_secret_too_short_or_broken_is_refused() {
        let data = tempfile::tempdir().unwrap();
        for bad in ["", "short", "long enough but\non two lines"] {
            std::fs::write(data.path().join("a"), bad).unwrap();
            let sentence = load_or_create(data.path(), A).unwrap_err().to_string();
            assert!(sentence.contains("at least 16 bytes"), "{sentence}");
        }
    }

    #[test]
    fn a_secret_is_made_once_for_its_owner_alone() {
        let parent = tempfile::tempdir().unwrap();
        let data = parent.path().join("data");
        let first = load_or_create(&data, A).unwrap();
        assert_eq!(load_or_create(&data, A).unwrap(), first);
        assert_ne!(load_or_create(&data, B).unwrap(), first);
        assert!(first.len() >= 43, "256 bits in base64");
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&data), mode(&data.join("a"))), (0o700, 0o600));
        assert_eq!(std::fs::read_dir(&data).unwrap().count(), 2, "no draft is left behind");
    }

    #[test]
    fn a_secret_of_webhooks_is_one_that_the_standard_takes() {
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
    fn an_unwritable_directory_is_a_sentence_about_data() {
        let sentence = load_or_create(Path::new("/proc/nowhere"), A).unwrap_err().to_string();
        assert!(sentence.contains("data") && sentence.contains("/proc/nowhere"), "{sentence}");
    }
}
