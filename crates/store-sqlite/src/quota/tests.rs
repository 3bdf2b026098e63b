//! Counts in the table and the journal, through folds, new limits and rolled back transactions.

use super::*;

const PENDING_MAX: usize = QuotaCounts::FOLD_AT;

fn database() -> Connection {
    let mut connection = Connection::open_in_memory().unwrap();
    crate::migrate::run(&mut connection).unwrap();
    for n in 0..20 {
        let insert = "INSERT INTO rate_limit_store VALUES (?1, 100, 1, 0, 0, 0)";
        connection.execute(insert, [format!("user-{n}")]).unwrap();
    }
    connection
}

fn loaded(connection: &Connection) -> QuotaRows {
    let mut counts = QuotaRows::default();
    counts.refresh(connection).unwrap();
    counts
}

fn users(count: usize) -> Vec<UserId> {
    (0..count).map(|n| UserId::parse(format!("user-{n}")).unwrap()).collect()
}

/// Adds one to the count of each user.
fn count(counts: &mut QuotaRows, connection: &Connection, users: &[UserId]) {
    let mut changed = Vec::new();
    for user in users {
        let mut row = counts.find(connection, user).unwrap().unwrap();
        row.current_count += 1;
        changed.push((user, row));
    }
    counts.save(connection, &changed).unwrap();
}

fn in_table(connection: &Connection, user: &str) -> u32 {
    let select = "SELECT current_count FROM rate_limit_store WHERE user_id = ?1";
    connection.query_row(select, [user], |row| row.get(0)).unwrap()
}

#[test]
fn a_small_batch_is_in_the_table_at_once() {
    let connection = database();
    let mut counts = loaded(&connection);
    count(&mut counts, &connection, &users(2));
    assert_eq!(in_table(&connection, "user-1"), 1);
    assert!(!counts.has_unfolded_rows());
}

#[test]
fn a_large_batch_is_counted_at_once_and_in_the_table_after_a_fold() {
    let connection = database();
    let mut counts = loaded(&connection);
    count(&mut counts, &connection, &users(20));
    // A small batch behind it goes into the journal, too: its last entry counts.
    count(&mut counts, &connection, &users(1));
    assert_eq!(in_table(&connection, "user-0"), 0);
    assert_eq!(counts.find(&connection, &users(1)[0]).unwrap().unwrap().current_count, 2);
    counts.fold(&connection, usize::MAX).unwrap();
    assert_eq!((in_table(&connection, "user-0"), in_table(&connection, "user-19")), (2, 1));
    assert!(!counts.has_unfolded_rows());
}

#[test]
fn rolled_back_counts_are_dropped_and_other_rows_stay_cached() {
    // 2: saved in the table only. 20: saved in the journal.
    for before in [2, 20] {
        let connection = database();
        let mut counts = loaded(&connection);
        count(&mut counts, &connection, &users(before));
        counts.commit();
        connection.execute_batch("BEGIN").unwrap();
        count(&mut counts, &connection, &users(3));
        connection.execute_batch("SAVEPOINT job").unwrap();
        let savepoint = counts.savepoint();
        count(&mut counts, &connection, &users(12));
        let fresh = Quota::new(QuotaLimits::new(5, 1).unwrap(), Timestamp::from_seconds(9));
        counts.put_configured(&connection, &users(1)[0], fresh).unwrap();
        connection.execute_batch("ROLLBACK TO job").unwrap();
        counts.roll_back_to(savepoint);
        assert_eq!(counts.find(&connection, &users(1)[0]).unwrap().unwrap().current_count, 2);
        let last = UserId::parse("user-19").unwrap();
        assert_eq!(counts.cache.contains_key(&last), before == 20, "unchanged rows stay cached");
        connection.execute_batch("ROLLBACK").unwrap();
        counts.roll_back_to(QuotaSavepoint::default());
        assert_eq!(counts.find(&connection, &users(1)[0]).unwrap().unwrap().current_count, 1);
        counts.fold(&connection, usize::MAX).unwrap();
        assert_eq!(
            (in_table(&connection, "user-1"), in_table(&connection, "user-2")),
            (1, u32::from(before > 2))
        );
    }
}

#[test]
fn new_limits_are_not_overwritten_by_an_older_count() {
    let connection = database();
    let mut counts = loaded(&connection);
    count(&mut counts, &connection, &users(20));
    let fresh = Quota::new(QuotaLimits::new(5, 1).unwrap(), Timestamp::from_seconds(9));
    connection
        .execute("UPDATE rate_limit_store SET rate_limit = 5, current_count = 0 WHERE user_id = 'user-0'", [])
        .unwrap();
    counts.put_configured(&connection, &users(1)[0], fresh).unwrap();
    let mut restarted = loaded(&connection);
    restarted.fold(&connection, usize::MAX).unwrap();
    assert_eq!(in_table(&connection, "user-0"), 0);
}

#[test]
fn a_fold_in_parts_loses_no_count_that_arrives_between_them() {
    let connection = database();
    let mut counts = loaded(&connection);
    count(&mut counts, &connection, &users(20));
    counts.fold(&connection, 5).unwrap();
    // The first user is folded already, the last is not.
    let first = UserId::parse("user-0").unwrap();
    let last = UserId::parse("user-9").unwrap();
    assert_eq!((in_table(&connection, "user-0"), in_table(&connection, "user-9")), (1, 0));
    count(&mut counts, &connection, &[first.clone(), last.clone()]);
    for mut counts in [counts, loaded(&connection)] {
        assert_eq!(counts.find(&connection, &first).unwrap().unwrap().current_count, 2);
        assert_eq!(counts.find(&connection, &last).unwrap().unwrap().current_count, 2);
        assert_eq!(counts.find(&connection, &users(19)[18]).unwrap().unwrap().current_count, 1);
    }
}

#[test]
fn new_limits_in_the_middle_of_a_fold_are_not_undone_by_it() {
    let fresh = Quota::new(QuotaLimits::new(5, 1).unwrap(), Timestamp::from_seconds(9));
    // The first user is folded already, the second is not.
    for user in ["user-0", "user-9"] {
        let connection = database();
        let mut counts = loaded(&connection);
        (0..9).for_each(|_| count(&mut counts, &connection, &users(20)));
        counts.fold(&connection, 5).unwrap();
        let configure = "UPDATE rate_limit_store SET rate_limit = 5, current_count = 0 WHERE user_id = ?1";
        connection.execute(configure, [user]).unwrap();
        counts.put_configured(&connection, &UserId::parse(user).unwrap(), fresh).unwrap();
        let mut restarted = loaded(&connection);
        while restarted.has_unfolded_rows() {
            restarted.fold(&connection, 3).unwrap();
        }
        assert_eq!(in_table(&connection, user), 0);
        while counts.has_unfolded_rows() {
            counts.fold(&connection, 3).unwrap();
        }
        assert_eq!((in_table(&connection, user), in_table(&connection, "user-19")), (0, 9));
    }
}

#[test]
fn new_limits_of_the_last_user_of_a_fold_do_not_bring_old_counts_back() {
    let connection = database();
    let mut counts = loaded(&connection);
    (0..9).for_each(|_| count(&mut counts, &connection, &users(20)));
    counts.fold(&connection, 19).unwrap();
    let last = counts.journal.folding_keys();
    let [last] = last.as_slice() else { panic!("one row should be left to fold: {last:?}") };
    let fresh = Quota::new(QuotaLimits::new(5, 1).unwrap(), Timestamp::from_seconds(9));
    counts.put_configured(&connection, last, fresh).unwrap();
    // A count of another user, saved afterwards.
    let other = users(20).into_iter().find(|user| user != last).unwrap();
    count(&mut counts, &connection, std::slice::from_ref(&other));
    let mut restarted = loaded(&connection);
    while restarted.has_unfolded_rows() {
        restarted.fold(&connection, 3).unwrap();
    }
    assert_eq!(in_table(&connection, other.as_str()), 10, "the last count is not lost");
}

#[test]
fn the_cache_holds_no_more_rows_than_the_bound() {
    let connection = database();
    let mut counts = loaded(&connection);
    let row = Quota::new(QuotaLimits::new(5, 1).unwrap(), Timestamp::from_seconds(9));
    // New limits add rows to the cache without a fold.
    for user in users(CACHED_ROWS_MAX + 10) {
        counts.put_configured(&connection, &user, row).unwrap();
        assert!(counts.cache.len() <= CACHED_ROWS_MAX);
    }
}

#[test]
fn no_more_counts_wait_for_the_table_than_the_bound() {
    let connection = database();
    let mut counts = loaded(&connection);
    let row = Quota::new(QuotaLimits::new(5, 1).unwrap(), Timestamp::from_seconds(9));
    let users = users(PENDING_MAX * 4);
    for batch in users.chunks(512) {
        let changed: Vec<_> = batch.iter().map(|user| (user, row)).collect();
        counts.save(&connection, &changed).unwrap();
        let (pending, folding) = counts.journal.sizes();
        assert!(pending <= PENDING_MAX + 512 && folding <= PENDING_MAX + 512);
    }
}

#[test]
fn no_more_counts_wait_for_the_table_than_the_bound_when_limits_are_new() {
    let connection = database();
    let mut counts = loaded(&connection);
    count(&mut counts, &connection, &users(20));
    let row = Quota::new(QuotaLimits::new(5, 1).unwrap(), Timestamp::from_seconds(9));
    for user in users(PENDING_MAX * 2) {
        counts.put_configured(&connection, &user, row).unwrap();
        assert!(counts.journal.sizes().0 <= PENDING_MAX + 1);
    }
}

#[test]
fn a_truncated_journal_is_an_error_and_not_a_wrong_count() {
    let connection = database();
    connection.execute("INSERT INTO quota_journal (entries) VALUES (x'0500616c')", []).unwrap();
    assert!(QuotaRows::default().refresh(&connection).is_err());
}
