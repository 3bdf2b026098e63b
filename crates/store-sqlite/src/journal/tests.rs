//! Journals whose transaction is rolled back, in whole or in part, and folds under load.

use super::*;

const KEYS: u16 = 40;

#[derive(Debug)]
struct Numbers;

impl JournaledTable for Numbers {
    type Key = u16;
    type Value = u8;

    const NAME: &'static str = "journal";
    const APPEND: &'static str = "INSERT INTO journal (entries) VALUES (?1)";
    const READ: &'static str = "SELECT id, entries FROM journal ORDER BY id";
    const CLEAR: &'static str = "DELETE FROM journal WHERE id <= ?1";
    const FOLD_AT: usize = 30;
    const FOLD_AFTER: Duration = Duration::MAX;

    fn encode(key: &u16, value: &u8, entries: &mut Vec<u8>) {
        entries.extend(key.to_le_bytes());
        entries.push(*value);
    }

    fn decode(entries: &mut &[u8]) -> Option<(u16, u8)> {
        take_bytes(entries).map(|[low, high, value]| (u16::from_le_bytes([low, high]), value))
    }

    fn save(connection: &Connection, rows: &[(u16, u8)]) -> rusqlite::Result<()> {
        let mut save = connection.prepare_cached("INSERT OR REPLACE INTO numbers VALUES (?1, ?2)")?;
        rows.iter().try_for_each(|row| save.execute(*row).map(drop))
    }
}

fn database() -> Connection {
    let connection = Connection::open_in_memory().unwrap();
    let tables = "
        CREATE TABLE journal (id INTEGER NOT NULL PRIMARY KEY, entries BLOB NOT NULL);
        CREATE TABLE numbers (key INTEGER PRIMARY KEY, value INTEGER NOT NULL)";
    connection.execute_batch(tables).unwrap();
    connection
}

fn loaded(connection: &Connection) -> Journal<Numbers> {
    let mut journal = Journal::default();
    journal.load(connection).unwrap();
    journal
}

fn append(
    journal: &mut Journal<Numbers>,
    connection: &Connection,
    rows: impl IntoIterator<Item = (u16, u8)>,
) {
    let mut entries = Vec::new();
    rows.into_iter().for_each(|(key, value)| journal.add_row(key, value, &mut entries));
    journal.append(connection, &entries).unwrap();
}

/// Every key's current value: from the journal, else from the table.
fn values(journal: &Journal<Numbers>, connection: &Connection) -> Vec<Option<u8>> {
    let in_table = |key: u16| {
        let mut find = connection.prepare_cached("SELECT value FROM numbers WHERE key = ?1").unwrap();
        find.query_row([key], |row| row.get(0)).ok()
    };
    (0..KEYS).map(|key| journal.get(&key).copied().or_else(|| in_table(key))).collect()
}

/// Makes random changes, as one job may.
fn change(journal: &mut Journal<Numbers>, connection: &Connection, random: &mut fastrand::Rng) {
    for _ in 0..random.usize(0..4) {
        match random.u8(0..4) {
            0 => journal.fold(connection, random.usize(0..20)).unwrap(),
            1 => {
                let key = random.u16(0..KEYS);
                journal.drop_folding(&key);
                append(journal, connection, [(key, random.u8(..))]);
            }
            _ => {
                let rows: Vec<_> =
                    (0..random.usize(1..12)).map(|_| (random.u16(0..KEYS), random.u8(..))).collect();
                append(journal, connection, rows);
            }
        }
    }
}

#[test]
fn after_a_rollback_a_journal_equals_one_that_is_loaded_again() {
    for seed in 0..200 {
        let (connection, mut random) = (database(), fastrand::Rng::with_seed(seed));
        let mut journal = loaded(&connection);
        for _group in 0..12 {
            connection.execute_batch("BEGIN").unwrap();
            for _job in 0..random.usize(1..5) {
                connection.execute_batch("SAVEPOINT job").unwrap();
                let savepoint = journal.savepoint();
                change(&mut journal, &connection, &mut random);
                if random.bool() {
                    connection.execute_batch("ROLLBACK TO job").unwrap();
                    journal.roll_back_to(savepoint);
                }
                connection.execute_batch("RELEASE job").unwrap();
            }
            if random.bool() {
                connection.execute_batch("COMMIT").unwrap();
                journal.commit();
            } else {
                connection.execute_batch("ROLLBACK").unwrap();
                journal.roll_back_to(0);
            }
            assert_eq!(journal.savepoint(), 0, "the undo log is empty between transactions");
            let reloaded = loaded(&connection);
            assert_eq!(values(&journal, &connection), values(&reloaded, &connection), "seed {seed}");
        }
        let expected = values(&journal, &connection);
        while journal.has_unfolded_rows() {
            journal.fold(&connection, 7).unwrap();
        }
        assert_eq!(values(&journal, &connection), expected, "seed {seed}");
        assert_eq!(values(&loaded(&connection), &connection), expected, "seed {seed}");
    }
}

#[test]
fn rows_whose_save_failed_stay_unfolded() {
    let connection = database();
    let mut journal = loaded(&connection);
    append(&mut journal, &connection, (0..20).map(|key| (key, 1)));
    journal.commit();
    connection.execute_batch("ALTER TABLE numbers RENAME TO elsewhere").unwrap();
    assert!(journal.fold(&connection, 5).is_err());
    journal.roll_back_to(0);
    assert_eq!(journal.sizes(), (20, 0));
    connection.execute_batch("ALTER TABLE elsewhere RENAME TO numbers").unwrap();
    journal.fold(&connection, 20).unwrap();
    assert_eq!(values(&loaded(&connection), &connection)[..20], [Some(1); 20]);
}

#[test]
fn a_fold_in_turns_ends_with_the_rows_of_its_first_turn_under_any_load() {
    let connection = database();
    let mut journal = loaded(&connection);
    append(&mut journal, &connection, (0..1_000).map(|key| (key, 1)));
    journal.fold(&connection, 3).unwrap();
    append(&mut journal, &connection, (0..600).map(|key| (key, 2)));
    let (mut target, mut turns) = (None, 0);
    let turn = || WriterTurn::begin(Duration::ZERO);
    while journal.fold_for_one_turn(&connection, &mut target, &turn()).unwrap().is_continue() {
        turns += 1;
        assert!(turns < 20, "it must not wait for later rows");
        append(&mut journal, &connection, (0..300).map(|key| (2_000 + key, turns)));
    }
    let in_table = "SELECT count(*) FILTER (WHERE value = 1), count(*) FILTER (WHERE value = 2) FROM numbers WHERE key < 2000";
    let in_table: (i64, i64) =
        connection.query_row(in_table, [], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
    assert_eq!(in_table, (400, 600));
    assert!(turns > 2 && journal.has_unfolded_rows(), "later rows are still unfolded");
}
