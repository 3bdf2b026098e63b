//! Inserts of many rows. A statement opens its table and every index and closes them again, which takes longer than a row
//! does: so several rows go with one statement.

use rusqlite::{CachedStatement, Connection, ToSql};

/// Rows of one statement.
pub(crate) const ROWS: usize = 16;

/// An insert, of one row and of [`ROWS`] rows.
#[derive(Debug)]
pub(crate) struct Insert {
    one: String,
    many: String,
}

/// An insert that is ready.
pub(crate) struct Inserting<'c> {
    one: CachedStatement<'c>,
    many: CachedStatement<'c>,
}

/// Where the values of a row go.
pub(crate) struct Values<'a, 'c> {
    statement: &'a mut CachedStatement<'c>,
    bound: usize,
}

impl Insert {
    /// `into` is what comes before `VALUES`. It says `OR FAIL`: of a statement that fails, the rows before stay, until they
    /// are undone with everything else of their job. To undo a statement alone SQLite keeps a copy of each page it changes.
    pub(crate) fn new(into: &str, columns: usize) -> Self {
        debug_assert!(into.contains("OR FAIL"));
        let row = format!("({})", vec!["?"; columns].join(", "));
        let values = |rows: usize| format!("{into} VALUES {}", vec![row.as_str(); rows].join(", "));
        Self { one: values(1), many: values(ROWS) }
    }

    pub(crate) fn prepare<'c>(&self, connection: &'c Connection) -> rusqlite::Result<Inserting<'c>> {
        Ok(Inserting {
            one: connection.prepare_cached(&self.one)?,
            many: connection.prepare_cached(&self.many)?,
        })
    }
}

/// The inserts of this crate, for those who look at their plans.
#[cfg(test)]
pub(crate) fn all_inserts() -> Vec<String> {
    let inserts = [&*crate::request::idempotency_journal::INSERT, &*crate::request::submit::INSERT];
    inserts.into_iter().flat_map(|insert| [insert.one.clone(), insert.many.clone()]).collect()
}

impl Inserting<'_> {
    /// Inserts rows in order; `bind` gives the values of one.
    pub(crate) fn insert<T>(
        &mut self,
        rows: &[T],
        bind: impl Fn(&T, &mut Values<'_, '_>) -> rusqlite::Result<()>,
    ) -> rusqlite::Result<()> {
        let (many, rest) = rows.as_chunks::<ROWS>();
        for rows in many {
            insert(&mut self.many, rows, &bind)?;
        }
        for row in rest {
            insert(&mut self.one, std::slice::from_ref(row), &bind)?;
        }
        Ok(())
    }
}

fn insert<T>(
    statement: &mut CachedStatement<'_>,
    rows: &[T],
    bind: impl Fn(&T, &mut Values<'_, '_>) -> rusqlite::Result<()>,
) -> rusqlite::Result<()> {
    let mut values = Values { statement, bound: 0 };
    for row in rows {
        bind(row, &mut values)?;
    }
    values.statement.raw_execute()?;
    Ok(())
}

impl Values<'_, '_> {
    pub(crate) fn bind(&mut self, values: &[&dyn ToSql]) -> rusqlite::Result<()> {
        for value in values {
            self.bound += 1;
            self.statement.raw_bind_parameter(self.bound, value)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rusqlite::params;

    use super::*;

    fn insert_all(connection: &Connection, rows: &[i64]) -> rusqlite::Result<()> {
        let insert = Insert::new("INSERT OR FAIL INTO t (n, twice)", 2);
        insert.prepare(connection)?.insert(rows, |n, values| values.bind(params![n, 2 * n]))
    }

    fn all(connection: &Connection) -> Vec<(i64, i64)> {
        let mut select = connection.prepare("SELECT n, twice FROM t ORDER BY rowid").unwrap();
        let rows = select.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
        rows.collect::<rusqlite::Result<_>>().unwrap()
    }

    #[test]
    fn however_many_rows_there_are_each_is_inserted_once_and_in_order() {
        for count in [0, 1, 15, 16, 17, 32, 40] {
            let connection = Connection::open_in_memory().unwrap();
            connection.execute_batch("CREATE TABLE t (n INTEGER UNIQUE, twice INTEGER)").unwrap();
            let numbers: Vec<i64> = (0..count).rev().collect();
            insert_all(&connection, &numbers).unwrap();
            assert_eq!(all(&connection), numbers.iter().map(|n| (*n, 2 * n)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_row_that_cannot_be_is_an_error() {
        let connection = Connection::open_in_memory().unwrap();
        connection
            .execute_batch("CREATE TABLE t (n INTEGER UNIQUE, twice INTEGER); INSERT INTO t VALUES (9, 0)")
            .unwrap();
        let numbers: Vec<i64> = (0..16).collect();
        assert!(insert_all(&connection, &numbers).is_err());
        assert!(insert_all(&connection, &[9]).is_err());
    }
}
