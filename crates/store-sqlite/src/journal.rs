//! A journal in front of a table, which makes saving many rows cheap.
//!
//! Rows in random order would each change a different page of their table, and a commit writes whole pages. So the rows of
//! a large batch are appended together, as one row of the journal, in the commit that decided them. They are folded into
//! the table later: in the order of its index, so that one page takes several rows; only the last of several changes to
//! a row; and a few with each batch, so that no batch waits for many. A crash loses nothing: the journal is loaded before
//! it is used.
//!
//! Only the writer thread uses a journal, in the order of its transactions. An undo log of the current transaction makes a
//! failed job cost only its own changes: the journal is loaded once, never again after an error.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use rusqlite::Connection;

use crate::error::fault;
use crate::writer::WriterTurn;

/// A batch of at most this many rows is saved in the table directly, unless the journal has unfolded rows.
pub(crate) const IN_PLACE_MAX: usize = 8;
/// Rows folded for every one that is appended: more than one, so that every fold ends.
const FOLDED_PER_ROW: usize = 2;
/// Rows folded with a batch at least, so that small batches end a fold, too.
const FOLDED_MIN: usize = 64;
/// Rows folded between two checks of the turn.
const FOLDED_PER_STEP: usize = 256;

/// A table that has a journal in front of it.
pub(crate) trait JournaledTable {
    /// Sorts like the table's index.
    type Key: Clone + fmt::Debug + Ord;
    type Value: Clone + fmt::Debug;

    /// The journal's table, for errors.
    const NAME: &'static str;
    /// SQL that appends one batch.
    const APPEND: &'static str;
    /// SQL that reads all batches in order: their ids and entries.
    const READ: &'static str;
    /// SQL that deletes the batches up to an id.
    const CLEAR: &'static str;
    /// Pending rows at which a fold starts: the more there are, the more of them share a page.
    const FOLD_AT: usize;
    /// Age of the oldest pending row at which a fold starts with fewer.
    const FOLD_AFTER: Duration;

    fn encode(key: &Self::Key, value: &Self::Value, entries: &mut Vec<u8>);
    /// Takes one entry off the front, or returns `None` if [`encode`](Self::encode) did not write these bytes.
    fn decode(entries: &mut &[u8]) -> Option<(Self::Key, Self::Value)>;
    /// Writes rows to the table itself.
    fn save(connection: &Connection, rows: &[(Self::Key, Self::Value)]) -> rusqlite::Result<()>;
}

/// Rows that are in the journal and not in their table yet.
#[derive(Debug)]
pub(crate) struct Journal<T: JournaledTable> {
    /// Rows of the last batches, which the next fold takes.
    pending: BTreeMap<T::Key, T::Value>,
    pending_since: Option<Instant>,
    /// Rows that the current fold has not saved yet; older than all pending ones.
    folding: BTreeMap<T::Key, T::Value>,
    /// The id of the last batch with pending rows.
    last_pending_id: i64,
    /// The id of the last batch with rows of the current fold.
    last_folding_id: i64,
    /// The number of finished folds.
    folds: u64,
    /// Whether the journal was read from the database.
    is_loaded: bool,
    /// How to undo what the current transaction has changed here.
    undo_log: Vec<Undo<T::Key, T::Value>>,
}

/// A change of a journal, with the state before it.
#[derive(Debug)]
enum Undo<K, V> {
    /// A row became pending, and replaced this value.
    RowAdded(K, Option<V>),
    BatchAppended {
        last_pending_id: i64,
        pending_since: Option<Instant>,
    },
    FoldStarted {
        last_folding_id: i64,
        pending_since: Option<Instant>,
    },
    /// Rows left the current fold.
    RowsRemoved(Vec<(K, V)>),
    FoldFinished,
}

impl<T: JournaledTable> Default for Journal<T> {
    fn default() -> Self {
        Self {
            pending: BTreeMap::new(),
            pending_since: None,
            folding: BTreeMap::new(),
            last_pending_id: 0,
            last_folding_id: 0,
            folds: 0,
            is_loaded: false,
            undo_log: Vec::new(),
        }
    }
}

impl<T: JournaledTable> Journal<T> {
    /// Reads the journal from the database, unless it is loaded.
    pub(crate) fn load(&mut self, connection: &Connection) -> rusqlite::Result<()> {
        if self.is_loaded {
            return Ok(());
        }
        let (mut pending, mut last_pending_id) = (BTreeMap::new(), 0);
        let mut statement = connection.prepare_cached(T::READ)?;
        let mut batches = statement.query([])?;
        while let Some(batch) = batches.next()? {
            last_pending_id = batch.get(0)?;
            let mut entries = batch.get_ref(1)?.as_blob()?;
            while !entries.is_empty() {
                let unreadable = || fault(format!("{} has a truncated or unreadable batch", T::NAME));
                let (key, value) = T::decode(&mut entries).ok_or_else(unreadable)?;
                pending.insert(key, value);
            }
        }
        self.pending_since = (!pending.is_empty()).then(Instant::now);
        (self.pending, self.last_pending_id) = (pending, last_pending_id);
        // This transaction has not changed the journal yet, so what was read is valid even if it is rolled back.
        self.is_loaded = true;
        Ok(())
    }

    /// Forgets how to roll back: the transaction was committed.
    pub(crate) fn commit(&mut self) {
        self.undo_log.clear();
    }

    /// The length of the undo log, for [`Journal::roll_back_to`].
    pub(crate) fn savepoint(&self) -> usize {
        self.undo_log.len()
    }

    /// Undoes the changes since a savepoint, the last one first.
    pub(crate) fn roll_back_to(&mut self, savepoint: usize) {
        for undo in self.undo_log.drain(savepoint..).rev() {
            match undo {
                Undo::RowAdded(key, Some(before)) => drop(self.pending.insert(key, before)),
                Undo::RowAdded(key, None) => drop(self.pending.remove(&key)),
                Undo::BatchAppended { last_pending_id, pending_since } => {
                    (self.last_pending_id, self.pending_since) = (last_pending_id, pending_since);
                }
                Undo::FoldStarted { last_folding_id, pending_since } => {
                    self.pending = std::mem::take(&mut self.folding);
                    (self.last_folding_id, self.pending_since) = (last_folding_id, pending_since);
                }
                Undo::RowsRemoved(rows) => self.folding.extend(rows),
                Undo::FoldFinished => self.folds -= 1,
            }
        }
    }

    /// Whether the journal has rows that the table does not have. True until it is loaded.
    pub(crate) fn has_unfolded_rows(&self) -> bool {
        !self.is_loaded || !self.pending.is_empty() || !self.folding.is_empty()
    }

    pub(crate) fn get(&self, key: &T::Key) -> Option<&T::Value> {
        self.pending.get(key).or_else(|| self.folding.get(key))
    }

    /// Adds a row to the batch that is encoded in `entries`; [`Journal::append`] then writes it.
    pub(crate) fn add_row(&mut self, key: T::Key, value: T::Value, entries: &mut Vec<u8>) {
        T::encode(&key, &value, entries);
        let before = self.pending.insert(key.clone(), value);
        self.undo_log.push(Undo::RowAdded(key, before));
    }

    /// Writes a batch within the current transaction.
    pub(crate) fn append(&mut self, connection: &Connection, entries: &[u8]) -> rusqlite::Result<()> {
        if entries.is_empty() {
            return Ok(());
        }
        connection.prepare_cached(T::APPEND)?.execute([entries])?;
        let (last_pending_id, pending_since) = (self.last_pending_id, self.pending_since);
        self.undo_log.push(Undo::BatchAppended { last_pending_id, pending_since });
        self.last_pending_id = connection.last_insert_rowid();
        self.pending_since.get_or_insert_with(Instant::now);
        Ok(())
    }

    /// Drops a row from the current fold, because the table has a newer one. The journal still has the old row until the
    /// fold ends, so the caller has to append the newer one, or a crash would bring the old one back.
    pub(crate) fn drop_folding(&mut self, key: &T::Key) {
        let dropped = self.folding.remove_entry(key);
        self.undo_log.extend(dropped.map(|row| Undo::RowsRemoved(vec![row])));
    }

    /// Moves at most `max` rows into the table, within the current transaction.
    pub(crate) fn fold(&mut self, connection: &Connection, max: usize) -> rusqlite::Result<()> {
        self.load(connection)?;
        if self.folding.is_empty() {
            let (last_folding_id, pending_since) = (self.last_folding_id, self.pending_since.take());
            self.undo_log.push(Undo::FoldStarted { last_folding_id, pending_since });
            self.folding = std::mem::take(&mut self.pending);
            self.last_folding_id = self.last_pending_id;
        }
        let mut rows = Vec::with_capacity(max.min(self.folding.len()));
        while rows.len() < max
            && let Some(row) = self.folding.pop_first()
        {
            rows.push(row);
        }
        // Logged before they are saved, so that none is lost if that fails.
        self.undo_log.push(Undo::RowsRemoved(rows));
        if let Some(Undo::RowsRemoved(rows)) = self.undo_log.last() {
            T::save(connection, rows)?;
        }
        if self.folding.is_empty() {
            connection.prepare_cached(T::CLEAR)?.execute([self.last_folding_id])?;
            self.folds += 1;
            self.undo_log.push(Undo::FoldFinished);
        }
        Ok(())
    }

    /// Folds for one turn. Breaks when the table has all rows that the journal had at the first turn; `target` stores
    /// which fold that is. Later rows are not waited for, so that this ends under any load.
    pub(crate) fn fold_for_one_turn(
        &mut self,
        connection: &Connection,
        target: &mut Option<u64>,
        turn: &WriterTurn,
    ) -> rusqlite::Result<ControlFlow<()>> {
        self.load(connection)?;
        let folds_left = u64::from(!self.pending.is_empty()) + u64::from(!self.folding.is_empty());
        let target = *target.get_or_insert(self.folds + folds_left);
        while self.has_unfolded_rows() && self.folds < target {
            if !turn.has_time() {
                return Ok(ControlFlow::Continue(()));
            }
            self.fold(connection, FOLDED_PER_STEP)?;
        }
        Ok(ControlFlow::Break(()))
    }

    /// Folds some rows if a fold is due: more than were appended, so that unfolded rows stay within their bound.
    pub(crate) fn fold_if_due(&mut self, connection: &Connection, appended: usize) -> rusqlite::Result<()> {
        if self.is_fold_due() {
            self.fold(connection, (appended * FOLDED_PER_ROW).max(FOLDED_MIN))
        } else {
            Ok(())
        }
    }

    /// Whether to fold now: the journal is not loaded yet, a fold is in progress, or pending rows are old or many.
    pub(crate) fn is_fold_due(&self) -> bool {
        let is_old = self.pending_since.is_some_and(|since| since.elapsed() >= T::FOLD_AFTER);
        !self.is_loaded || !self.folding.is_empty() || is_old || self.pending.len() >= T::FOLD_AT
    }

    /// The numbers of pending rows and of rows in the current fold.
    #[cfg(test)]
    pub(crate) fn sizes(&self) -> (usize, usize) {
        (self.pending.len(), self.folding.len())
    }

    #[cfg(test)]
    pub(crate) fn folding_keys(&self) -> Vec<T::Key> {
        self.folding.keys().cloned().collect()
    }
}

/// Writes a text after its length (2 bytes, little-endian).
pub(crate) fn put_text(entries: &mut Vec<u8>, text: &str) {
    // Names have at most 255 characters, which is 1,020 bytes, and the other texts are shorter.
    let length = u16::try_from(text.len()).expect("a text of a journal has at most 65,535 bytes");
    entries.extend_from_slice(&length.to_le_bytes());
    entries.extend_from_slice(text.as_bytes());
}

/// Takes a text that [`put_text`] wrote off the front.
pub(crate) fn take_text<'e>(entries: &mut &'e [u8]) -> Option<&'e str> {
    let length = u16::from_le_bytes(take_bytes(entries)?);
    let (text, rest) = entries.split_at_checked(usize::from(length))?;
    *entries = rest;
    str::from_utf8(text).ok()
}

/// Takes `N` bytes off the front.
pub(crate) fn take_bytes<const N: usize>(entries: &mut &[u8]) -> Option<[u8; N]> {
    let (bytes, rest) = entries.split_first_chunk()?;
    *entries = rest;
    Some(*bytes)
}

#[cfg(test)]
mod tests;
