//! A journal before a table, which makes saving many rows cheap.
//!
//! Rows that come in no order would each change a page of their table, and a commit writes whole pages. So the rows of a large
//! batch are appended together, as one row of a journal, in the commit that decided them, and folded into the table later: in the
//! order of its index, so that one page takes several, only the last of several changes to a row, and a few with each batch, so
//! that nobody waits for many. A crash loses nothing: the journal is read before it is used.
//!
//! Only the writer thread reads and writes here, in the order of its transactions. When one of them is undone, the whole journal is
//! forgotten and read again.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use rusqlite::Connection;

use crate::error::fault;

/// A batch of so few rows is saved in place, unless the journal has older ones.
pub(crate) const IN_PLACE_MAX: usize = 8;
/// How many rows are folded for every one that is appended: more than one, so that every fold ends.
const FOLDED_PER_ROW: usize = 2;
/// How many are folded at least, so that small batches end a fold too.
const FOLDED_MIN: usize = 64;

/// A table that has a journal.
pub(crate) trait JournaledTable {
    /// In the order of the table's index.
    type Key: Clone + fmt::Debug + Ord;
    type Value: Clone + fmt::Debug;

    /// The journal's name, for errors.
    const NAME: &'static str;
    /// Appends one batch.
    const APPEND: &'static str;
    /// Reads all batches in order: their ids and entries.
    const READ: &'static str;
    /// Deletes the batches up to an id.
    const CLEAR: &'static str;
    /// How many rows the journal has before they are folded: the more, the more of them share a page.
    const FOLD_AT: usize;
    /// How long they stay there under little load.
    const FOLD_AFTER: Duration;

    fn encode(key: &Self::Key, value: &Self::Value, entries: &mut Vec<u8>);
    /// Takes one entry off the front. None when the bytes are not what [`encode`](Self::encode) writes.
    fn decode(entries: &mut &[u8]) -> Option<(Self::Key, Self::Value)>;
    /// Saves rows in the table.
    fn save(connection: &Connection, rows: &[(Self::Key, Self::Value)]) -> rusqlite::Result<()>;
}

/// What the writer thread knows of rows that are not in their table yet.
#[derive(Debug)]
pub(crate) struct Journal<T: JournaledTable> {
    /// The rows of the last batches.
    pending: BTreeMap<T::Key, T::Value>,
    pending_since: Option<Instant>,
    /// Rows on their way into the table; older than all that are pending.
    folding: BTreeMap<T::Key, T::Value>,
    /// The last batches with rows that are pending, and with rows that are on their way.
    pending_until: i64,
    folding_until: i64,
    /// Whether this is what the journal says.
    is_loaded: bool,
}

impl<T: JournaledTable> Default for Journal<T> {
    fn default() -> Self {
        Self {
            pending: BTreeMap::new(),
            pending_since: None,
            folding: BTreeMap::new(),
            pending_until: 0,
            folding_until: 0,
            is_loaded: false,
        }
    }
}

impl<T: JournaledTable> Journal<T> {
    /// Reads the journal, unless it is known.
    pub(crate) fn load(&mut self, connection: &Connection) -> rusqlite::Result<()> {
        if self.is_loaded {
            return Ok(());
        }
        let mut statement = connection.prepare_cached(T::READ)?;
        let mut batches = statement.query([])?;
        while let Some(batch) = batches.next()? {
            self.pending_until = batch.get(0)?;
            let mut entries = batch.get_ref(1)?.as_blob()?;
            while !entries.is_empty() {
                let cut_off = || fault(format!("{} holds a row that is cut off", T::NAME));
                let (key, value) = T::decode(&mut entries).ok_or_else(cut_off)?;
                self.pending.insert(key, value);
            }
        }
        self.pending_since = (!self.pending.is_empty()).then(Instant::now);
        self.is_loaded = true;
        Ok(())
    }

    /// Forgets everything: a transaction was undone. The journal is read again before it is used.
    pub(crate) fn forget(&mut self) {
        *self = Self::default();
    }

    /// Whether the journal has rows that the table does not have. True as long as it was not read.
    pub(crate) fn is_behind(&self) -> bool {
        !self.is_loaded || !self.pending.is_empty() || !self.folding.is_empty()
    }

    /// A row as the journal has it, if it does.
    pub(crate) fn get(&self, key: &T::Key) -> Option<&T::Value> {
        self.pending.get(key).or_else(|| self.folding.get(key))
    }

    /// Adds a row to a batch, whose entries are to be appended.
    pub(crate) fn add(&mut self, key: T::Key, value: T::Value, entries: &mut Vec<u8>) {
        T::encode(&key, &value, entries);
        self.pending.insert(key, value);
    }

    /// Appends a batch, in the transaction under way.
    pub(crate) fn append(&mut self, connection: &Connection, entries: &[u8]) -> rusqlite::Result<()> {
        if entries.is_empty() {
            return Ok(());
        }
        connection.prepare_cached(T::APPEND)?.execute([entries])?;
        self.pending_until = connection.last_insert_rowid();
        self.pending_since.get_or_insert_with(Instant::now);
        Ok(())
    }

    /// Drops a row that is on its way into the table, because a newer one is there. The journal still has the old row until the
    /// fold ends, so the caller has to append the newer one, or a crash would bring the old one back.
    pub(crate) fn drop_folding(&mut self, key: &T::Key) {
        self.folding.remove(key);
    }

    /// Brings the table up to date by so many rows, in the transaction under way.
    pub(crate) fn fold(&mut self, connection: &Connection, most: usize) -> rusqlite::Result<()> {
        self.load(connection)?;
        if self.folding.is_empty() {
            self.folding = std::mem::take(&mut self.pending);
            self.folding_until = self.pending_until;
            self.pending_since = None;
        }
        let mut rows = Vec::with_capacity(most.min(self.folding.len()));
        while rows.len() < most
            && let Some(row) = self.folding.pop_first()
        {
            rows.push(row);
        }
        T::save(connection, &rows)?;
        if self.folding.is_empty() {
            connection.prepare_cached(T::CLEAR)?.execute([self.folding_until])?;
        }
        Ok(())
    }

    /// Folds a part if that is due. More are folded than were appended, so that what waits stays within its bound.
    pub(crate) fn fold_if_due(&mut self, connection: &Connection, appended: usize) -> rusqlite::Result<()> {
        if self.is_due() {
            self.fold(connection, (appended * FOLDED_PER_ROW).max(FOLDED_MIN))
        } else {
            Ok(())
        }
    }

    /// Whether to fold now: the journal was not read yet, a fold is under way, rows have waited for long, or there are many.
    pub(crate) fn is_due(&self) -> bool {
        let is_old = self.pending_since.is_some_and(|since| since.elapsed() >= T::FOLD_AFTER);
        !self.is_loaded || !self.folding.is_empty() || is_old || self.pending.len() >= T::FOLD_AT
    }

    /// How many rows are pending, and how many are on their way.
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
    // Names have 255 characters, which are at most 1,020 bytes, and what is written about them is shorter still.
    let length = u16::try_from(text.len()).expect("texts in journals are short");
    entries.extend_from_slice(&length.to_le_bytes());
    entries.extend_from_slice(text.as_bytes());
}

/// Takes a text off the front.
pub(crate) fn take_text<'e>(entries: &mut &'e [u8]) -> Option<&'e str> {
    let length = u16::from_le_bytes(take_bytes(entries)?);
    let (text, rest) = entries.split_at_checked(usize::from(length))?;
    *entries = rest;
    str::from_utf8(text).ok()
}

/// Takes so many bytes off the front.
pub(crate) fn take_bytes<const N: usize>(entries: &mut &[u8]) -> Option<[u8; N]> {
    let (bytes, rest) = entries.split_first_chunk()?;
    *entries = rest;
    Some(*bytes)
}
