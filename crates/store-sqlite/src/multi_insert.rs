//! Inserts of many rows. Each execution of a statement opens and closes its table and every index, which takes longer than
//! inserting a row, so one statement inserts several rows.

use rusqlite::{CachedStatement, Connection, ToSql};

const ROWS_PER_STATEMENT: usize = 16;

/// The SQL of an insert, for one row and for [`ROWS_PER_STATEMENT`] rows.
#[derive(Debug)]
pub(crate) struct MultiInsert {
    one: String,
    many: String,
}

pub(crate) struct PreparedInsert<'c> {
    one: CachedStatement<'c>,
    many: CachedStatement<'c>,
}

/// Binds the values of one row after another.
pub(crate) struct RowBinder<'a, 'c> {
    statement: &'a mut CachedStatement<'c>,
    bound: usize,
}

impl MultiInsert {
    /// `into` is the SQL before `VALUES`. It has to say `OR FAIL`: if a row fails, the rows before it stay until the whole
    /// job is rolled back. Otherwise SQLite would copy each page that it changes, to be able to undo the statement alone.
    pub(crate) fn new(into: &str, columns: usize) -> Self {
        debug_assert!(into.contains("OR FAIL"));
        let row = format!("({})", vec!["?"; columns].join(", "));
        let values = |rows: usize| format!("{into} VALUES {}", vec![row.as_str(); rows].join(", "));
        Self { one: values(1), many: values(ROWS_PER_STATEMENT) }
    }

    pub(crate) fn prepare<'c>(&self, connection: &'c Connection) -> rusqlite::Result<PreparedInsert<'c>> {
        Ok(PreparedInsert {
            one: connection.prepare_cached(&self.one)?,
            many: connection.prepare_cached(&self.many)?,
        })
    }
}

/// The SQL of all multi-row inserts, for the test of query plans.
#[cfg(test)]
pub(crate) fn all_inserts() -> Vec<String> {
    let inserts = [&*crate::request::idempotency_journal::INSERT, &*crate::request::submit::INSERT];
    inserts.into_iter().flat_map(|insert| [insert.one.clone(), insert.many.clone()]).collect()
}

impl PreparedInsert<'_> {
    /// Inserts rows in order; `bind` binds the values of one.
    pub(crate) fn insert<T>(
        &mut self,
        rows: &[T],
        bind: impl Fn(&T, &mut RowBinder<'_, '_>) -> rusqlite::Result<()>,
    ) -> rusqlite::Result<()> {
        let (many, rest) = rows.as_chunks::<ROWS_PER_STATEMENT>();
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
    bind: impl Fn(&T, &mut RowBinder<'_, '_>) -> rusqlite::Result<()>,
) -> rusqlite::Result<()> {
    let mut binder = RowBinder { statement, bound: 0 };
    for row in rows {
        bind(row, &mut binder)?;
    }
    binder.statement.raw_execute()?;
    Ok(())
}

impl RowBinder<'_, '_> {
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
        let insert = MultiInsert::new("INSERT OR FAIL INTO t (n, twice)", 2);
        insert.prepare(connection)?.insert(rows, |n, values| values.bind(params![n, 2 * n]))
    }

    fn all(connection: &Connection) -> Vec<(i64, i64)> {
        let mut select = connection.prepare("SELECT n, twice FROM t ORDER BY rowid").unwrap();
        let rows = select.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
        rows.collect::<rusqlite::Result<_>>().unwrap()
    }

    #[test]
    fn any_number_of_rows_is_inserted_once_and_in_order() {
        for count in [0, 1, 15, 16, 17, 32, 40] {
            let connection = Connection::open_in_memory().unwrap();
            connection.execute_batch("CREATE TABLE t (n INTEGER UNIQUE, twice INTEGER)").unwrap();
            let numbers: Vec<i64> = (0..count).rev().collect();
            insert_all(&connection, &numbers).unwrap();
            assert_eq!(all(&connection), numbers.iter().map(|n| (*n, 2 * n)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_row_that_violates_a_constraint_is_an_error() {
        let connection = Connection::open_in_memory().unwrap();
        connection
            .execute_batch("CREATE TABLE t (n INTEGER UNIQUE, twice INTEGER); INSERT INTO t VALUES (9, 0)")
            .unwrap();
        let numbers: Vec<i64> = (0..16).collect();
        assert!(insert_all(&connection, &numbers).is_err());
        assert!(insert_all(&connection, &[9]).is_err());
    }
}
