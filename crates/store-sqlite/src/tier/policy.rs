//! The rows of tier policies.

use std::ops::ControlFlow;

use rusqlite::{Connection, OptionalExtension, Row, params};
use weir_core::PolicyName;
use weir_store::tier::{Match, OnOutage, Origin, POLICIES_MAX, Policy, PolicySpec};

use super::spent::DeletedScope;
use super::{SpentJournal, permit};
use crate::error::fault;
use crate::writer::WriterTurn;

/// Keys deleted between two checks of the turn.
const DELETE_CHUNK: usize = 128;

const ALL: &str = "
    SELECT scope, name, kind, amount, refill, period_ms, shadow, on_outage, match_domain, match_entries
    FROM tier_policy ORDER BY name";
const ONE: &str = "
    SELECT scope, name, kind, amount, refill, period_ms, shadow, on_outage, match_domain, match_entries
    FROM tier_policy WHERE name = ?1";
const COUNT_OTHERS: &str = "
    SELECT (SELECT count(*) FROM tier_policy WHERE name <> ?1) + (SELECT count(*) FROM tier_concurrency WHERE name <> ?1)";
const OF_OPERATOR: &str = "
    SELECT 1 FROM tier_policy WHERE name = ?1 AND origin = 'operator'
    UNION ALL SELECT 1 FROM tier_concurrency WHERE name = ?1 AND origin = 'operator'";
const PUT: &str = "
    INSERT INTO tier_policy
        (name, kind, amount, refill, period_ms, shadow, on_outage, match_domain, match_entries, origin)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)
    ON CONFLICT (name) DO UPDATE SET
        kind = excluded.kind, amount = excluded.amount, refill = excluded.refill, period_ms = excluded.period_ms,
        shadow = excluded.shadow, on_outage = excluded.on_outage, match_domain = excluded.match_domain,
        match_entries = excluded.match_entries, origin = excluded.origin
    WHERE excluded.origin = 'operator' OR tier_policy.origin = 'file'";
const DELETE: &str = "DELETE FROM tier_policy WHERE name = ?1 RETURNING scope";
const DELETE_SPENT: &str = "
    DELETE FROM tier_spent WHERE scope = ?1 AND key IN (SELECT key FROM tier_spent WHERE scope = ?1 LIMIT ?2)";

pub(super) fn all(connection: &Connection) -> rusqlite::Result<Vec<Policy>> {
    connection.prepare_cached(ALL)?.query_map([], read)?.collect()
}

pub(super) fn put(
    connection: &Connection,
    name: &PolicyName,
    spec: &PolicySpec,
    origin: Origin,
) -> rusqlite::Result<Option<Policy>> {
    if !has_room(connection, name)? {
        return Ok(None);
    }
    if origin == Origin::Operator || !is_of_operator(connection, name)? {
        permit::delete(connection, name)?;
        insert(connection, name, spec, origin)?;
    }
    connection.prepare_cached(ONE)?.query_row([name.as_str()], read).optional()
}

/// Whether there are few enough other policies of any kind.
pub(super) fn has_room(connection: &Connection, name: &PolicyName) -> rusqlite::Result<bool> {
    let others: usize =
        connection.prepare_cached(COUNT_OTHERS)?.query_row([name.as_str()], |row| row.get(0))?;
    Ok(others < POLICIES_MAX)
}

/// Whether an operator has put the policy of this name, of any kind.
pub(super) fn is_of_operator(connection: &Connection, name: &PolicyName) -> rusqlite::Result<bool> {
    connection.prepare_cached(OF_OPERATOR)?.exists([name.as_str()])
}

/// Deletes the policy that one of another kind replaces. What was spent of it is removed once it no longer counts.
pub(super) fn delete_replaced(connection: &Connection, name: &PolicyName) -> rusqlite::Result<()> {
    let mut delete = connection.prepare_cached(DELETE)?;
    delete.query_row([name.as_str()], |_| Ok(())).optional().map(drop)
}

fn insert(
    connection: &Connection,
    name: &PolicyName,
    spec: &PolicySpec,
    origin: Origin,
) -> rusqlite::Result<()> {
    let (kind, amount, refill, ms) = spec.limit_columns();
    let (domain, entries) =
        (spec.matches.as_ref().map(|m| m.domain.as_str()), spec.matches.as_ref().map(Match::entries_text));
    let values = params![
        name.as_str(),
        kind,
        amount,
        refill,
        ms,
        spec.shadow,
        spec.on_outage.as_str(),
        domain,
        entries,
        origin.as_str()
    ];
    connection.prepare_cached(PUT)?.execute(values).map(drop)
}

/// The job that deletes a policy. Its first turn deletes the policy itself, so that nothing is allowed by it from that
/// commit on; later turns delete what its keys have spent. Scope numbers are never reused, so rows that a crash leaves
/// belong to no policy, and are removed once they no longer count.
pub(super) struct DeleteJob {
    name: PolicyName,
    /// The scope of the policy, once its row is deleted.
    scope: Option<u32>,
    /// Set once that deletion is committed.
    deleted_scope: Option<DeletedScope>,
    /// How far the journal has to be folded.
    fold_target: Option<u64>,
}

impl DeleteJob {
    pub(super) const fn new(name: PolicyName) -> Self {
        Self { name, scope: None, deleted_scope: None, fold_target: None }
    }

    pub(super) fn run_turn(
        &mut self,
        connection: &Connection,
        spent: &mut SpentJournal,
        turn: &WriterTurn,
    ) -> rusqlite::Result<ControlFlow<bool>> {
        let Some(scope) = self.scope else {
            let find = |row: &Row<'_>| row.get(0);
            self.scope =
                connection.prepare_cached(DELETE)?.query_row([self.name.as_str()], find).optional()?;
            let next =
                if self.scope.is_some() { ControlFlow::Continue(()) } else { ControlFlow::Break(false) };
            return Ok(next);
        };
        // Only now is the deletion committed. Journal rows of the policy's keys would come back later, so they are folded
        // first, and no further rows of the scope are saved.
        self.deleted_scope.get_or_insert_with(|| spent.reject_scope(scope));
        if spent.fold_for_one_turn(connection, &mut self.fold_target, turn)?.is_continue() {
            return Ok(ControlFlow::Continue(()));
        }
        let mut delete_spent = connection.prepare_cached(DELETE_SPENT)?;
        while turn.has_time() {
            if delete_spent.execute(params![scope, DELETE_CHUNK])? < DELETE_CHUNK {
                return Ok(ControlFlow::Break(true));
            }
        }
        Ok(ControlFlow::Continue(()))
    }
}

fn read(row: &Row<'_>) -> rusqlite::Result<Policy> {
    let limit =
        PolicySpec::limit_from_columns(row.get_ref(2)?.as_str()?, row.get(3)?, row.get(4)?, row.get(5)?);
    let on_outage = OnOutage::parse(row.get_ref(7)?.as_str()?);
    let (domain, entries): (Option<String>, Option<String>) = (row.get(8)?, row.get(9)?);
    let spec = PolicySpec {
        limit: limit.map_err(fault)?,
        shadow: row.get(6)?,
        on_outage: on_outage.ok_or_else(|| fault("a policy has an unknown on_outage"))?,
        matches: domain.map(|domain| Match::parse(&domain, entries.as_deref().unwrap_or_default())),
    };
    let name = PolicyName::parse(row.get_ref(1)?.as_str()?).map_err(fault)?;
    Ok(Policy::new(name, row.get(0)?, spec))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use weir_core::tier::{FixedWindow, Limit, LimitUsage};
    use weir_store::tier::{SpentRecord, SpentRow};

    use super::*;

    #[test]
    fn there_are_no_more_policies_than_the_bound() {
        let mut connection = Connection::open_in_memory().unwrap();
        crate::migrate::run(&mut connection).unwrap();
        let fill = "
            WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < ?1)
            INSERT INTO tier_policy (name, kind, amount, refill, period_ms, shadow, on_outage, origin)
            SELECT 'policy-' || n, 'token_bucket', 5, 5, 60000, 0, 'local', 'operator' FROM n";
        connection.execute(fill, [POLICIES_MAX]).unwrap();
        let existing = PolicyName::parse("policy-1").unwrap();
        let spec = connection.query_row(ONE, [existing.as_str()], read).unwrap().spec;
        let new = PolicyName::parse("new").unwrap();
        assert!(put(&connection, &new, &spec, Origin::Operator).unwrap().is_none());
        assert!(put(&connection, &existing, &spec, Origin::Operator).unwrap().is_some());
    }

    fn rows(scope: u32, amount: i64, count: usize) -> Vec<SpentRow> {
        let limit = Limit::FixedWindow(FixedWindow::new(1_000, Duration::from_secs(60)).unwrap());
        let record = SpentRecord::of_limit(&limit, LimitUsage(amount, 1, 0));
        let row = |n| SpentRow { scope, key: format!("key-{n:06}"), record, saved_at: None };
        (0..count).map(row).collect()
    }

    #[test]
    fn a_deletion_ends_under_load_and_leaves_no_rows_of_its_policy() {
        let mut connection = Connection::open_in_memory().unwrap();
        crate::migrate::run(&mut connection).unwrap();
        let policy = "
            INSERT INTO tier_policy (scope, name, kind, amount, refill, period_ms, shadow, on_outage, origin)
            VALUES (7, 'p', 'token_bucket', 5, 5, 60000, 0, 'local', 'operator')";
        connection.execute(policy, []).unwrap();
        let mut spent = SpentJournal::default();
        spent.save(&connection, rows(7, 1, 2_000)).unwrap();
        let mut deletion = DeleteJob::new(PolicyName::parse("p").unwrap());
        let mut turns: u16 = 0;
        // Between two turns more rows are saved than one turn folds or deletes.
        while deletion
            .run_turn(&connection, &mut spent, &WriterTurn::begin(Duration::ZERO))
            .unwrap()
            .is_continue()
        {
            turns += 1;
            assert!(turns < 100, "the deletion must end");
            spent.save(&connection, rows(7, i64::from(turns), 1_000)).unwrap();
            spent.save(&connection, rows(8, i64::from(turns), 1_000)).unwrap();
        }
        while spent.has_unfolded_rows() {
            spent.fold(&connection, 1_000).unwrap();
        }
        let rows_left = super::super::spent::load(&connection, None, 10_000).unwrap();
        assert_eq!(rows_left, rows(8, i64::from(turns), 1_000));
        assert!(turns > 5);
        drop(deletion);
        spent.save(&connection, rows(7, 1, 1)).unwrap();
        assert_eq!(
            super::super::spent::load(&connection, None, 1).unwrap(),
            rows(7, 1, 1),
            "saves are accepted again"
        );
    }

    #[test]
    fn rows_of_a_policy_are_saved_after_its_deletion_failed_in_any_turn() {
        let mut connection = Connection::open_in_memory().unwrap();
        crate::migrate::run(&mut connection).unwrap();
        let policy = "
            INSERT INTO tier_policy (scope, name, kind, amount, refill, period_ms, shadow, on_outage, origin)
            VALUES (7, 'p', 'token_bucket', 5, 5, 60000, 0, 'local', 'operator')";
        connection.execute(policy, []).unwrap();
        let mut spent = SpentJournal::default();
        let mut deletion = DeleteJob::new(PolicyName::parse("p").unwrap());
        // The first turn is rolled back with its group: the policy still exists.
        connection.execute_batch("BEGIN").unwrap();
        assert!(
            deletion
                .run_turn(&connection, &mut spent, &WriterTurn::begin(Duration::ZERO))
                .unwrap()
                .is_continue()
        );
        connection.execute_batch("ROLLBACK").unwrap();
        drop(deletion);
        assert_eq!(all(&connection).unwrap().len(), 1);
        spent.save(&connection, rows(7, 1, 1)).unwrap();
        assert_eq!(super::super::spent::load(&connection, None, 10).unwrap(), rows(7, 1, 1));
        // A later turn never starts, because the database is locked: the job is dropped.
        spent.save(&connection, rows(7, 1, 2_000)).unwrap();
        let mut deletion = DeleteJob::new(PolicyName::parse("p").unwrap());
        for _ in 0..2 {
            assert!(
                deletion
                    .run_turn(&connection, &mut spent, &WriterTurn::begin(Duration::ZERO))
                    .unwrap()
                    .is_continue()
            );
        }
        drop(deletion);
        assert_eq!(all(&connection).unwrap(), [], "the policy itself was deleted in the first turn");
    }
}
