//! A journal before a table, which makes saving many rows cheap.
//!
//! Rows that come in no order would each change a page of their table, and a commit writes whole pages. So the rows of a large
//! batch are appended together, as one row of a journal, in the commit that decided them, and folded into the table later: in the
//! order of its index, so that one page takes several, only the last of several changes to a row, and a few with each batch, so
//! that nobody waits for many. A crash loses nothing: the journal is read before it is used.
//!
//! Only the writer thread reads and writes here, in the order of its transactions. What a transaction changes here is written down
//! until it is committed, so that a job that fails costs what it did and no more: the journal is read once.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use rusqlite::Connection;

use crate::error::fault;
use crate::writer::Turn;

/// A batch of so few rows is saved in place, unless the journal has older ones.
pub(crate) const IN_PLACE_MAX: usize = 8;
/// How many rows are folded for every one that is appended: more than one, so that every fold ends.
const FOLDED_PER_ROW: usize = 2;
/// How many are folded at least, so that small batches end a fold too.
const FOLDED_MIN: usize = 64;
/// How many are folded between two looks at how long it takes.
const FOLDED_AT_ONCE: usize = 256;

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
    /// How many folds have come to their end.
    folds: u64,
    /// Whether this is what the journal says.
    is_loaded: bool,
    /// What the transaction under way has changed.
    changes: Vec<Change<T::Key, T::Value>>,
}

/// A change of a journal, with what it takes to undo it.
#[derive(Debug)]
enum Change<K, V> {
    /// A row became pending, in the place of another.
    Added(K, Option<V>),
    /// A batch was appended, behind this one.
    Appended { pending_until: i64, pending_since: Option<Instant> },
    /// All that was pending is on its way.
    Began { folding_until: i64, pending_since: Option<Instant> },
    /// Rows are not on their way any more.
    Removed(Vec<(K, V)>),
    /// A fold came to its end.
    Ended,
}

impl<T: JournaledTable> Default for Journal<T> {
    fn default() -> Self {
        Self {
            pending: BTreeMap::new(),
            pending_since: None,
            folding: BTreeMap::new(),
            pending_until: 0,
            folding_until: 0,
            folds: 0,
            is_loaded: false,
            changes: Vec::new(),
        }
    }
}

impl<T: JournaledTable> Journal<T> {
    /// Reads the journal, unless it is known.
    pub(crate) fn load(&mut self, connection: &Connection) -> rusqlite::Result<()> {
        if self.is_loaded {
            return Ok(());
        }
        let (mut pending, mut pending_until) = (BTreeMap::new(), 0);
        let mut statement = connection.prepare_cached(T::READ)?;
        let mut batches = statement.query([])?;
        while let Some(batch) = batches.next()? {
            pending_until = batch.get(0)?;
            let mut entries = batch.get_ref(1)?.as_blob()?;
            while !entries.is_empty() {
                let cut_off = || fault(format!("{} holds a row that is cut off", T::NAME));
                let (key, value) = T::decode(&mut entries).ok_or_else(cut_off)?;
                pending.insert(key, value);
            }
        }
        self.pending_since = (!pending.is_empty()).then(Instant::now);
        (self.pending, self.pending_until) = (pending, pending_until);
        // Nothing was changed before it was read, so this stands whatever becomes of the transaction.
        self.is_loaded = true;
        Ok(())
    }

    /// The transaction under way was committed.
    pub(crate) fn commit(&mut self) {
        self.changes.clear();
    }

    /// How many changes the transaction under way has made, for [`Journal::undo_to`].
    pub(crate) fn mark(&self) -> usize {
        self.changes.len()
    }

    /// Undoes the changes since a mark, the last one first.
    pub(crate) fn undo_to(&mut self, mark: usize) {
        for change in self.changes.drain(mark..).rev() {
            match change {
                Change::Added(key, Some(before)) => drop(self.pending.insert(key, before)),
                Change::Added(key, None) => drop(self.pending.remove(&key)),
                Change::Appended { pending_until, pending_since } => {
                    (self.pending_until, self.pending_since) = (pending_until, pending_since);
                }
                Change::Began { folding_until, pending_since } => {
                    self.pending = std::mem::take(&mut self.folding);
                    (self.folding_until, self.pending_since) = (folding_until, pending_since);
                }
                Change::Removed(rows) => self.folding.extend(rows),
                Change::Ended => self.folds -= 1,
            }
        }
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
        let before = self.pending.insert(key.clone(), value);
        self.changes.push(Change::Added(key, before));
    }

    /// Appends a batch, in the transaction under way.
    pub(crate) fn append(&mut self, connection: &Connection, entries: &[u8]) -> rusqlite::Result<()> {
        if entries.is_empty() {
            return Ok(());
        }
        connection.prepare_cached(T::APPEND)?.execute([entries])?;
        let (pending_until, pending_since) = (self.pending_until, self.pending_since);
        self.changes.push(Change::Appended { pending_until, pending_since });
        self.pending_until = connection.last_insert_rowid();
        self.pending_since.get_or_insert_with(Instant::now);
        Ok(())
    }

    /// Drops a row that is on its way into the table, because a newer one is there. The journal still has the old row until the
    /// fold ends, so the caller has to append the newer one, or a crash would bring the old one back.
    pub(crate) fn drop_folding(&mut self, key: &T::Key) {
        let dropped = self.folding.remove_entry(key);
        self.changes.extend(dropped.map(|row| Change::Removed(vec![row])));
    }

    /// Brings the table up to date by so many rows, in the transaction under way.
    pub(crate) fn fold(&mut self, connection: &Connection, most: usize) -> rusqlite::Result<()> {
        self.load(connection)?;
        if self.folding.is_empty() {
            let (folding_until, pending_since) = (self.folding_until, self.pending_since.take());
            self.changes.push(Change::Began { folding_until, pending_since });
            self.folding = std::mem::take(&mut self.pending);
            self.folding_until = self.pending_until;
        }
        let mut rows = Vec::with_capacity(most.min(self.folding.len()));
        while rows.len() < most
            && let Some(row) = self.folding.pop_first()
        {
            rows.push(row);
        }
        // Written down before they are saved, so that none is lost whatever becomes of that.
        self.changes.push(Change::Removed(rows));
        if let Some(Change::Removed(rows)) = self.changes.last() {
            T::save(connection, rows)?;
        }
        if self.folding.is_empty() {
            connection.prepare_cached(T::CLEAR)?.execute([self.folding_until])?;
            self.folds += 1;
            self.changes.push(Change::Ended);
        }
        Ok(())
    }

    /// Brings the table up to date for one turn. Breaks off when the table has what the journal had at the first turn, which
    /// `target` is there to remember: what comes meanwhile is not waited for, so that this ends under any load.
    pub(crate) fn fold_for_a_turn(
        &mut self,
        connection: &Connection,
        target: &mut Option<u64>,
        turn: &Turn,
    ) -> rusqlite::Result<ControlFlow<()>> {
        self.load(connection)?;
        let folds_left = u64::from(!self.pending.is_empty()) + u64::from(!self.folding.is_empty());
        let target = *target.get_or_insert(self.folds + folds_left);
        while self.is_behind() && self.folds < target {
            if !turn.goes_on() {
                return Ok(ControlFlow::Continue(()));
            }
            self.fold(connection, FOLDED_AT_ONCE)?;
        }
        Ok(ControlFlow::Break(()))
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

#[cfg(test)]
mod tests;
