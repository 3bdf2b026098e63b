//! Refuses to start on a data directory that has lost its database. The embedded engine would create a new one and serve it as
//! if nothing had been accepted before.

use std::path::Path;

use weir_store::Result;
use weir_store_sqlite::Sqlite;

use crate::settings::Settings;
use crate::settings::source::SettingError;
use crate::settings::store::EngineChoice;

/// Fails when the directory has no database although it once had one: there is a write-ahead log, or there are secrets beside
/// the engine's lock file. Secrets without a lock file may have been put there for a first start, or by servers on Postgres.
pub(crate) fn check(settings: &Settings, secrets: &[&str]) -> Result<(), SettingError> {
    let data = &settings.process.data;
    if !needs_database(settings) {
        return Ok(());
    }
    let has_run_here = data.join(weir_store_sqlite::LOCK_FILE).exists();
    let secrets = secrets.iter().copied().filter(|_| has_run_here);
    let files = std::iter::once(weir_store_sqlite::WAL_FILE).chain(secrets);
    let traces: Vec<&str> = files.filter(|file| is_not_empty(&data.join(file))).collect();
    if traces.is_empty() {
        return Ok(());
    }
    let traces = traces.join(", ");
    let allowed = format!(
        "a directory that still has its database: weir.db is missing or empty although {traces} is there; restore weir.db \
         from a backup, or choose another --data, or, to begin with an empty database, move {traces} away"
    );
    Err(SettingError::new("data", data.display(), allowed))
}

/// Creates the database of a new directory before its secrets, so that a start that fails in between does not look like a lost
/// database to the next one.
pub(crate) fn create_database_first(settings: &Settings) -> Result<()> {
    if needs_database(settings) {
        drop(Sqlite::open(&settings.process.data)?);
    }
    Ok(())
}

fn needs_database(settings: &Settings) -> bool {
    settings.store.engine == EngineChoice::Embedded
        && !weir_store_sqlite::has_database(&settings.process.data)
}

fn is_not_empty(path: &Path) -> bool {
    path.metadata().is_ok_and(|metadata| metadata.len() > 0)
}
