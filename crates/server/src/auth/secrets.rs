//! Secrets that nobody gave: made once, kept in the data directory, readable by its owner alone.

use std::fs::{DirBuilder, File};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use crate::config::source::SettingError;

/// The operator's key.
pub const ADMIN_KEY_FILE: &str = "admin.key";
/// The key tokens are signed with.
pub const JWT_SECRET_FILE: &str = "jwt.secret";

/// The secret of that name, made if it is not there. Processes that start at once agree on one.
///
/// # Errors
/// When the directory or file cannot be made or read.
pub fn load_or_create(data: &Path, name: &str) -> Result<String, SettingError> {
    let path = data.join(name);
    try_load_or_create(data, &path).map_err(|error| {
        let allowed = format!("a directory where {} can be kept ({error})", path.display());
        SettingError::new("data", data.display(), allowed)
    })
}

/// Makes the data directory, for its owner alone.
///
/// # Errors
/// When it cannot be made.
pub fn create_directory(data: &Path) -> std::io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(data)
}

fn try_load_or_create(data: &Path, path: &Path) -> std::io::Result<String> {
    if let Some(secret) = load(path)? {
        return Ok(secret);
    }
    create_directory(data)?;
    // Written whole under another name and then linked: nobody ever reads half a secret, and the first one wins.
    let draft = tempfile::Builder::new().permissions(owner_only()).tempfile_in(data)?;
    draft.as_file().write_all_synced(generate()?.as_bytes())?;
    match draft.persist_noclobber(path) {
        Ok(_) => {}
        Err(error) if error.error.kind() == ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error.error),
    }
    load(path)?.ok_or_else(|| std::io::Error::other("it is empty; remove it to have a new one made"))
}

fn load(path: &Path) -> std::io::Result<Option<String>> {
    let mut text = String::new();
    match File::options().read(true).mode(0o600).open(path) {
        Ok(mut file) => file.read_to_string(&mut text)?,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let text = text.trim();
    if text.is_empty() {
        return Err(std::io::Error::other("it is empty; remove it to have a new one made"));
    }
    Ok(Some(text.to_owned()))
}

fn owner_only() -> std::fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(0o600)
}

/// 256 bits from the system, as text that survives a shell.
fn generate() -> std::io::Result<String> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(std::io::Error::other)?;
    Ok(URL_SAFE_NO_PAD.encode(bytes))
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

    #[test]
    fn a_secret_is_made_once_for_its_owner_alone() {
        let parent = tempfile::tempdir().unwrap();
        let data = parent.path().join("data");
        let first = load_or_create(&data, "a").unwrap();
        assert_eq!(load_or_create(&data, "a").unwrap(), first);
        assert_ne!(load_or_create(&data, "b").unwrap(), first);
        assert!(first.len() >= 43, "256 bits in base64");
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&data), mode(&data.join("a"))), (0o700, 0o600));
        assert_eq!(std::fs::read_dir(&data).unwrap().count(), 2, "no draft is left behind");
    }

    #[test]
    fn processes_that_start_at_once_agree_on_one_secret() {
        let data = tempfile::tempdir().unwrap();
        let threads: Vec<_> = (0..16)
            .map(|_| {
                let data = data.path().to_owned();
                std::thread::spawn(move || load_or_create(&data, "a").unwrap())
            })
            .collect();
        let mut secrets: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        secrets.dedup();
        assert_eq!(secrets.len(), 1);
    }

    #[test]
    fn an_unwritable_directory_is_a_sentence_about_data() {
        let sentence = load_or_create(Path::new("/proc/nowhere"), "a").unwrap_err().to_string();
        assert!(sentence.contains("data") && sentence.contains("/proc/nowhere"), "{sentence}");
    }
}
