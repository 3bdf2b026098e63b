//! Migrates the file to the current schema, one numbered step at a time, each in its own transaction.

use rusqlite::{Connection, TransactionBehavior};
use weir_store::{Error, Result};

use crate::ENGINE;
use crate::error::classify;

/// In order. A released step is never changed.
const STEPS: &[&str] = &[
    include_str!("../migrations/0001_quota.sql"),
    include_str!("../migrations/0002_queue.sql"),
    include_str!("../migrations/0003_heartbeat.sql"),
    include_str!("../migrations/0004_quota_journal.sql"),
    include_str!("../migrations/0005_slot.sql"),
    include_str!("../migrations/0006_slot_due.sql"),
    include_str!("../migrations/0007_request.sql"),
    include_str!("../migrations/0008_sale.sql"),
    include_str!("../migrations/0009_tier.sql"),
    include_str!("../migrations/0010_request_compact.sql"),
    include_str!("../migrations/0011_queue_pack.sql"),
    include_str!("../migrations/0012_request_journal.sql"),
    include_str!("../migrations/0013_clock.sql"),
    include_str!("../migrations/0014_request_key.sql"),
    include_str!("../migrations/0015_sealing_key.sql"),
    include_str!("../migrations/0016_tier_spent_journal.sql"),
    include_str!("../migrations/0017_slot_generation.sql"),
    include_str!("../migrations/0018_request_trace.sql"),
    include_str!("../migrations/0019_request_index.sql"),
    include_str!("../migrations/0020_dead_letter_topic.sql"),
    include_str!("../migrations/0021_row_count.sql"),
    include_str!("../migrations/0022_request_turns.sql"),
    include_str!("../migrations/0023_tier_subscription.sql"),
    include_str!("../migrations/0024_sale_end.sql"),
    include_str!("../migrations/0025_tier_concurrency.sql"),
    include_str!("../migrations/0026_request_control.sql"),
    include_str!("../migrations/0027_quota_idempotency.sql"),
    include_str!("../migrations/0028_dead_letter_key.sql"),
];

pub(crate) fn run(connection: &mut Connection) -> Result<()> {
    let done: usize =
        connection.pragma_query_value(None, "user_version", |row| row.get(0)).map_err(classify)?;
    if done > STEPS.len() {
        let advice = format!(
            "the data directory has schema version {done}, but this weir supports at most {}: start the weir that wrote \
             it, or a newer one",
            STEPS.len()
        );
        return Err(Error::failed(ENGINE, advice));
    }
    for (step, sql) in STEPS.iter().enumerate().skip(done) {
        apply(connection, step + 1, sql).map_err(classify)?;
    }
    Ok(())
}

fn apply(connection: &mut Connection, version: usize, sql: &str) -> rusqlite::Result<()> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    transaction.execute_batch(sql)?;
    transaction.pragma_update(None, "user_version", version)?;
    transaction.commit()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_run_once_and_a_newer_file_is_refused() {
        let mut connection = Connection::open_in_memory().unwrap();
        run(&mut connection).unwrap();
        run(&mut connection).unwrap();
        connection.pragma_update(None, "user_version", 999).unwrap();
        assert!(!run(&mut connection).unwrap_err().is_transient());
    }

    #[test]
    fn slot_counters_of_an_older_file_stay_in_use() {
        let mut connection = Connection::open_in_memory().unwrap();
        for (step, sql) in STEPS.iter().enumerate().take(15) {
            apply(&mut connection, step + 1, sql).unwrap();
        }
        let old_rows = "
            INSERT INTO rate_limit_config VALUES ('c', 1, 2, 'PT4S', 4000, 1, 0);
            INSERT INTO rate_limit_window_counter VALUES ('c', 0, 2, 'CLOSED'), ('c', 4000000, 0, 'OPEN');";
        connection.execute_batch(old_rows).unwrap();
        run(&mut connection).unwrap();
        let in_use = "SELECT count(*) FROM rate_limit_config JOIN rate_limit_window_counter USING (config_name, generation)";
        assert_eq!(connection.query_row(in_use, [], |row| row.get(0)), Ok(2));
    }

    #[test]
    fn jobs_and_keys_of_an_older_file_are_migrated() {
        let mut connection = Connection::open_in_memory().unwrap();
        for (step, sql) in STEPS.iter().enumerate().take(9) {
            apply(&mut connection, step + 1, sql).unwrap();
        }
        let old_rows = "
            INSERT INTO request_record (request_id, tenant_id, request_type, status, payload, payload_key_id, created_at, updated_at)
            VALUES ('a', 't', 'x', 'IN_PROGRESS', x'01', 'k', 1, 1), ('b', 't', 'x', 'COMPLETED', x'01', 'k', 1, 1);
            INSERT INTO request_job (request_id, downstream, claimable_at, is_leased, token, attempts) VALUES ('a', 'd', 7, 1, 3, 1);
            INSERT INTO idempotency_record VALUES ('t', 'late', x'02', 'b', 20), ('t', 'soon', x'01', 'a', 10);";
        connection.execute_batch(old_rows).unwrap();
        run(&mut connection).unwrap();
        let rows = |sql: &str| -> Vec<String> {
            let mut statement = connection.prepare(sql).unwrap();
            let rows = statement.query_map([], |row| row.get(0)).unwrap();
            rows.collect::<rusqlite::Result<_>>().unwrap()
        };
        let jobs = "
            SELECT request_id || downstream || claimable_at || is_leased || token FROM request_record
            WHERE claimable_at IS NOT NULL";
        assert_eq!(rows(jobs), ["ad713"]);
        let keys = "SELECT tenant_id || idempotency_key || request_id || expires_at FROM idempotency_record ORDER BY id";
        assert_eq!(rows(keys), ["tsoona10", "tlateb20"], "in the order in which they expire");
    }
}
